"""From a job file to a job that can run: each `auto` replaced, rules checked, memory enough."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.core.world import outside_nodes, outside_ranks

if TYPE_CHECKING:
    from shardtune.config.auto import ResolvedJob
    from shardtune.config.job import Job
    from shardtune.config.job_file import LoadedJob
    from shardtune.plan.forecast import Forecast


def read_job(arguments: argparse.Namespace) -> tuple[LoadedJob, ResolvedJob]:
    """The job, checked."""
    from shardtune.config.job_file import load_job

    loaded = load_job(arguments.job, arguments.overrides)
    return loaded, resolve_here(loaded)


def resolve_here(
    loaded: LoadedJob,
    *,
    runs_here: bool = False,
    nodes: int = 1,
    resume: bool = False,
    restart_schedule: bool = False,
) -> ResolvedJob:
    """The job with a value for each `auto`, checked; where it is to run here, against what this
    machine has, too. With `resume` it goes on as the run in its directory does."""
    from shardtune.checkpoint.extension import continued
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.auto import resolve
    from shardtune.config.rules import check
    from shardtune.core.host.machine import Machine
    from shardtune.plan.this_machine import measured_here, planner_here

    job = loaded.job
    machine = measured_here() if job.train.precision == "auto" else Machine.here()
    nodes = max(nodes, outside_nodes())
    run = RunDir(Path(job.save.directory).expanduser())
    begun = run.read_job() if resume else None
    planner = planner_here(machine, nodes, begun)
    resolved = resolve(
        job,
        machine,
        outside_ranks(),
        nodes=nodes,
        planner=planner,
        begun=begun,
    )
    if resume:
        resolved = continued(resolved, run, restart_schedule=restart_schedule)
    check(resolved.job, loaded.place, machine if runs_here else None)
    return resolved


def fitting_forecast(
    arguments: argparse.Namespace,
    job: Job,
    nodes: int,
    *,
    written: Job | None = None,
    rows_told: bool = False,
) -> Forecast | None:
    """What the run will take here; refuses what doesn't fit, before anything is opened.
    `written` is the job before `auto` was replaced. `rows_told`: the strategy's own file says the
    micro-batch."""
    from shardtune.core.host.machine import Machine
    from shardtune.plan.this_machine import forecast_here, require_fit

    found = forecast_here(job, Machine.here(), nodes)
    if found is not None and not arguments.ignore_forecast:
        require_fit(found, written=written, rows_told=rows_told)
    return found
