"""What bounds a run, from where its time went. Real runs are in `tests/exam/diagnose.py`."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.config.job import Job
from shardtune.config.model_config import shape_of
from shardtune.core.runs.diagnosis import Diagnosis
from shardtune.core.runs.rank_profile import Collective, RankProfile
from shardtune.core.runs.step_parts import PARTS, RankParts, StepParts
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.diagnose import diagnose
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.measured_run import RunDevice, RunFacts, without_outliers
from tests.jobs import make_job

UNKNOWN = RunDevice(None, None, is_gpu=False)


def rank(positions: int = 1000, **seconds: float) -> RankParts:
    told = dict.fromkeys(PARTS, 0.0) | {"compute": 1.0} | seconds
    return RankParts(**told, positions=positions)


def job(**sections: dict[str, Any]) -> Job:
    values = {"global_batch": 8, "micro_batch": 8, "precision": "bf16", "steps": 100}
    train = values | sections.pop("train", {})
    launch = {"processes": 2, "threads": 1} | sections.pop("launch", {})
    return make_job(train=train, launch=launch, **sections)


def told(
    *ranks: RankParts,
    asked: Job | None = None,
    device: RunDevice = UNKNOWN,
    imbalance: float = 1.0,
    directory: str = "runs/a",
    **facts: Any,
) -> Diagnosis:
    ranks = ranks or (rank(), rank())
    parts = StepParts(steps=10, ranks=ranks, imbalance=imbalance)
    tokens = sum(each.positions for each in ranks)
    given = {"tokens": tokens, "slow_ranks": {}, **facts}
    return diagnose(RunFacts(directory, asked or job(), parts, **given), device)


def test_a_run_that_computes_is_healthy() -> None:
    found = told(rank(communication=0.02), rank(communication=0.03))
    assert found.healthy
    assert found.bound == "compute"
    assert found.causes == ()
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.verdict.startswith("healthy: 98% of the time is compute, and nothing")


def test_a_loader_that_waits_is_told_from_one_that_computes() -> None:
    for cpu, cause in ((0.1, "slow_storage"), (1.9, "slow_loader")):
        found = told(*[rank(data=2.0, loading=2.0, loading_work=cpu)] * 2)
        assert (found.bound, found.causes[0]) == ("data", cause)
        assert found.remedies[0].line.startswith(("XDG_CACHE_HOME", "shardtune doctor runs/a/"))


def test_waiting_has_three_reasons() -> None:
    link = told(rank(communication=2.0), rank(communication=2.0))
    assert (link.bound, link.causes) == ("communication", ("communication",))
    slow = told(rank(communication=2.0), rank(compute=3.0))
    assert slow.causes[0] == "straggler"
    assert (slow.stragglers[0].rank, slow.stragglers[0].times) == (1, 3.0)
    seen = told(rank(communication=1.0), rank(communication=0.9), slow_ranks={0: 4.0})
    assert seen.stragglers[0].rank == 0, "the launcher saw it"
    rows = told(rank(communication=1.0), rank(communication=1.0), imbalance=1.6)
    assert rows.causes[:1] == ("imbalance",)
    longer = told(rank(communication=2.0), rank(compute=3.0, positions=3000))
    assert not longer.stragglers, "three times the work in three times the time"


def test_what_happens_between_steps_gets_rarer() -> None:
    asked = job(save={"every": 1, "directory": "runs/a", "trace": True}, evaluate={"every": 5})
    found = told(rank(save=3.0, evaluation=2.0, logging=2.0), asked=asked)
    assert found.bound == "save"
    assert found.causes == ("save", "evaluation", "logging")
    changes = [remedy.change for remedy in found.remedies]
    # 3 / 8 of the time are 0.6 of the rest; 2 % are 1 / 49: every 0.6 x 49 steps
    assert changes == ["save.every=30", "evaluate.every=82", "save.trace=false"]
    assert found.remedies[0].line == (
        "shardtune train runs/a/job.yaml save.every=30 save.directory=runs/a-faster"
    )


def test_what_gets_rarer_happens_within_the_run() -> None:
    tasks = [{"task": "f1=b.jsonl", "every": 2}]
    asked = job(save={"every": 1, "directory": "runs/a"}, evaluate={"every": 4, "tasks": tasks})
    slow = rank(save=3.0, evaluation=2.0)
    found = told(slow, asked=asked, steps=8, task_seconds={"b": 1.0})
    changes = [remedy.change for remedy in found.remedies]
    assert changes == ["save.every=8", "evaluate.every=8", "evaluate.tasks.0.every=8"]
    long = told(slow, asked=asked, steps=40, task_seconds={"b": 1.0})
    assert [remedy.change for remedy in long.remedies][:1] == ["save.every=40"]
    ends = told(
        slow, asked=job(save={"every": 8, "directory": "a"}, evaluate={"every": 9}), steps=8
    )
    assert ends.remedies == (), "once, at the end, is as rare as it gets"


def test_commands_can_be_pasted_whatever_the_run_is_called() -> None:
    asked = job(save={"every": 1, "directory": "my runs/a"})
    found = told(rank(save=3.0), asked=asked, directory="my runs/a")
    line = found.remedies[0].line
    assert "shardtune train 'my runs/a/job.yaml' save.every=" in line
    assert line.endswith(" 'save.directory=my runs/a-faster'")


def test_the_verdict_is_one_sentence() -> None:
    beside = told(rank(save=0.8), asked=job(save={"every": 1, "directory": "runs/a"}))
    assert beside.verdict == "56% of the time is compute; the largest loss is save (44%)"
    most = told(rank(save=3.0), asked=job(save={"every": 1, "directory": "runs/a"}))
    assert most.verdict == "75% of the time is save, which is the largest loss"


def test_what_is_off_is_not_switched_on() -> None:
    asked = job(save={"every": 0, "directory": "runs/a"}, evaluate={"every": 0})
    found = told(rank(save=1.0, evaluation=1.0), asked=asked)
    assert found.remedies == ()


def test_tasks_have_an_interval_of_their_own() -> None:
    tasks = [{"task": "exact_match=a.jsonl", "every": 0}, {"task": "f1=b.jsonl", "every": 10}]
    asked = job(evaluate={"every": 0, "tasks": tasks})
    found = told(rank(evaluation=1.0), asked=asked, task_seconds={"a": 0.0, "b": 1.0})
    (remedy,) = found.remedies
    assert remedy.change == "evaluate.tasks.1.every=490"  # half of the time is 49 times too much
    assert remedy.fact == "50% of the time is spent on tasks (b)"
    both = told(
        rank(evaluation=1.0), asked=job(evaluate={"every": 5, "tasks": tasks}),
        task_seconds={"b": 0.5},
    )  # fmt: skip
    assert [each.change.split("=")[0] for each in both.remedies] == [
        "evaluate.every", "evaluate.tasks.1.every",
    ]  # fmt: skip


def test_padding() -> None:
    found = told(rank(), rank(), asked=job(data={"packing": False}), tokens=1000)
    assert found.causes == ("padding",)
    assert found.remedies[0].gain == pytest.approx(0.5)


@pytest.fixture(scope="module")
def eight_b() -> Forecast:
    asked = job(
        model={"name": "llama-3.1-8b"}, adapter={"type": "lora"}, data={"sequence_length": 1024},
        train={"gradient_checkpointing": "full", "micro_batch": 4}, launch={"processes": 2},
    )  # fmt: skip
    return forecast(asked, shape_of(asked.model), parse_cluster("2xH100"))


def on(found: Forecast) -> RunDevice:
    return RunDevice(found, found.speed.peak, is_gpu=True)


def test_recomputation_without_need(eight_b: Forecast) -> None:
    step = eight_b.speed.step
    each = rank(compute=step.compute, optimizer=step.optimizer, positions=4096)
    found = told(each, each, asked=eight_b.job, device=on(eight_b))
    assert found.causes == ("recomputation",)
    remedy = found.remedies[0]
    assert remedy.by == "planner"
    assert "train.gradient_checkpointing=" in remedy.line
    assert 0.1 < remedy.gain < 0.4


def test_a_gpu_that_the_host_keeps_waiting(eight_b: Forecast) -> None:
    seconds = 10 * eight_b.speed.step.compute
    each = rank(compute=seconds, positions=4096)
    found = told(each, each, asked=eight_b.job, device=on(eight_b))
    assert found.bound == "host"
    assert found.shares["host"] == pytest.approx(0.9)


def test_the_largest_micro_batch_that_fits() -> None:
    """64 rows of a rank at once don't fit into 80 GB, and aren't offered."""
    asked = job(
        model={"name": "llama-3.1-8b"}, adapter={"type": "lora"}, data={"sequence_length": 4096},
        train={"gradient_checkpointing": "full", "global_batch": 128, "micro_batch": 1},
        launch={"processes": 2},
    )  # fmt: skip
    shape, cluster = shape_of(asked.model), parse_cluster("2xH100")
    planned = forecast(asked, shape, cluster)
    each = rank(compute=10 * planned.speed.step.compute, positions=64 * 4096)
    found = told(each, each, asked=asked, device=on(planned))
    (change,) = (r.change for r in found.remedies if r.cause == "small_micro_batch")
    rows = int(change.removeprefix("train.micro_batch="))
    assert 1 < rows < 64

    def fits(micro: int) -> bool:
        train = asked.train.model_copy(update={"micro_batch": micro})
        return forecast(asked.model_copy(update={"train": train}), shape, cluster).fits

    assert fits(rows)
    assert not fits(4 * rows)


def test_no_number_of_rows_is_offered_that_nobody_has_tried() -> None:
    asked = job(train={"global_batch": 16, "micro_batch": 1})
    found = told(rank(other=1.0), rank(other=1.0), asked=asked)
    (remedy,) = found.remedies
    assert (remedy.cause, remedy.line) == ("small_micro_batch", "")
    assert "--cluster" in remedy.fact


def profile(number: int) -> RankProfile:
    sent = Collective(op="all_gather", count=40, seconds=4.0, exposed=3.0)
    return RankProfile(
        rank=number, steps=10, seconds=10.0, on_gpu=True, matmul=2.0, attention=1.0, memory=1.0,
        copies=0.0, exposed=3.0, idle=3.0, operations=1000, collectives=(sent,),
    )  # fmt: skip


def test_a_profile_tells_what_events_cannot() -> None:
    strategy = {"type": "deepspeed", "zero_optimization": {"stage": 3}}
    found = told(
        rank(), rank(), asked=job(strategy=strategy), profiles=(profile(0), profile(1)),
        device=RunDevice(None, None, is_gpu=True),
    )  # fmt: skip
    assert found.profiled
    assert found.shares["host"] == pytest.approx(0.3)
    assert found.shares["communication"] == pytest.approx(0.3)
    assert found.shares["memory"] == pytest.approx(0.7 / 4)  # a quarter of what computes
    assert sum(found.shares.values()) == pytest.approx(1.0)
    (sent,) = found.collectives
    assert (sent.op, sent.share, sent.count) == ("all_gather", 0.3, 4.0)
    keys = [setting.key for setting in found.settings]
    assert "strategy.zero_optimization.stage3_prefetch_bucket_size" in keys


def test_the_forecast_stands_beside() -> None:
    predicted = {"compute": 3.0, "communication": 0.5, "optimizer": 0.5, "data": 0.0}
    found = told(rank(communication=1.0), rank(communication=1.0), predicted=predicted)
    assert found.forecast == pytest.approx(
        {"compute": 0.75, "communication": 0.125, "memory": 0.125, "data": 0.0}
    )


def test_a_moment_in_which_something_else_happened_does_not_count() -> None:
    usual = StepParts(steps=1, ranks=(rank(),))
    slept = StepParts(steps=1, ranks=(rank(other=99.0),))
    assert without_outliers([usual, slept, usual]) == [usual, usual]
    assert without_outliers([usual, slept]) == [usual, slept]
