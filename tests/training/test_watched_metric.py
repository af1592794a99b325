"""Early stopping and the best checkpoint: by any metric, and the same in a run that was stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardtune.checkpoint.latest import read_checked
from shardtune.checkpoint.reader import Reader
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_same_job, require_unfinished
from shardtune.config.job import BestCheckpoint, EarlyStop, Job
from shardtune.core.progress import Progress
from shardtune.core.runs.run_report import TaskFigures
from shardtune.core.step import EvalResult, MicroBatch
from shardtune.errors import JobError, RunError
from shardtune.evaluation.task import parse_task
from shardtune.launch.process_group import JoinedWorld
from shardtune.report.summary import print_summary
from shardtune.train import fit, train
from shardtune.training import run as run_module
from shardtune.training.evaluation import Evaluation
from shardtune.training.scheduled_tasks import ScheduledTask
from shardtune.training.watched_metric import Watch, read_metric, require_watchable
from tests.conformance.table import STRATEGIES
from tests.report.screen import plain_console, shown, squeezed
from tests.reports import make_report
from tests.runs import lines, train_on
from tests.synthetic import make_job
from tests.test_train import STEPS, Interrupted, checkpoints, make_run, metrics

LOSSES = {0: 9.0, 1: 5.0, 2: 4.0, 3: 4.5, 4: 4.2, 5: 4.1, 6: 3.0}
WATCHED: dict[str, Any] = {
    "train": {"early_stop": {"metric": "held.loss", "patience": 3}},
    "save": {"best": {"metric": "loss"}, "every": 1, "keep": 1},
    "evaluate": {"every": 1},
}


class Scripted(Interrupted):
    """Its held-out losses are known; somebody may interrupt it."""

    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        return EvalResult(name, 10 * LOSSES[len(self.seen)], 5, 10)


def run_scripted(folder: Path, *, at: int = 0, resume: bool = False) -> Progress:
    """Steps until the end, or until somebody interrupts the step `at`."""
    world = JoinedWorld()
    run, data = make_run(folder, Scripted(world, at), **WATCHED)
    run = replace(run, world=world)
    return fit(run, data, run.resume() if resume else run.begin(), STEPS)


def test_a_run_ends_when_its_metric_gets_no_better_and_keeps_the_best(tmp_path: Path) -> None:
    progress = run_scripted(tmp_path)
    assert progress.step == 5  # 4.5, 4.2 and 4.1 are no better than 4.0
    assert not progress.stopped
    assert (progress.best_step, progress.best_value) == (2, 4.0)
    assert (progress.early_stop_value, progress.early_stop_waited) == (4.0, 3)
    assert checkpoints(tmp_path) == ["step-000002", "step-000005"]


@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_run_that_was_stopped_decides_as_one_that_was_not(at: int, tmp_path: Path) -> None:
    whole = run_scripted(tmp_path / "whole")
    stopped = run_scripted(tmp_path / "parts", at=at)
    assert stopped.step == at
    assert stopped.judged_step == at - 1  # who wants to stop doesn't want to wait
    resumed = run_scripted(tmp_path / "parts", resume=True)
    measured = {"seconds": 0.0, "tokens_per_second": 0.0}
    assert replace(resumed, **measured) == replace(whole, **measured)
    assert checkpoints(tmp_path / "parts") == checkpoints(tmp_path / "whole")
    steps = [
        [line["step"] for line in metrics(tmp_path / each, "evaluation")]
        for each in ("whole", "parts")
    ]
    assert steps[0] == steps[1] == [0, 1, 2, 3, 4, 5]


def test_a_run_without_patience_left_takes_no_step(tmp_path: Path) -> None:
    run_scripted(tmp_path)
    again = run_scripted(tmp_path, resume=True)
    assert again.step == 5
    assert len(metrics(tmp_path, "step")) == 5


def values(watch: Watch, found: list[float | None], name: str = "t") -> Progress:
    progress = Progress()
    for step, value in enumerate(found, 1):
        figures = (
            {name: TaskFigures(metric="exact", score=value, low=0, high=1, rows=1, seconds=0)}
            if value is not None
            else {}
        )
        progress = watch.judge(replace(progress, step=step), Evaluation(tasks=figures))
    return progress


@pytest.mark.parametrize(
    ("settings", "found", "best", "waited"),
    [
        ({}, [0.1, 0.3, 0.2], 2, 1),  # more of a task's score is better
        ({"goal": "min"}, [0.1, 0.3, 0.2], 1, 2),
        ({"min_delta": 0.2}, [0.1, 0.3, 0.35], 3, 0),  # 0.3 is too little more, 0.35 isn't
        ({}, [0.3, None, 0.2], 1, 1),  # nothing was due in between
        ({}, [math.nan, 0.1, math.nan], 2, 1),  # what isn't finite is no improvement
        ({}, [0.5, 0.5], 1, 1),  # the first of equals
    ],
)
def test_what_counts_as_an_improvement(
    settings: dict[str, Any], found: list[float | None], best: int, waited: int
) -> None:
    goal = {key: value for key, value in settings.items() if key == "goal"}
    watch = Watch(EarlyStop(metric="t", **settings), BestCheckpoint(metric="t", **goal))
    progress = values(watch, found)
    assert (progress.best_step, progress.early_stop_waited) == (best, waited)


def test_a_metric_is_a_figure_of_all_sets_of_one_or_a_task() -> None:
    sets = [EvalResult("a", 30.0, 5, 10), EvalResult("b.c", 10.0, 0, 30)]
    found = Evaluation(sets)
    assert read_metric("loss", found) == 1.0  # 40 over 40 tokens
    assert read_metric("accuracy", found) == 0.125
    assert read_metric("a.loss", found) == 3.0
    assert read_metric("b.c.perplexity", found) == math.exp(1 / 3)
    assert read_metric("loss", Evaluation()) is None


def test_a_metric_that_is_not_measured_is_refused() -> None:
    task = ScheduledTask(parse_task({"name": "sums", "path": "q", "metric": "exact"}, ""), 0, ())

    def refused(metric: str, every: int) -> str:
        job = make_job("runs/x", evaluate={"every": every}, save={"best": {"metric": metric}})
        with pytest.raises(JobError) as caught:
            require_watchable(job, ["held"], [task])
        return str(caught.value)

    assert "did you mean 'held.loss'?" in refused("held.los", 2)
    assert "loss is measured only before and after" in refused("loss", 0)
    assert "sums is measured only before and after" in refused("sums", 2)
    require_watchable(make_job("runs/x", evaluate={"every": 2}, **WATCHED_BOTH), ["held"], [task])


WATCHED_BOTH: dict[str, Any] = {key: WATCHED[key] for key in ("train", "save")}


def test_a_history_goes_on_by_its_own_metric_and_with_more_patience(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, Scripted(JoinedWorld(), 0), **WATCHED)
    run.begin()
    files = RunDir(tmp_path)

    def changed(**stop: Any) -> Job:
        train = {"early_stop": {"metric": "held.loss", "patience": 3} | stop}
        return make_job(str(tmp_path), **WATCHED | {"train": train})

    require_same_job(files, changed(patience=9))
    with pytest.raises(RunError, match=r"train\.early_stop\.metric"):
        require_same_job(files, changed(metric="loss"))
    report = make_report(early_stop={"metric": "held.loss", "value": 4.0, "waited": 3})
    files.write_report(report)
    run.files.result.mkdir()
    require_unfinished(files, changed(patience=4))
    run.files.result.rmdir()
    _sealed(run.files.result)
    with pytest.raises(RunError, match=r"train\.early_stop\.patience=6"):
        require_unfinished(files, changed())


def _sealed(folder: Path) -> None:
    from shardtune.checkpoint.seal import seal_folder

    folder.mkdir()
    (folder / "config.json").write_text("{}")
    seal_folder(folder)


def test_the_summary_says_which_step_the_result_is_of() -> None:
    best = {"metric": "gsm8k", "value": 0.25, "step": 30}
    result = {"path": "r", "kind": "lora", "largest_difference": 0.0}
    stop = {"metric": "gsm8k", "value": 0.25, "waited": 2}

    def text(**changes: Any) -> str:
        console = plain_console()
        print_summary(make_report(**changes), console)
        return squeezed(shown(console))

    found = text(best=best, result=result | {"step": 30}, early_stop=stop)
    assert "best gsm8k: 0.25, after step 30" in found
    assert "lost" not in found
    assert "done early (gsm8k has not improved in 2 evaluations): 40 steps" in found
    assert "its checkpoint is lost" in text(best=best, result=result)


def write_data(folder: Path) -> list[dict[str, str]]:
    """A set to train on, and a held-out one."""
    said = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(12)]
    for name, rows in (("d", said[:8]), ("held", said[8:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        {"path": str(folder / f"{name}.jsonl"), "format": "instruction", "name": name}
        for name in ("d", "held")
    ]


@pytest.mark.slow
def test_adapters_are_judged_by_the_updates_of_the_step_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step has more of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = write_data(tmp_path)
    updates: list[int] = []
    monkeypatch.setattr(run_module, "dead_adapters", lambda _, count: updates.append(count) or [])
    job = make_job(
        str(tmp_path / "run"),
        adapter={"type": "lora", "rank": 2},
        data={"train": sources[:1], "eval": sources[1:], "sequence_length": 64},
        train={"steps": 3, "global_batch": 2, "precision": "fp32", "learning_rate": 1e-2},
        evaluate={"every": 1, "samples": 0},
        save={"directory": str(tmp_path / "run"), "best": {"metric": "loss", "goal": "max"}},
    )
    report = train(job)
    assert report is not None
    assert (report.result.step, report.training.step, updates) == (1, 3, [1])


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_two_ranks_write_the_best_and_a_killed_run_writes_the_same(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = write_data(tmp_path)
    best = {"metric": "held.loss", "goal": "max"}  # an early step, as the loss falls

    def job(folder: str) -> Job:
        return make_job(
            str(tmp_path / folder),
            adapter={"type": "lora", "rank": 4, "dropout": 0.1},
            data={"train": sources[:1], "eval": sources[1:], "sequence_length": 64},
            train={  # no step gains so much: the run ends after four of them
                "steps": 9, "global_batch": 4, "micro_batch": 2, "learning_rate": 1e-2,
                "early_stop": {"patience": 3, "min_delta": 3.0},
            },
            strategy=STRATEGIES[strategy][0],
            evaluate={"every": 1, "samples": 0},
            launch={"processes": 2, "threads": 1},
            save={"directory": str(tmp_path / folder), "every": 2, "keep": 1, "best": best},
        )  # fmt: skip

    train_on(2, job("whole"))
    log = tmp_path / "parts/metrics.jsonl"
    assert train_on(2, job("parts"), until=lambda: any(each["step"] == 3 for each in lines(log)))
    train_on(2, job("parts"), resume=True)
    found = [RunDir(tmp_path / name).read_report() for name in ("whole", "parts")]
    whole, parts = found
    assert whole is not None
    assert parts is not None
    assert whole.best is not None
    assert whole.early_stop is not None
    assert whole.best.step < whole.training.step == 4
    assert (whole.best, whole.early_stop, whole.training.step, whole.evaluation) == (
        parts.best, parts.early_stop, parts.training.step, parts.evaluation,
    )  # fmt: skip
    assert whole.evaluation["held"].after.loss == whole.best.value
    assert whole.result.step == whole.best.step
    results = [
        (tmp_path / name / "result/adapter_model.safetensors") for name in ("whole", "parts")
    ]
    assert results[0].read_bytes() == results[1].read_bytes()
    path = tmp_path / f"whole/checkpoints/step-{whole.best.step:06d}"
    saved = Reader(path, read_checked(path, None))
    for name, weight in load_file(results[0]).items():
        key = f"weight.{name.replace('.weight', '.default.weight')}"
        assert torch.equal(saved[key], weight), name
