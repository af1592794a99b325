"""`shardtune diagnose`: what bounds a run's speed, and what would help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.arguments import Commands, add_command, add_json, add_run_directory
from shardtune.errors import JobError, ModelError, Problem, RunError

if TYPE_CHECKING:
    from shardtune.config.job import Job
    from shardtune.core.runs.rank_profile import RankProfile
    from shardtune.core.runs.run_history import RunHistory
    from shardtune.plan.cluster import Cluster
    from shardtune.plan.measured_run import RunDevice, RunFacts


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "diagnose",
        diagnose_run,
        "find the bottleneck of a run, and what would help",
        """\
  shardtune diagnose runs/quickstart
  shardtune diagnose runs/quickstart --cluster 4xA40""",
    )
    add_run_directory(command)
    command.add_argument(
        "--cluster", metavar="SPEC", help="devices of the run, if not this machine's: 4xA40"
    )
    add_json(command)


def diagnose_run(arguments: argparse.Namespace) -> int:
    """Prints the diagnosis."""
    from rich.console import Console

    from shardtune.plan.diagnose import diagnose
    from shardtune.report.diagnosis_table import print_diagnosis

    run, history = read_facts(arguments.directory)
    found = diagnose(run, _device(run.job, history, arguments.cluster))
    if arguments.json:
        print(found.to_json(indent=2))
    else:
        print_diagnosis(found, Console())
    return 0


def read_facts(directory: Path) -> tuple[RunFacts, RunHistory]:
    """What the run directory tells; RunError where that is too little."""
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.checkpoint.run_guards import require_run
    from shardtune.core.runs.run_history import read_run_history
    from shardtune.core.runs.step_parts import total_parts
    from shardtune.plan.measured_run import RunFacts, without_outliers

    require_run(RunDir(directory))
    job = RunDir(directory).read_job()
    history = read_run_history(directory)
    accounts = [line.parts for line in history.steps if line.parts is not None]
    if job is None or not accounts:
        fact = "holds no metrics that say where the time of a step went"
        fix = "give the directory of a run that has taken some steps, of this version"
        raise RunError(Problem(str(directory), fact, fix))
    # The first ones warm up: they compile, allocate and fill caches.
    usual = without_outliers(accounts[1:] or accounts)
    first = next(line.step for line in history.steps if line.parts is not None)
    later = [line.tokens for line in history.steps if line.step > first]
    later = later or [line.tokens for line in history.steps]
    slow = {
        event.rank: event.seconds / event.others
        for event in history.events
        if event.kind == "slow" and event.rank is not None and event.seconds and event.others
    }
    predicted = history.forecast.parts if history.forecast is not None else None
    facts = RunFacts(
        str(directory),
        job,
        total_parts(usual),
        sum(later) / len(later),
        slow,
        _profiles(directory),
        predicted,
        _task_seconds(history, first),
        history.total_steps,
    )
    return facts, history


def _task_seconds(history: RunHistory, first: int) -> dict[str, float]:
    """Of a step from this one on; what runs after the last is no part of one."""
    last = history.steps[-1].step
    return {
        name: sum(each.seconds for each in runs if first <= each.step < last) / max(1, last - first)
        for name, runs in history.tasks.items()
    }


def _profiles(directory: Path) -> tuple[RankProfile, ...]:
    """What each rank's profile says; those that can't be read are left out."""
    paths = sorted((directory / "profile").glob("rank-*[0-9].json"))
    return tuple(found for path in paths if (found := _profile(path)) is not None)


def _profile(path: Path) -> RankProfile | None:
    from shardtune.core.files.regular_file import read_regular
    from shardtune.core.runs.rank_profile import RankProfile

    try:
        return RankProfile.model_validate_json(read_regular(path, 1 << 24))
    except (OSError, ValueError):
        return None


def _device(job: Job, history: RunHistory, cluster: str | None) -> RunDevice:
    """What it ran on: as it was told, as its environment says, or this machine."""
    from shardtune.config.model_config import shape_of
    from shardtune.plan.forecast import forecast
    from shardtune.plan.measured_run import RunDevice
    from shardtune.plan.this_machine import measured_here

    gpus = history.environment.gpus if history.environment is not None else ()
    is_gpu = bool(gpus)
    try:
        there = _cluster(job, gpus, cluster)
        is_gpu = there.gpu.name != "CPU"
        found = forecast(job, shape_of(job.model), there)
    except (JobError, ModelError):
        return RunDevice(None, None, is_gpu)
    if is_gpu:
        return RunDevice(found, found.speed.peak, is_gpu=True)
    speed = measured_here().matmul
    core = speed.tflops.get(job.train.compute_precision) if speed is not None else None
    peak = core * 1e12 * int(job.launch.threads) if core else None
    return RunDevice(found, peak, is_gpu=False)


def _cluster(job: Job, gpus: tuple[str, ...], told: str | None) -> Cluster:
    from shardtune.core.host.machine import Machine
    from shardtune.plan.cluster import parse_cluster
    from shardtune.plan.this_machine import cluster_here, measured_here

    if told is not None:
        return parse_cluster(told)
    ranks = int(job.launch.processes)
    machine = Machine.here()
    if gpus and not machine.gpus:
        maker = ("NVIDIA", "GeForce", "Tesla")
        name = "".join(word for word in gpus[0].split() if word not in maker)
        return parse_cluster(f"{ranks}x{name}")
    return cluster_here(machine if machine.gpus else measured_here(), ranks)
