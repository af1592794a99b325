"""What ranks tell each other."""

from __future__ import annotations

from shardtune.core.world import World
from shardtune.launch.process_group import JoinedWorld
from tests.ranks import on_ranks


def mean(world: World) -> list[float]:
    return JoinedWorld(rank=world.rank, size=world.size).mean([float(world.rank), 5.0])


def test_a_mean_is_over_all_ranks_and_known_to_each() -> None:
    assert on_ranks(2, mean) == [[0.5, 5.0]] * 2
    assert JoinedWorld().mean([3.0]) == [3.0]
