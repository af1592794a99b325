"""Ranks that were started from outside have to have come to the same job."""

from __future__ import annotations

import pytest

from shardtune.core.world import World
from shardtune.errors import RunError
from shardtune.launch.process_group import JoinedWorld
from shardtune.training.ranks_agree import require_agreement
from tests.jobs import make_job
from tests.ranks import on_ranks


def complaint(
    world: World, rows: list[int], threads: list[int], read: tuple[str, str] = ("", "")
) -> str | None:
    """What this rank hears where ranks have resolved these micro-batches and threads, and have
    `read` this."""
    job = make_job(
        train={"micro_batch": rows[world.rank], "global_batch": 8},
        launch={"processes": 2, "threads": threads[world.rank]},
    )
    joined = JoinedWorld(world.rank, world.size, world.local_rank)
    try:
        require_agreement(joined, job, {"evaluate.tasks: sums": read[world.rank]})
    except RunError as error:
        return str(error)
    return None


def test_ranks_with_one_job_go_on() -> None:
    assert on_ranks(2, complaint, [4, 4], [1, 2]) == [None, None]


def test_ranks_that_chose_differently_are_refused_together() -> None:
    one, other = on_ranks(2, complaint, [4, 2], [1, 1], ("9 rows", "8 rows"))
    assert one == other
    assert "evaluate.tasks: sums: is '9 rows' on rank 0, and '8 rows' on rank 1" in one
    assert "give every machine the same file" in one
    assert "train.micro_batch: is 4 on rank 0, and 2 on rank 1" in one
    assert "give it in the job" in one


@pytest.mark.parametrize("rows", [1, 8])
def test_one_rank_has_nobody_to_ask(rows: int) -> None:
    require_agreement(JoinedWorld(), make_job(train={"micro_batch": rows}), {})
