"""What a rank saves of DeepSpeed's states: its own stretch of each weight, without sending any."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardtune.core.tensor_shards import Cut, Piece, dealt
from shardtune.core.world import World
from shardtune.parallel.deepspeed.states import States


def stretched_pieces(
    states: States, trained: Mapping[str, nn.Parameter], world: World
) -> list[Piece]:
    """This rank's pieces in stages 1 to 3."""
    found = []
    kinds = states.kinds()
    for name, parameter in trained.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        for kind in ("weight", *kinds):
            begin, value = states.stretch(parameter, None if kind == "weight" else kind)
            if value is not None:
                cut = Cut((begin,), (value.numel(),), flat=True)
                found.append(Piece(f"{kind}.{name}", shape, cut, value))
    count = states.count() if kinds else {}
    counts = {f"{kind}.{name}": value for name in trained for kind, value in count.items()}
    return found + dealt(counts, world.rank, world.size)
