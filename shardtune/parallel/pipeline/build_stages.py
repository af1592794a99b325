"""Builds a rank's part of a model: its stages, and of their layers its TP and FSDP shards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardtune.core.model.parallel_plan import require_tensor_parallel
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.parallel.pipeline.stage import Anatomy, Division
from shardtune.parallel.tensor.shard_layer import TensorParallelModel

Divide = Callable[[nn.Module], None]


class Parts:
    """What a builder asks while it builds. The skeleton comes first, and settles everything."""

    anatomy: Anatomy
    division: Division
    aliases: dict[str, str]
    """The first name of each weight, by every name that it has."""
    sharded: TensorParallelModel | None = None

    def __init__(
        self,
        pipelining: Pipelining,
        ranks: int,
        rank: int,
        tensor: DeviceMesh | None,
        share: Divide | None,
    ) -> None:
        self._pipelining, self._ranks, self._rank = pipelining, ranks, rank
        self._tensor, self._share = tensor, share

    def left_out(self, skeleton: Any) -> Collection[nn.Module]:
        """What the other stages have. Refuses what can't be cut before anything is read."""
        first: dict[nn.Parameter, str] = {}
        named = skeleton.named_parameters(remove_duplicate=False)
        self.aliases = {name: first.setdefault(weight, name) for name, weight in named}
        self.anatomy = Anatomy.of(skeleton)
        self.division = Division.of(self.anatomy, self._pipelining, self._ranks)
        if self._tensor is not None:
            family = require_tensor_parallel(skeleton.config, self._tensor.size())
            words = skeleton.config.get_text_config().vocab_size
            self.sharded = TensorParallelModel(family, self._tensor, words)
        return self._absent()

    def divide(self, part: nn.Module) -> None:
        """Shards a layer, or at last the ends that this rank has."""
        if part in self.anatomy.layers:
            self._shard_layer(part)
            shared = [part]
        else:
            absent, anatomy = self._absent(), self.anatomy
            ends = (*anatomy.embeddings, anatomy.norm, anatomy.head)
            shared = [end for end in ends if end not in absent]
            self._shard_ends(shared)
        if self._share is not None:
            # The ends one by one: the model around them is never called as a whole.
            for module in shared:
                self._share(module)

    def _absent(self) -> list[nn.Module]:
        return self.division.absent(self.anatomy, self._rank)

    def _shard_layer(self, layer: nn.Module) -> None:
        """What flows from one stage to the next is whole; within a stage ranks have its tokens."""
        if self.sharded is None:
            return
        index = self.anatomy.layers.index(layer)
        stages = self.division.layers
        self.sharded.shard_layer(
            layer,
            first=any(index == stage[0] for stage in stages),
            last=any(index == stage[-1] for stage in stages[:-1]),
        )

    def _shard_ends(self, ends: Collection[nn.Module]) -> None:
        if self.sharded is None:
            return
        embedding, *rest = self.anatomy.embeddings
        positions = rest[0] if rest else None
        self.sharded.shard_ends(
            embedding=embedding if embedding in ends else None,
            positions=positions if positions in ends else None,
            norm=self.anatomy.norm if self.anatomy.norm in ends else None,
            head=self.anatomy.head if self.anatomy.head in ends else None,
        )
