"""What a run still has to do beside its steps."""

from __future__ import annotations

import pytest

from shardtune.training.time_left import TimeLeft

TOOK = {"evaluate": 10.0, "answer": 5.0, "load": 2.0}


@pytest.mark.parametrize(
    ("every", "step", "beside"),
    [
        (0, 1, 10 + 7),  # the evaluation after the run
        (4, 1, 20 + 10 + 7),  # after steps 4 and 8
        (4, 4, 20 + 10 + 7),  # before that of step 4
        (4, 5, 10 + 10 + 7),
        (4, 12, 10 + 7),
        (6, 11, 10 + 7),  # that of step 12 is the one after the run
    ],
)
def test_evaluations_answers_and_the_result_are_counted(
    every: int, step: int, beside: float
) -> None:
    clock = TimeLeft(steps=12, every=every, took=dict(TOOK))
    assert clock.after(step, training=100.0) == 100 + beside


def test_what_is_done_is_left_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 9.0, 20.0, 24.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = TimeLeft(steps=3, took=dict(TOOK))
    clock.after(3, training=0.0)
    with clock.timed("evaluate"):
        assert clock.run == 17
    with clock.timed("answer"):
        assert clock.run == 8
    assert clock.run == 4
    assert clock.took == {"evaluate": 9.0, "answer": 4.0, "load": 2.0}


def test_before_the_first_step_nobody_knows() -> None:
    clock = TimeLeft(steps=3)
    with clock.timed("load"):
        assert clock.run is None
    assert clock.run is None
    assert clock.took["load"] >= 0
