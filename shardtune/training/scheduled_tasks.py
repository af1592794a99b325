"""Tasks in training: the job's benchmarks (`evaluate.tasks`), opened before ranks start, run when
due."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shardtune.config.job import Job
from shardtune.core.engine import Engine
from shardtune.core.runs.run_report import TaskFigures
from shardtune.data.formats import learnt_plain
from shardtune.errors import JobError, Problem, RunError
from shardtune.evaluation.recipes import find_tasks
from shardtune.evaluation.run_task import require_measurable_task, run_task
from shardtune.evaluation.task import Task, require_answerable
from shardtune.evaluation.task_rows import TaskRow, open_rows, require_framed
from shardtune.launch.process_group import JoinedWorld
from shardtune.models.model_files import ModelFiles
from shardtune.training.engine_setup import Plan
from shardtune.training.respondent_model import ModelRespondent

TASKS_KEY = "evaluate.tasks"


@dataclass(frozen=True)
class ScheduledTask:
    """A task with its rows, and the steps between two runs of it; 0 runs it only before and
    after."""

    task: Task
    every: int
    rows: tuple[TaskRow, ...]
    """Read once: a file that is edited, or a hub that is away, changes nothing in a run."""

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def content(self) -> str:
        """What is asked, as ranks compare it."""
        digest = hashlib.sha256(repr(self.rows).encode()).hexdigest()
        return f"{len(self.rows)} rows, sha256 {digest[:16]}"

    def due(self, step: int) -> bool:
        return due(step, self.every)


def due(step: int, every: int) -> bool:
    """True in every `every`-th step; never where `every` is 0."""
    return every > 0 and step % every == 0


def open_tasks(job: Job, files: ModelFiles) -> tuple[ScheduledTask, ...]:
    """The tasks of a job. Everything that can be wrong with one is tried: its file, its rows, its
    packages, its name."""
    plain = learnt_plain(job.data, files.tokenizer)
    has_template = plain or files.tokenizer.chat_template is not None
    found = []
    for number, entry in enumerate(job.evaluate.tasks):
        options = {
            "limit": entry.limit,
            "shots": entry.shots,
            "max_new_tokens": entry.max_new_tokens,
        }
        for task in find_tasks(entry.task, f"{TASKS_KEY}[{number}].task"):
            assert entry.every != "auto"
            found.append((task.with_options(options), entry.every))
    tasks = [task for task, _ in found]
    if twice := [name for name, times in Counter(each.name for each in tasks).items() if times > 1]:
        fact = f"two tasks are called {', '.join(twice)}"
        raise JobError(Problem(TASKS_KEY, fact, "describe one in a task file, with `name:`"))
    require_answerable(tasks, allow_code=job.evaluate.allow_code, by="evaluate.allow_code: true")
    for task in tasks:
        require_framed(task, has_template=has_template, plain=plain)
        require_measurable_task(task)
    return tuple(
        ScheduledTask(task, every, tuple(open_rows(task, has_template=has_template)))
        for task, every in found
    )


def asked_by_ranks(
    job: Job, files: ModelFiles, engine: Engine, plan: Plan, world: JoinedWorld
) -> ModelRespondent:
    """The model that an engine holds, as its ranks ask it together: those that train different rows
    share the questions."""
    return ModelRespondent(
        engine.module(),
        files.tokenizer,
        files.stop_ids,
        world.device,
        job.evaluate.batch_size,
        world=world,
        plain=learnt_plain(job.data, files.tokenizer),
        data_ranks=tuple(plan.mesh.data_rank(rank) for rank in range(world.size)),
        sharded=plan.layout.together(plan.mesh),
    )


def measure_task(
    scheduled: ScheduledTask,
    asked: ModelRespondent,
    world: JoinedWorld,
    progress: Callable[[int, int], None],
) -> TaskFigures:
    """Runs a task on the model as it is now. Every rank has to. RunError where a batch of questions
    doesn't fit into memory; a smaller micro-batch of training would not help it."""
    begun = time.perf_counter()
    world.heartbeat.enter("evaluate")
    told = replace(asked, progress=lambda done, total, _: progress(done, total))
    try:
        result = run_task(scheduled.task, scheduled.rows, told)
    except torch.OutOfMemoryError as error:
        rows = asked.batch_size
        fact = f"out of memory on rank {world.rank}, {rows} questions of {scheduled.name} at once"
        fix = f"set evaluate.batch_size: {rows // 2}"
        if rows == 1:
            fix = "ask for shorter answers or fewer examples (max_new_tokens, shots of the task)"
        raise RunError(Problem("evaluate.batch_size", f"{fact} ({error})", fix)) from error
    found = result.interval
    return TaskFigures(
        metric=result.metric,
        score=found.mean,
        low=found.low,
        high=found.high,
        rows=found.rows,
        seconds=world.max(time.perf_counter() - begun),
    )
