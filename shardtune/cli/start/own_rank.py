"""A command that is a rank already: our launcher, torchrun or Slurm has started it."""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.resolve_job import fitting_forecast, resolve_here
from shardtune.cli.start.fault_page import leaving_page
from shardtune.cli.start.run_claim import claim_directory, mend_overwrite
from shardtune.core.host.paused_collector import paused_collector
from shardtune.core.world import outside_nodes
from shardtune.launch import LAUNCHER_PID

if TYPE_CHECKING:
    from shardtune.config.job import Job
    from shardtune.launch.process_group import StopSignals
    from shardtune.plan.run_forecast import RunForecast


def train_as_rank(arguments: argparse.Namespace) -> int:
    """One of the processes that our launcher, torchrun or Slurm has started."""
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.job_file import load_job
    from shardtune.core.host.parent_death import die_with_parent
    from shardtune.launch.accelerate_env import drop_plugins
    from shardtune.launch.error_file import reporting_errors

    if (launcher := os.environ.get(LAUNCHER_PID)) is not None:  # before anything that takes time
        die_with_parent(int(launcher))
    if (given := drop_plugins(os.environ)) and os.environ["RANK"] == "0":
        print(f"note: {', '.join(given)} of accelerate: not used; the job's strategy decides")
    with reporting_errors():
        loaded = load_job(arguments.job, arguments.overrides)
        if LAUNCHER_PID in os.environ:  # our launcher has resolved, checked, predicted and cleared
            job, clears = loaded.job, False
            predicted = RunDir(Path(job.save.directory).expanduser()).read_forecast()
        else:
            if os.environ["RANK"] == "0":
                mend_overwrite(Path(loaded.job.save.directory).expanduser())
            job = resolve_here(
                loaded,
                runs_here=True,
                resume=arguments.resume,
                restart_schedule=arguments.restart_schedule,
            ).job
            claim_directory(arguments, loaded, job)
            predicted = _predicted_by_rank_0(arguments, job)
            clears = arguments.overwrite  # only after all ranks have joined

        with paused_collector():
            from shardtune.launch.process_group import StopSignals
            from shardtune.train import train

        stop_signals = StopSignals()
        with _alone(job), _leaving_page(job, stop_signals):
            train(
                job,
                resume=arguments.resume,
                overwrite=clears,
                predicted=predicted,
                stop_signals=stop_signals,
                quiet=arguments.quiet or arguments.json,
                tracks=LAUNCHER_PID not in os.environ,
                profile_steps=arguments.profile or 0,
            )
    return stop_signals.exit_code


def _predicted_by_rank_0(arguments: argparse.Namespace, job: Job) -> RunForecast | None:
    """The first rank refuses what doesn't fit, and writes down what was predicted."""
    from shardtune.plan.run_forecast import RunForecast

    if os.environ["RANK"] != "0":
        return None
    found = fitting_forecast(arguments, job, outside_nodes())
    return RunForecast.of(found) if found is not None else None


def _alone(job: Job) -> AbstractContextManager[None]:
    """Keeps other runs out of the directory. Our own launcher does that for its ranks."""
    from shardtune.checkpoint.run_dir import RunDir

    if LAUNCHER_PID in os.environ or os.environ["RANK"] != "0":
        return nullcontext()
    return RunDir(Path(job.save.directory).expanduser()).locked()


def _leaving_page(job: Job, stop_signals: StopSignals) -> AbstractContextManager[None]:
    """A run without our launcher leaves its page itself, when it fails or is preempted."""
    from shardtune.checkpoint.run_dir import RunDir

    run = RunDir(Path(job.save.directory).expanduser())
    wanted = LAUNCHER_PID not in os.environ and os.environ["RANK"] == "0"
    return leaving_page(run, wanted=wanted, stopped=lambda: stop_signals.exit_code > 0)
