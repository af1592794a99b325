"""The public API: train, plan and load results from Python. `import shardtune` exports all of it.

Each function does what a command does, by the same code.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune import errors
from shardtune.launch import INTERRUPTED, PREEMPTED

if TYPE_CHECKING:
    from shardtune.config.job import Job
    from shardtune.core.runs.run_report import RunReport
    from shardtune.plan.cluster import Cluster
    from shardtune.plan.explain import Aim
    from shardtune.plan.forecast import Forecast
    from shardtune.plan.search import Ranking


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Reads a job from a YAML file; `auto` stays `auto`. Raises JobError with every mistake.

    `overrides` are changes as on the command line: `["train.steps=10"]`.
    """
    from shardtune.config.job_file import load_job as load

    return load(Path(path), overrides).job


def forecast(job: Job, cluster: str | Cluster) -> Forecast:
    """Forecasts memory, traffic and step time of `job` on a cluster, like `shardtune estimate`.

    `cluster` is written as on the command line: `"4xA40"`, `"2x8xH100@400Gbps"`, or the path of a
    profile that `shardtune bench` has written. Raises JobError or ModelError if the job can't run.
    """
    from shardtune.config.model_config import shape_of
    from shardtune.config.rules import check
    from shardtune.core.files.yaml_document import dotted
    from shardtune.plan.forecast import forecast as compute
    from shardtune.plan.on_cluster import chosen_precision, resolve_as_asked

    shape, there = shape_of(job.model), _cluster(cluster)
    resolved = resolve_as_asked(job, shape, there)
    check(resolved.job, dotted)
    found = compute(resolved.job, shape, there)
    return replace(found, reasons=(*chosen_precision(resolved), *found.reasons))


def rank_strategies(job: Job, cluster: str | Cluster, minimise: Aim = "time") -> Ranking:
    """Ranks every strategy for `job` on a cluster, the best first, like `shardtune plan`.

    `minimise` is `"time"`, `"cost"` or `"memory"`.
    """
    from shardtune.config.model_config import shape_of
    from shardtune.config.rules import check
    from shardtune.core.files.yaml_document import dotted
    from shardtune.plan.forecast import forecast as compute
    from shardtune.plan.on_cluster import resolve_as_asked, resolve_on
    from shardtune.plan.search import rank

    shape, there = shape_of(job.model), _cluster(cluster)
    ranking = rank(resolve_on(job, there).job, shape, there, minimise)
    if not any(each.found for each in ranking.candidates):  # it isn't memory that is lacking
        asked = resolve_as_asked(job, shape, there).job
        check(asked, dotted)
        compute(asked, shape, there)
    return ranking


def _cluster(cluster: str | Cluster) -> Cluster:
    from shardtune.plan.cluster import parse_cluster

    return parse_cluster(cluster) if isinstance(cluster, str) else cluster


def load_result(run_directory: str | Path) -> tuple[Any, Any]:
    """Loads the model that a run has trained, and its tokenizer, with transformers and peft.

    After a run with an adapter it is a PeftModel on its base model. It is on the CPU, in evaluation
    mode and in the run's compute dtype. Raises RunError if the result is missing or damaged.
    """
    from shardtune.cli.result_command import open_result
    from shardtune.models.load_result import load_result as load
    from shardtune.models.load_result import load_result_tokenizer
    from shardtune.models.model_files import ModelFiles

    run, job = open_result(Path(run_directory))
    model = load(str(run.result), ModelFiles(job.model), job.train.compute_precision).eval()
    return model, load_result_tokenizer(str(run.result), job.model)


def train(
    job: Job, *, resume: bool = False, overwrite: bool = False, quiet: bool = False
) -> RunReport:
    """Trains `job` on this machine, like `shardtune train`, and returns the run's report.

    The ranks are processes of their own; their output appears on `sys.stdout`. A notebook shows the
    live view in the cell's output. With `quiet` only warnings are printed. Ctrl-C ends the run
    after its step, with a checkpoint, and a second one kills the ranks; then KeyboardInterrupt is
    raised. With `resume` the run in `save.directory` continues from its newest intact checkpoint;
    with `overwrite` it is replaced. Raises ShardtuneError with every problem.
    """
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.core.files.yaml_document import dump_document

    if resume and overwrite:
        fact = "a run is either resumed or overwritten"
        raise errors.JobError(errors.Problem("train", fact, "give one of the two"))
    with tempfile.TemporaryDirectory() as folder:
        path, failure = Path(folder) / "job.yaml", Path(folder) / "error.json"
        path.write_text(dump_document(job.model_dump(mode="json")), encoding="utf-8")
        drawn = _drawn(job) if not quiet else None
        words = ["--resume"] * resume + ["--overwrite"] * overwrite
        words += ["--quiet"] * (quiet or drawn is not None)
        module = "shardtune.cli.train_from_python"
        with drawn or nullcontext():
            code = _run_shown(["-m", module, str(os.getpid()), str(failure), str(path), *words])
        if failure.exists():
            raise _error(failure.read_text(encoding="utf-8"), path)
    directory = Path(job.save.directory).expanduser()
    if code not in (0, INTERRUPTED, PREEMPTED):
        fact = f"the launcher ended with exit code {code}"
        raise errors.LaunchError(errors.Problem(str(directory), fact, "look at what it printed"))
    report = RunDir(directory).read_report() if code != PREEMPTED else None
    if report is None:
        fact = "the run was preempted; it has a checkpoint"
        fix = "train(job, resume=True) goes on with it"
        raise errors.RunError(errors.Problem(str(directory), fact, fix))
    return report


def _drawn(job: Job) -> AbstractContextManager[None] | None:
    """The live view of a notebook; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from shardtune.report.notebook import in_notebook, notebook_view

    directory = Path(job.save.directory).expanduser()
    return notebook_view(directory, job.train.steps) if in_notebook() else None


def _run_shown(words: Sequence[str]) -> int:
    """Runs Python with these arguments and forwards its output. Returns the exit code.

    The process has a session of its own: a terminal would interrupt it and us at the same time,
    which counts as a second interrupt.
    """
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
        start_new_session=True,
    )
    assert process.stdout is not None
    interrupts = 0
    with process.stdout as printed:
        while True:
            try:
                _forward(printed.readline)
                code = process.wait()
                break
            except KeyboardInterrupt:
                interrupts += 1
                process.send_signal(signal.SIGINT)
    if interrupts:
        raise KeyboardInterrupt
    return code


def _forward(read_line: Callable[[], str]) -> None:
    while line := read_line():
        with suppress(OSError):  # nobody reads it any more; the run goes on
            sys.stdout.write(line)
            sys.stdout.flush()


def _error(text: str, job: Path) -> errors.ShardtuneError:
    """The error that the launcher raised, without the lines of a job file that doesn't exist."""
    told = json.loads(text)
    kind: type[errors.ShardtuneError] = getattr(errors, told["error"])
    line = re.compile(re.escape(str(job)) + r"(:\d+)?(: )?")
    problems = [
        errors.Problem(line.sub("", each["place"]), line.sub("", each["fact"]), each["fix"])
        for each in told["problems"]
    ]
    return kind(problems)
