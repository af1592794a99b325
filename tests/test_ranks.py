"""The helper of every test on several ranks: a hang must not be silent."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from shardtune.core.world import World
from tests.ranks import on_ranks


def one_waits_for_the_other(world: World) -> None:
    if world.rank == 0:
        dist.all_reduce(torch.zeros(1))
    time.sleep(600)


def test_a_hang_shows_what_each_rank_was_doing() -> None:
    with pytest.raises(AssertionError) as caught:
        on_ranks(2, one_waits_for_the_other, timeout=5)
    told = str(caught.value)
    assert "ranks [0, 1] gave no answer in 5 s" in told
    first, second = told.split("rank 1:")
    assert "in all_reduce" in first
    assert "in one_waits_for_the_other" in second
