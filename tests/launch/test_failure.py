"""The words for a rank that hangs and for those that wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardtune.core.host.heartbeat import Heartbeats, open_heartbeat
from shardtune.launch.failure import collective_in, failure_of_hung_rank, rank_ranges
from shardtune.launch.watchdog import HungRank

# As faulthandler writes it, from a rank of two that waited for the other with gloo.
STACK = """\
Thread 0x00007f (most recent call first):
  File "site-packages/torch/distributed/distributed_c10d.py", line 3012 in all_reduce
  File "site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "shardtune/launch/process_group.py", line 68 in most
"""
SHARDS = """\
  File "site-packages/torch/distributed/distributed_c10d.py", line 4113 in all_gather_into_tensor
  File "site-packages/torch/distributed/fsdp/_fsdp_collectives.py", line 279 in foreach_all_gather
"""


@pytest.mark.parametrize(
    ("stack", "expected"),
    [(STACK, "all-reduce"), (SHARDS, "all-gather"), ("  File x, line 3 in forward\n", "")],
)
def test_the_collective_of_a_stack(stack: str, expected: str) -> None:
    assert collective_in(stack) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([0, 2], "ranks 0, 2")]
)
def test_ranks_in_words(ranks: list[int], expected: str) -> None:
    assert rank_ranges(ranks) == expected


class FakeGroup:
    """Four ranks, of which two run on another node; none has a process."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder
        self.heartbeats = Heartbeats(4)
        self.ranks = {0: None, 1: None}

    def alive(self) -> dict[int, int]:
        return {}

    def stack_file(self, rank: int) -> Path:
        return self.logs / f"stack-{rank}.txt"


def test_who_waits_for_whom_is_one_sentence(tmp_path: Path) -> None:
    workers = FakeGroup(tmp_path)
    for rank in range(4):
        heartbeat = open_heartbeat(os.dup(workers.heartbeats.file), rank, 4)
        heartbeat.begin(5)
        if rank != 3:
            heartbeat.enter("backward")
    hung = HungRank(3, workers.heartbeats.read(3), 4.2, stopped=False)
    failure = failure_of_hung_rank(workers, hung)  # type: ignore[arg-type]
    workers.heartbeats.close()
    assert failure.cause == (
        "rank 3: hung for 4.2 s in step 5 (data); ranks 0-2 wait in step 5 (backward); it runs on "
        "another node, which didn't report it"
    )
    assert os.fspath(tmp_path) in failure.problems[0].fix
