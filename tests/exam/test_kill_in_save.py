"""A few of the exam's kills; `python -m tests.exam.kill_in_save` does them all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.exam.kill_in_save import NO_STRACE, Exam, after, by_strace, has_strace

pytestmark = pytest.mark.early


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_kills_at_chosen_system_calls(tmp_path: Path, background: bool) -> None:
    if not has_strace():
        pytest.skip(NO_STRACE)
    exam = Exam.prepare(tmp_path, 2, background=background)
    draw = random.Random(int(background))
    chosen = [(0, "mkdir", 2), (0, "rename", 1), (0, "fsync", 3), (1, "fsync", 1)]
    outcomes = [exam.in_save(rank, by_strace(call, number)) for rank, call, number in chosen]
    outcomes += [exam.in_save(rank, by_strace("write", draw.randrange(1, 8))) for rank in (0, 1)]
    assert all(outcome.good for outcome in outcomes), outcomes
    assert any(outcome.killed for outcome in outcomes)


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    exam = Exam.prepare(tmp_path, 2, background=True)
    draw = random.Random(0)
    for trial in range(4):
        outcome = exam.in_save(trial % 2, after(draw.uniform(0, 0.03)))
        assert outcome.good, outcome
