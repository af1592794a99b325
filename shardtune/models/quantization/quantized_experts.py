"""Experts whose fused weights are stored in 4 or 8 bits, and dequantized for each product.

How a weight is stored is what the kinds differ in (`nf4_experts.py`, `fp8_experts.py`); here is
what they share: they are given weights one by one as a model is loaded, restore them for good when
it is merged, and let peft see shapes that it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardtune.models.experts.grouped_experts import GroupedExperts


class QuantizedExperts(GroupedExperts):
    """Grouped experts that hold their matrices in fewer bits, as `QuantizedLinear` holds one."""

    def quantize(self, name: str, weight: Tensor) -> None:
        """Stores the matrices of all experts, on their device."""
        raise NotImplementedError

    def dequantize(self, name: str) -> Tensor:
        """A weight as transformers lays it out, with the values that it is multiplied with."""
        raise NotImplementedError

    def plain_shape(self, name: str) -> torch.Size:
        """The shape of `dequantize`'s result."""
        raise NotImplementedError

    def quantized(self) -> tuple[str, ...]:
        """The weights that are stored so by now."""
        raise NotImplementedError

    def unpack(self) -> None:
        """Makes it the plain module again, with the weights that it has multiplied with."""
        for name in self.quantized():
            self._parameters[name] = nn.Parameter(self.dequantize(name), requires_grad=False)
        self.__class__ = self.plain_class  # type: ignore[assignment]


@contextmanager
def shown_unpacked(model: nn.Module) -> Iterator[None]:
    """Lets peft see packed experts in the shape that their weights have: it looks at it when it
    puts an adapter beside them. What it sees takes no memory, and has no values."""
    experts = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    packed = [(each, name, each._parameters[name]) for each in experts for name in each.quantized()]
    for module, name, weight in packed:
        assert weight is not None
        empty = torch.empty(1, dtype=module.compute_dtype, device=weight.device)
        shown = empty.expand(module.plain_shape(name))
        module._parameters[name] = nn.Parameter(shown, requires_grad=False)
    try:
        yield
    finally:
        for module, name, weight in packed:
            module._parameters[name] = weight
