"""Tasks in training: asked by all ranks under every strategy, and what is wrong is told before."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from shardtune.cli.open_model import open_model
from shardtune.config.job import Job
from shardtune.core.progress import Progress
from shardtune.core.runs.metrics import MetricsLine, TaskMetrics
from shardtune.core.runs.run_report import RunReport, TaskFigures, TaskReport
from shardtune.core.world import World
from shardtune.errors import DataError, JobError, RunError, ShardtuneError
from shardtune.evaluation.answer_metrics import Reference
from shardtune.evaluation.respondent import AnswerLimits, TaskQuestion
from shardtune.evaluation.task import parse_task
from shardtune.evaluation.task_rows import TaskRow
from shardtune.launch.process_group import JoinedWorld
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.report.summary import print_summary
from shardtune.train import train
from shardtune.training import respondent_model
from shardtune.training.engine_setup import make_plan
from shardtune.training.respondent_model import ModelRespondent
from shardtune.training.run import Run
from shardtune.training.scheduled_tasks import (
    ScheduledTask,
    asked_by_ranks,
    measure_task,
    open_tasks,
)
from tests.conformance.table import STAGES, STRATEGIES
from tests.ranks import on_ranks
from tests.report.screen import plain_console, shown, squeezed
from tests.reports import make_report
from tests.synthetic import make_job

QUESTIONS = ["Say 7.", "What is the name of the largest of all rivers?", "No", "One, two, three"]
# 3 questions are no multiple of 2 ranks; the shares end after different numbers of tokens.
SHORT = [TaskQuestion(text=text) for text in QUESTIONS[:3]]
SHORTEST = AnswerLimits(max_new_tokens=9, stop_strings=("e",))
PAIRS = [(text, each) for text in QUESTIONS for each in (" yes", " no way")]


def settings(name: str) -> tuple[dict[str, Any], int]:
    chosen, ranks, _ = (STRATEGIES | STAGES)[name]
    return chosen, ranks


def ask(world: World, strategy: dict[str, Any]) -> tuple[list[str], list[float], int]:
    """Answers and log-likelihoods of the tiny model, and how many questions this rank answered."""
    job = make_job("runs/none", strategy=strategy, train={"global_batch": 8})
    joined = JoinedWorld(world.rank, world.size, world.local_rank)
    plan = make_plan(job, world.size, steps=2)
    files = ModelFiles(job.model)
    own: list[int] = []
    builder = PretrainedModelBuilder(files, job.adapter, job.train)
    with plan.strategy.build(builder, plan.setup, joined) as engine:
        asked = asked_by_ranks(job, files, engine, plan, joined)
        found = asked.answer(SHORT, SHORTEST)
        scores = [each.log_likelihood for each in asked.score_options(PAIRS)]
        asked.share([0, 1, 2], lambda items: own.append(len(items)) or list(items))  # type: ignore[func-returns-value]
    return found, scores, own[0]


@pytest.fixture(scope="module")
def alone() -> tuple[list[str], list[float]]:
    answers, scores, own = ask(World(), {"type": "ddp"})
    assert own == 3
    assert len(set(map(len, answers))) > 1  # they end at different lengths
    return answers, scores


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "fsdp",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("tensor2", "zero3", "zero3-offload", "layers2", "pipeline2-1f1b",
                         "fsdp2-tensor2", "pipeline2-data2", "fsdp2-pipeline2")
        ),
    ],
)  # fmt: skip
def test_ranks_share_the_questions_under_every_strategy(
    name: str, alone: tuple[list[str], list[float]]
) -> None:
    strategy, ranks = settings(name)
    if strategy["type"] == "deepspeed":
        pytest.importorskip("deepspeed")
    found = on_ranks(ranks, ask, strategy)
    shared = [own for _, _, own in found]
    for answers, scores, _ in found:
        assert answers == alone[0]
        assert scores == pytest.approx(alone[1], abs=1e-4)
    whole = ranks == 2 and strategy["type"] in ("tensor", "layers", "pipeline")
    assert sorted(set(shared)) == ([3] if whole else [1, 2])


class Pair(JoinedWorld):
    """The first of two ranks; the other says the same."""

    def all_gather(self, text: str) -> list[str]:
        return [text, text]

    def max(self, value: float) -> float:
        return value


@pytest.mark.parametrize(
    ("data_ranks", "sharded", "tried"),
    [((0, 1), False, [4, 2, 2]), ((0, 1), True, [4]), ((0, 0), False, [4])],
)
def test_only_a_rank_that_computes_alone_tries_a_smaller_batch(
    data_ranks: tuple[int, int], sharded: bool, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forward pass with collectives the others would wait for it."""
    opened = open_model("tiny")
    plain, rows = opened.model.forward, []

    def narrow(*args: Any, **named: Any) -> Any:
        rows.append(len(named["input_ids"]))
        if rows[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*args, **named)

    monkeypatch.setattr(opened.model, "forward", narrow)
    monkeypatch.setattr(respondent_model, "in_lockstep", lambda *_: nullcontext())
    world = Pair(0, 2, 0)
    asked = ModelRespondent(
        opened.model, opened.tokenizer, opened.stop_ids, batch_size=4, world=world,
        data_ranks=data_ranks, sharded=sharded,
    )  # fmt: skip
    task = parse_task({"name": "sums", "path": "q", "metric": "exact", "max_new_tokens": 1}, "")
    row = TaskRow(0, TaskQuestion(text="1+1?"), "1+1?", Reference(("2",)))
    scheduled = ScheduledTask(task, 0, (row,) * 8)
    if tried == [4]:
        told = r"(?s)out of memory on rank 0, 4 questions of sums at once.*evaluate.batch_size: 2"
        with pytest.raises(RunError, match=told):
            measure_task(scheduled, asked, world, lambda *_: None)
    else:
        measure_task(scheduled, asked, world, lambda *_: None)
    assert rows == tried


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def opened(**evaluate: Any) -> list[tuple[str, int, int | None]]:
    job = make_job("runs/none", evaluate=evaluate)
    found = open_tasks(job, ModelFiles(job.model))
    return [(each.name, each.every, each.task.limit) for each in found]


