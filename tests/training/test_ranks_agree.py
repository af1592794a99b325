"""Ranks that were started from outside have to have come to the same job."""

from __future__ import annotations

import time

import pytest

from shardtune.core.world import World
from shardtune.errors import ModelError, Problem, RunError
from shardtune.launch.process_group import JoinedWorld
from shardtune.training.ranks_agree import checked_by_main_rank, require_agreement
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


def checked(world: World, fact: str) -> tuple[int, str]:
    """How often this rank looked, and what it was refused for."""
    looks = []

    def check() -> None:
        looks.append(world.rank)
        if fact:
            raise ModelError(Problem("data.packing", fact, "set data.packing: false"))

    try:
        checked_by_main_rank(JoinedWorld(world.rank, world.size, world.local_rank), check)
    except ModelError as error:
        return len(looks), str(error)
    return len(looks), ""


@pytest.mark.parametrize("fact", ["", "a leak of 0.1"])
def test_one_rank_looks_and_all_are_refused(fact: str) -> None:
    (looks, first), (others, second) = on_ranks(2, checked, fact)
    assert (looks, others) == (1, 0)
    assert first == second
    assert fact in first
    assert bool(first) == bool(fact)


def checked_while_failing(world: World, error: Exception) -> tuple[str, str, float]:
    """What this rank ends with, its words, and the seconds until then."""

    def check() -> None:
        raise error

    begun = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011  whichever: the test compares it
        checked_by_main_rank(JoinedWorld(world.rank, world.size, world.local_rank), check)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begun


@pytest.mark.parametrize(
    ("error", "second"),
    [
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (RuntimeError("first line\nsecond"), "RuntimeError: first line"),
        (RunError(Problem("save", "is gone", "bring it back")), "save: is gone"),
    ],
)
def test_a_check_that_fails_ends_all_ranks_at_once(error: Exception, second: str) -> None:
    (kind, said, _), (others, heard, seconds) = on_ranks(2, checked_while_failing, error)
    assert (kind, said) == (type(error).__name__, str(error))
    assert others == "RunError"
    assert second in heard
    assert "rank 0" in heard or said == heard
    assert seconds < 30
