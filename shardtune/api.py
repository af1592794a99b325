"""The public API: train, plan and load results from Python. `import shardtune` names all of it.

Nothing here does anything that a command doesn't do, too; both go the same way.
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
    """The job in a YAML file, as it was written: `auto` stays `auto`. JobError names every mistake.

    `overrides` are changes as on the command line: `["train.steps=10"]`.
    """
    from shardtune.config.job_file import load_job as load

    return load(Path(path), overrides).job


def forecast(job: Job, cluster: str | Cluster) -> Forecast:
    """What `job` will hold, send and take on a cluster, as `shardtune estimate` says it.

    `cluster` is written as on the command line: `"4xA40"`, `"2x8xH100@400Gbps"`, or the path of a
    profile that `shardtune bench` has written.
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
    """Every strategy for `job` on a cluster, the best first, as `shardtune plan` ranks them."""
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
    """The model that a run has trained, and its tokenizer, of transformers and peft.

    An adapter is put on its base model. The model is on the CPU, in evaluation mode.
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
    """Trains `job` on this machine, as `shardtune train` does, and returns the run's report.

    The ranks are processes of their own; what they print appears on `sys.stdout`. A notebook shows
    the live view in the cell's output. A `quiet` run prints warnings only. An interrupt (Ctrl-C)
    asks them to stop after their step, a second one kills them. With `resume` the run in
    `save.directory` goes on after its newest checkpoint; with `overwrite` it is replaced. Raises
    ShardtuneError with every problem.
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
    """Runs Python with these words; each line that it prints appears here. Returns the exit code.

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
    """What the launcher raised. A job that was made in Python has no lines to name."""
    told = json.loads(text)
    kind: type[errors.ShardtuneError] = getattr(errors, told["error"])
    line = re.compile(re.escape(str(job)) + r"(:\d+)?(: )?")
    problems = [
        errors.Problem(line.sub("", each["place"]), line.sub("", each["fact"]), each["fix"])
        for each in told["problems"]
    ]
    return kind(problems)
