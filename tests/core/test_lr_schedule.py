"""The learning rate, beside Hugging Face's schedulers and torch's OneCycleLR."""

from __future__ import annotations

import pytest

from shardtune.core.lr_one_cycle import OneCycle
from shardtune.core.lr_schedule import Schedule, ScheduleKind

PEAK = 3e-4


def theirs(kind: ScheduleKind, warmup: int, steps: int) -> list[float]:
    """The rate of each step of a run with transformers' scheduler."""
    import torch
    from transformers import (
        get_constant_schedule_with_warmup,
        get_cosine_schedule_with_warmup,
        get_linear_schedule_with_warmup,
    )

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    if kind == "constant":
        scheduler = get_constant_schedule_with_warmup(optimizer, warmup)
    elif kind == "linear":
        scheduler = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    else:
        scheduler = get_cosine_schedule_with_warmup(optimizer, warmup, steps)
    rates = []
    for _ in range(steps + 1):  # one more: where the curve ends
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 60), (5, 60), (59, 60), (100, 1000)])
def test_a_whole_run_has_hugging_faces_rates(kind: ScheduleKind, warmup: int, steps: int) -> None:
    schedule = Schedule(kind, PEAK, warmup, steps)
    ours = [schedule.at(step) for step in range(steps + 1)]
    assert ours == pytest.approx(theirs(kind, warmup, steps), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_the_rate_rises_from_zero_to_its_peak(kind: ScheduleKind) -> None:
    schedule = Schedule(kind, PEAK, 4, 10)
    assert [schedule.at(step) for step in range(5)] == pytest.approx(
        [0, PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK]
    )


@pytest.mark.parametrize(("kind", "last"), [("cosine", 0), ("linear", 0), ("constant", PEAK)])
def test_where_the_curves_end(kind: ScheduleKind, last: float) -> None:
    assert Schedule(kind, PEAK, 4, 10).at(10) == last


@pytest.mark.parametrize("steps", [2, 3, 7, 30, 1000])
@pytest.mark.parametrize(
    "cycle",
    [
        OneCycle(),
        OneCycle(pct_start=0.1, div_factor=10, final_div_factor=100),
        OneCycle(pct_start=0, div_factor=2),
        OneCycle(pct_start=1),
    ],
    ids=["torch's defaults", "early peak", "no rise", "no fall"],
)
def test_one_cycle_is_torchs(cycle: OneCycle, steps: int) -> None:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK, total_steps=steps, cycle_momentum=False, **cycle.model_dump()
    )
    wanted = []
    for step in range(steps):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < steps - 1:  # torch refuses to count on
            scheduler.step()
    schedule = Schedule("one_cycle", PEAK, 0, steps, cycle)
    assert [schedule.at(step) for step in range(steps)] == pytest.approx(wanted, rel=1e-12)


def test_where_torch_divides_by_zero_the_cycle_begins_at_its_peak() -> None:
    """The rise is over in the first step: 0.1 of 10."""
    schedule = Schedule("one_cycle", PEAK, 0, 10, OneCycle(pct_start=0.1))
    rates = [schedule.at(step) for step in range(11)]
    assert rates[0] == PEAK
    assert rates == sorted(rates, reverse=True)
    assert rates[9] == rates[10] == pytest.approx(PEAK / 25 / 1e4)  # a run that goes on stays there
