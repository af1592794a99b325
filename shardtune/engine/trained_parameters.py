"""The trainable parameters of a model on one rank: their local shards and their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from shardtune.engine.dtensor import local, shard_of


def base_weights(model: nn.Module) -> int:
    """Weights of a model without its adapters, as the planner counts them, however they are
    stored. Adapters are what is trained beside frozen weights."""
    parameters = list(model.parameters())
    frozen = [each for each in parameters if not each.requires_grad]
    return round(sum(_weights_in(each) for each in frozen or parameters))


def _weights_in(stored: Tensor) -> float:
    """Two weights in NF4 are a byte. In FP8 a linear layer has each of its own twice, experts once;
    they are stacked."""
    if stored.dtype == torch.uint8:
        return 2.0 * stored.numel()
    twice = stored.dtype == torch.float8_e4m3fn and stored.ndim == 2
    return stored.numel() / (2.0 if twice else 1.0)


class TrainedParameters:
    """The trainable parameters by name; each may be a rank's shard of a larger one."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.named = dict(named)
        # The update knows nothing of other ranks: it sees local shards, as weights of their own.
        self.local_shards = {name: shard_of(parameter) for name, parameter in self.named.items()}

    @classmethod
    def of(cls, model: nn.Module) -> TrainedParameters:
        """Those that the model has."""
        return cls({n: p for n, p in model.named_parameters() if p.requires_grad})

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that there are, by name."""
        return {name: p.grad for name, p in self.named.items() if p.grad is not None}

    def drop_gradients(self) -> None:
        """Lets go of all gradients."""
        for parameter in self.named.values():  # not the model's, which may be gathered ones
            parameter.grad = None

    def nonfinite(self) -> tuple[str, ...]:
        """The names of those that hold NaN or infinity on this rank."""
        parts = ((name, local(parameter.detach())) for name, parameter in self.named.items())
        return tuple(name for name, part in parts if not part.isfinite().all())

    @contextlib.contextmanager
    def shards_bound(self) -> Iterator[None]:
        """Lets the update see weights and gradients where they now lie; FSDP2 moves them."""
        divided = [
            (parameter, shard)
            for parameter, shard in zip(
                self.named.values(), self.local_shards.values(), strict=True
            )
            if shard is not parameter
        ]
        for parameter, shard in divided:
            shard.data = local(parameter.detach())
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        yield
        for _, shard in divided:
            shard.grad = None
