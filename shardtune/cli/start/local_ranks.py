"""Starts the ranks of this machine: opens what the run reads, hands the job on, restarts them."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.resolve_job import fitting_forecast, resolve_here
from shardtune.cli.say import say
from shardtune.cli.start.fault_page import leaving_page
from shardtune.cli.start.nodes import agree_on, other_launchers, telling
from shardtune.cli.start.ray_settings import start_with_ray
from shardtune.cli.start.run_claim import claim_directory, mend_overwrite
from shardtune.core.files.atomic_write import atomic_write
from shardtune.core.host.paused_collector import paused_collector
from shardtune.core.world import World

if TYPE_CHECKING:
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.auto import ResolvedJob
    from shardtune.config.job import Job
    from shardtune.core.files.yaml_document import KeyPath
    from shardtune.launch.node import Node
    from shardtune.launch.restart_policy import RestartPolicy
    from shardtune.models.model_files import ModelFiles
    from shardtune.plan.forecast import Forecast
    from shardtune.training.inputs import Inputs


def start_ranks(arguments: argparse.Namespace, node: Node | None) -> int:
    """Starts the ranks of this machine."""
    from shardtune.config.job import RayLaunch
    from shardtune.config.job_file import load_job

    loaded = load_job(arguments.job, arguments.overrides)
    mend_overwrite(Path(loaded.job.save.directory).expanduser())
    if isinstance(loaded.job.launch, RayLaunch):
        return start_with_ray(arguments, loaded, loaded.job.launch, node)
    nodes, first = node.count if node else 1, node is None or node.number == 0
    resolved = resolve_here(
        loaded,
        runs_here=True,
        nodes=nodes,
        resume=arguments.resume,
        restart_schedule=arguments.restart_schedule,
    )
    job = resolved.job
    run = claim_directory(arguments, loaded, job, first=first)
    ranks = int(job.launch.processes)
    told = loaded.job.strategy.micro_batch(job.train.global_batch, ranks) is not None
    predicted = fitting_forecast(arguments, job, nodes, written=loaded.job, rows_told=told)

    with paused_collector():
        from shardtune.checkpoint.overwrite import overwriting
        from shardtune.launch.supervisor import run_local
        from shardtune.plan.run_forecast import RunForecast
        from shardtune.report.summary import print_summary
        from shardtune.training.tracking import tracking

    with (
        other_launchers(node, job) as launchers,
        _locked(run, first),
        tempfile.TemporaryDirectory() as temp,
        ExitStack() as until_the_end,
    ):
        with telling(launchers):
            reasons = {**loaded.understood, **resolved.reasons}
            chosen = replace(resolved, reasons=reasons)
            said = first and not arguments.quiet
            inputs = _open(chosen, predicted if said else None, quiet=not said)
            if first:
                wanted = bool(arguments.overwrite)
                until_the_end.enter_context(overwriting(run, wanted=wanted, say=say))
                run.prepare()
                run.write_forecast(RunForecast.of(predicted) if predicted is not None else None)
            agree_on(launchers, job, inputs, run)
        command = _command_of_ranks(arguments, job, Path(temp))
        again = partial(_again, command, job, run if first else None, nodes)
        code = 0
        with (
            leaving_page(run, wanted=first, stopped=lambda: code > 0),
            tracking(job, run, wanted=first, say=say) as trackers,
        ):
            code = run_local(
                [*command, *(["--resume"] * arguments.resume), *_profiling(arguments)],
                processes=ranks // nodes,
                threads=int(job.launch.threads),
                logs=run.logs,
                policy=restart_policy(loaded.job, job, predicted, resume=arguments.resume),
                again=again,
                launchers=launchers,
            )
            trackers.hurried = code > 128  # whoever sent the signal wants the machine
    if said and (report := run.read_report()) is not None:
        print_summary(report)
    return code


def _command_of_ranks(arguments: argparse.Namespace, job: Job, folder: Path) -> list[str]:
    """The ranks get the job as it was resolved and checked here, written to `folder`: a file that
    is edited meanwhile, or that lies in the directory that was just cleared, must not matter."""
    from shardtune.core.files.yaml_document import dump_document

    checked = folder / arguments.job.name
    atomic_write(checked, dump_document(job.model_dump(mode="json")))
    return ["-m", "shardtune", "train", str(checked), *["--quiet"] * arguments.quiet]


def _again(
    command: list[str], job: Job, run: RunDir | None, nodes: int, halvings: int
) -> list[str]:
    """The command after a fault, with the micro-batch halved so often. That takes another amount of
    memory, which is written down where `run` is given."""
    if not halvings:
        return [*command, "--resume"]
    smaller = _smaller(job, halvings)
    if run is not None:
        from shardtune.core.host.machine import Machine
        from shardtune.plan.run_forecast import RunForecast
        from shardtune.plan.this_machine import forecast_here

        found = forecast_here(smaller, Machine.here(), nodes)
        run.write_forecast(RunForecast.of(found) if found is not None else None)
    return [*command, "--resume", f"train.micro_batch={smaller.train.micro_batch}"]


def _locked(run: RunDir, first: bool) -> AbstractContextManager[None]:
    return run.locked() if first else nullcontext()


def _profiling(arguments: argparse.Namespace) -> list[str]:
    """For the first attempt: another one is resumed after a fault, and has been profiled."""
    return ["--profile", str(arguments.profile)] if arguments.profile else []


def _open(resolved: ResolvedJob, predicted: Forecast | None, *, quiet: bool) -> Inputs:
    """Opens what the run reads, and prints what it will do."""
    with paused_collector():
        from shardtune.report.plan_table import print_outlook
        from shardtune.report.start_summary import print_opening
        from shardtune.training.engine_setup import make_plan
        from shardtune.training.inputs import count_steps, open_inputs, open_loader

    job = resolved.job
    inputs = open_inputs(job, quiet=quiet)
    world = World(size=int(job.launch.processes))
    steps = count_steps(job, open_loader(job, inputs, world))
    make_plan(job, world.size, steps)
    if not quiet:
        trained = [each.report for each in inputs.data.train]
        held_out = [each.report for each in inputs.data.eval]
        reasons = {**resolved.reasons, **_model_reasons(inputs.model)}
        print_opening(job, reasons, trained, held_out, notes=resolved.notes)
    if predicted is not None:
        print_outlook(predicted, steps)
    return inputs


def restart_policy(
    asked: Job, job: Job, predicted: Forecast | None, *, resume: bool
) -> RestartPolicy:
    """What doesn't fit although the forecast chose it is halved unasked, as long as no step has
    been taken with it. `asked` is the job as it was written."""
    from shardtune.config.auto import memory_decides
    from shardtune.config.job import LocalLaunch
    from shardtune.core.host.machine import Machine
    from shardtune.launch.restart_policy import RestartPolicy

    launch, train = job.launch, job.train
    assert isinstance(launch, LocalLaunch)
    most = int(train.micro_batch).bit_length() - 1
    chosen = memory_decides(asked, Machine.here())
    return RestartPolicy(
        launch.restarts,
        launch.patience,
        launch.grace,
        halvings=most if train.on_oom == "reduce_micro_batch" else 0,
        halvings_at_start=most if chosen and predicted is not None and not resume else 0,
    )


def _smaller(job: Job, halvings: int) -> Job:
    """The job with a micro-batch that was halved so often."""
    rows = int(job.train.micro_batch) >> halvings
    return job.model_copy(update={"train": job.train.model_copy(update={"micro_batch": rows})})


def _model_reasons(model: ModelFiles) -> dict[KeyPath, str]:
    """What only the model's files tell about a value of the job."""
    if not model.section.add_tokens:
        return {}
    return {("model", "add_tokens"): str(model.growth)}
