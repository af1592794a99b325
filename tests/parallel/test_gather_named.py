"""Tensors of which each rank has some, seen by all of them one after another."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from shardtune.core.world import World
from shardtune.parallel.gather_named import in_turn
from tests.ranks import on_ranks


def walk(world: World) -> tuple[dict[str, list[float]], int, list[str]]:
    """What came by, the most foreign tensors alive at once, and which were asked for."""
    own = {"tied": torch.full((2,), 10.0 + world.rank)}
    own |= {f"{world.rank}-{n}": torch.full((n + 1,), float(world.rank)) for n in range(3)}
    asked: list[str] = []

    def made_whole(name: str, tensor: Tensor) -> Tensor:
        asked.append(name)
        return 2 * tensor

    group = dist.group.WORLD
    assert group is not None
    found, most = {}, 0
    alive: list[weakref.ref[Tensor]] = []
    weights: Iterator[tuple[str, Tensor]] = in_turn(own, group, made_whole)
    for name, tensor in weights:
        found[name] = tensor.tolist()
        alive.append(weakref.ref(tensor))
        del tensor
        # gloo's thread lets go of what it has sent when it comes to it.
        deadline = time.monotonic() + 5
        while (held := sum(each() is not None for each in alive)) > 1:
            if time.monotonic() > deadline:
                break
            gc.collect()
            time.sleep(0.01)
        most = max(most, held)
    return found, most, asked


def test_no_rank_holds_more_than_one_tensor_of_others() -> None:
    seen = on_ranks(2, walk)
    for rank, (found, most, asked) in enumerate(seen):
        assert most == 1
        # Whoever spreads a tensor over other ranks again needs all of them to ask.
        assert asked == ["tied", *(f"{rank}-{n}" for n in range(3))]
        assert found == seen[0][0]
    assert found == {
        "tied": [20.0, 20.0],  # the first rank's
        **{f"{rank}-{n}": [2.0 * rank] * (n + 1) for rank in range(2) for n in range(3)},
    }
