"""Shards of DeepSpeed's states: a rank saves its own flat range of each weight; none is sent."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardtune.core.tensor_shards import Region, TensorShard, round_robin
from shardtune.core.world import World
from shardtune.parallel.deepspeed.states import States


def flat_shards(
    states: States, trained: Mapping[str, nn.Parameter], world: World
) -> list[TensorShard]:
    """This rank's shards in stages 1 to 3."""
    found = []
    kinds = states.kinds()
    for name, parameter in trained.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        for kind in ("weight", *kinds):
            begin, value = states.flat_range(parameter, None if kind == "weight" else kind)
            if value is not None:
                region = Region((begin,), (value.numel(),), flat=True)
                found.append(TensorShard(f"{kind}.{name}", shape, region, value))
    count = states.count() if kinds else {}
    counts = {f"{kind}.{name}": value for name in trained for kind, value in count.items()}
    return found + round_robin(counts, world.rank, world.size)
