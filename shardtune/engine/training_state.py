"""The training state that is saved and loaded: trained weights and optimizer states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from shardtune.core.tensor_shards import TensorShard, by_weight
from shardtune.engine.dtensor import gathered, local, whole
from shardtune.engine.optim.adamw_8bit import is_8bit, packed, unpacked
from shardtune.engine.shards import load_shard, shard_place, shards_of
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.engine.unsharded import Unsharded


class TrainingState:
    """Weights and moments as tensors by `kind.weight`: whole, as shards, and back."""

    def __init__(
        self,
        parameters: TrainedParameters,
        optimizer: torch.optim.Optimizer,
        sharded: Unsharded | None = None,
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.sharded = sharded or Unsharded()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained weight of this rank, whole, one after another."""
        for name, weight in self.parameters.named.items():
            yield name, self.whole(name, weight.detach())

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a tensor of which this rank has a shard."""
        return self.sharded.unshuffled(name, whole(tensor)) if tensor.ndim else tensor

    def moments(self, name: str) -> Mapping[str, Tensor]:
        """A weight's moments of this rank in fp32; none before the first step."""
        kept = self.optimizer.state.get(self.parameters.local_shards[name], {})
        return unpacked(kept) if kept and is_8bit(self.optimizer) else kept

    def tensors(self) -> dict[str, Tensor]:
        """All of it, whole."""
        tensors = {f"weight.{name}": weight for name, weight in self.weights()}
        for name, parameter in self.parameters.named.items():
            for key, value in self.moments(name).items():
                tensors[f"{key}.{name}"] = (
                    self.sharded.unshuffled(name, gathered(value, parameter))
                    if value.ndim
                    else value
                )
        return tensors

    def shards(
        self, twin: int = 0, twins: int = 1, without: Collection[str] = ()
    ) -> list[TensorShard]:
        """What this rank saves of weights that are spread. A shard that several hold, or `twins`
        that no tensor knows of, is saved by one of them: another one for each weight."""
        found = []
        for number, (name, parameter) in enumerate(self.parameters.named.items()):
            place = shard_place(parameter)
            mine = number % (place.copies * twins) == place.copy * twins + twin
            if mine and name not in without:
                regions = self.sharded.regions(name, parameter)
                found += shards_of(name, parameter, self.moments(name), regions)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`; asks for one at a time."""
        kept = by_weight(tensors)
        for name in self.parameters.named:
            found = {kind: self._load_shard(tensors, kind, name) for kind in kept[name]}
            with torch.no_grad():
                self._load_weight(name, found.pop("weight"))
            if found:
                self._load_moments(name, found)

    def _load_weight(self, name: str, weight: Tensor) -> None:
        """Takes over this rank's shard of a weight."""
        local(self.parameters.named[name]).copy_(weight)

    def _load_moments(self, name: str, moments: dict[str, Tensor]) -> None:
        """Takes over this rank's shard of a weight's moments."""
        state = packed(moments, self.optimizer) if is_8bit(self.optimizer) else moments
        self.optimizer.state[self.parameters.local_shards[name]] = state

    def _load_shard(self, tensors: Mapping[str, Tensor], kind: str, name: str) -> Tensor:
        """This rank's shard of a stored tensor; nothing else is read where that can be."""
        parameter = self.parameters.named[name]
        if kind == "step":  # one count a weight
            return tensors[f"step.{name}"].to(local(parameter).device, copy=True)
        return load_shard(
            tensors, f"{kind}.{name}", parameter, self.sharded.regions(name, parameter)
        )