def test_an_entry_is_what_evaluate_takes_with_a_few_options(tmp_path: Path) -> None:
    rows = write(tmp_path / "sums.jsonl", [{"prompt": "1+1?", "answer": "2"}] * 3)
    (tmp_path / "two.yaml").write_text(
        "- {name: a, path: sums.jsonl, metric: number}\n"
        "- {name: b, path: sums.jsonl, metric: exact}\n"
    )
    entries = [
        {"task": f"number={rows}", "every": 4, "limit": 2},
        {"task": str(tmp_path / "two.yaml"), "every": 0},
    ]
    assert opened(tasks=entries) == [("sums", 4, 2), ("a", 0, None), ("b", 0, None)]


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        (["exakt=q.jsonl"], r"evaluate.tasks\[0\].task: there is no task 'exakt'"),
        (["exact=none.jsonl"], "none.jsonl"),
        (["exact=q.jsonl", "number=q.jsonl"], "two tasks are called q"),
        (["code=q.jsonl"], "evaluate.allow_code: true"),
    ],
)
def test_what_is_wrong_with_a_task_is_told_before_ranks_start(
    tasks: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "q.jsonl", [{"prompt": "1+1?", "answer": "2", "tests": "assert f() == 1"}])
    with pytest.raises((JobError, DataError), match=told) as caught:
        opened(tasks=[{"task": task, "every": 1} for task in tasks])
    assert isinstance(caught.value, ShardtuneError)


def _train_and_lose(job: Job, rows: Path, monkeypatch: pytest.MonkeyPatch) -> RunReport | None:
    """Trains; the task's file goes once it was read."""

    def begin(self: Run) -> Progress:
        rows.unlink()
        return begun(self)

    begun = Run.begin
    monkeypatch.setattr(Run, "begin", begin)
    return train(job)


@pytest.mark.slow
def test_a_run_asks_before_when_due_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"instruction": f"Say {n}.", "output": f"{n}"} for n in range(12)]
    data = {"path": write(tmp_path / "d.jsonl", rows), "format": "instruction", "name": "d"}
    asked = [{"prompt": f"Say {n}.", "answer": "yes", "choices": ["yes", "no"]} for n in "123"]
    task = f"choice={write(tmp_path / 'sure.jsonl', asked)}"
    job = make_job(
        str(tmp_path / "run"),
        data={"train": [data], "sequence_length": 64},
        train={"steps": 5, "global_batch": 2, "precision": "fp32", "learning_rate": 1e-3},
        evaluate={"every": 0, "samples": 0, "tasks": [{"task": task, "every": 2}]},
        adapter={"type": "lora", "rank": 2},
    )
    report = _train_and_lose(job, tmp_path / "sure.jsonl", monkeypatch)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    found = [TypeAdapter(MetricsLine).validate_python(line) for line in lines]
    tasks = [line for line in found if isinstance(line, TaskMetrics)]
    assert [(line.step, line.task, line.metric, line.rows) for line in tasks] == [
        (step, "sure", "choice", 3) for step in (0, 2, 4, 5)
    ]
    assert all(0 <= line.low <= line.score <= line.high <= 1 for line in tasks)
    assert report is not None
    kept = report.tasks["sure"]
    assert kept.before is not None
    assert (kept.before.score, kept.after.score) == (tasks[0].score, tasks[-1].score)
    assert kept.seconds == pytest.approx(sum(line.seconds for line in tasks))
    said = capsys.readouterr().out
    assert re.search(r"after step 2  sure: choice [\d.]+% \(.* to .*\)  3 rows in [\d.]+ s", said)


def test_the_summary_has_a_table_of_tasks() -> None:
    before = TaskFigures(metric="number", score=0.1, low=0.05, high=0.2, rows=100, seconds=9.0)
    after = before.model_copy(update={"score": 0.3, "low": 0.22, "high": 0.4})
    console = plain_console()
    found = TaskReport(before=before, after=after, seconds=31.5).model_dump()
    print_summary(make_report(tasks={"gsm8k": found}), console)
    assert "gsm8k number 10.0% 30.0% 22.0% to 40.0% 100 31.5 s" in squeezed(shown(console))
