"""What ranks tell each other."""

from __future__ import annotations

from shardtune.core.world import World
from shardtune.launch.process_group import JoinedWorld
from tests.ranks import on_ranks


def gather(world: World) -> list[list[float]]:
    return JoinedWorld(rank=world.rank, size=world.size).gather([float(world.rank), 5.0])


def test_every_rank_knows_the_values_of_all() -> None:
    assert on_ranks(2, gather) == [[[0.0, 5.0], [1.0, 5.0]]] * 2
    assert JoinedWorld().gather([3.0]) == [[3.0]]
