"""A model that isn't there yet. The engine decides how it comes into being.

An engine that keeps whole models asks for one. An engine that spreads the model takes it part by
part and divides each part as soon as it is real, so that no rank ever holds more than its share and
one part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn


class ModelBuilder(Protocol):
    """Builds one model, adapters included. Both ways give the same weights, bit for bit."""

    def whole(self, device: str) -> nn.Module:
        """The whole model on `device`."""
        ...

    def in_parts(
        self,
        device: str,
        divide: Callable[[nn.Module], None],
        left_out: Callable[[nn.Module], Collection[nn.Module]] | None = None,
    ) -> nn.Module:
        """The model, built part by part.

        First the skeleton is made, without memory. Then each decoder layer in turn, and at last
        the root with what lies outside the layers (embeddings, final norm, output head), gets its
        real weights on `device` and is handed to `divide`, which shards it in place.

        `left_out` looks at the skeleton and names modules that this rank has no use for: they are
        not read, and stay without memory.
        """
        ...
