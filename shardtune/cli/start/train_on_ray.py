"""A job with `launch: {type: ray}`: what the driver does, and what each worker does."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.checkpoint.extension import continued
from shardtune.checkpoint.overwrite import overwriting
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_resumable
from shardtune.cli.say import say
from shardtune.cli.start.fault_page import leaving_page
from shardtune.config.auto import ResolvedJob, resolve
from shardtune.config.job import Job, RayLaunch
from shardtune.config.rules import check
from shardtune.core.host.machine import Machine
from shardtune.core.host.matmul_speed import MatmulSpeed, gpu_matmul_speed
from shardtune.core.world import outside_nodes
from shardtune.errors import JobError, LaunchRefused, Problem
from shardtune.launch.error_file import reporting_errors
from shardtune.launch.ray import RayResources, RayTask, ray_cluster, run_ray
from shardtune.launch.restart_policy import RestartPolicy
from shardtune.plan.auto_micro_batch import leanest
from shardtune.plan.cluster import find_gpu
from shardtune.plan.run_forecast import RunForecast
from shardtune.plan.this_machine import forecast_here, measured_here
from shardtune.report.start_summary import print_opening
from shardtune.report.summary import print_summary
from shardtune.train import train
from shardtune.training.inputs import open_inputs

if TYPE_CHECKING:
    from shardtune.config.job_file import LoadedJob


def start_on_ray(arguments: argparse.Namespace, loaded: LoadedJob, run: RunDir) -> int:
    """Trains on Ray's workers, and prints the summary."""
    launch = loaded.job.launch
    assert isinstance(launch, RayLaunch)
    with ray_cluster(launch) as workers, run.locked(), ExitStack() as until_the_end:
        begun = run.read_job() if arguments.resume else None
        resolved = _resolved(loaded, workers, begun, here=launch.address is None)
        if arguments.resume:
            resolved = continued(resolved, run, restart_schedule=arguments.restart_schedule)
            require_resumable(run, resolved.job)
        job = resolved.job
        if launch.address is None:  # elsewhere only the workers need to see the files
            inputs = open_inputs(job, quiet=False)
            trained = [each.report for each in inputs.data.train]
            held_out = [each.report for each in inputs.data.eval]
            reasons = {**loaded.understood, **resolved.reasons}
            print_opening(job, reasons, trained, held_out, notes=resolved.notes)
        until_the_end.enter_context(overwriting(run, wanted=bool(arguments.overwrite)))
        run.prepare()
        task = RayTask(job.model_dump_json(), arguments.resume, str(Path.cwd()))
        reduce = job.train.on_oom == "reduce_micro_batch"
        halvings = int(job.train.micro_batch).bit_length() - 1 if reduce else 0
        with leaving_page(run):
            run_ray(
                on_worker,
                task,
                launch,
                workers,
                logs=run.logs.absolute(),
                policy=RestartPolicy(restarts=launch.max_failures, halvings=halvings),
                step=lambda: _last_step(run),
                say=say,
            )
    if launch.storage is not None:
        _copy(run.path, launch.storage)
    if (report := run.read_report()) is not None:
        print_summary(report)
    return 0


def _resolved(
    loaded: LoadedJob, workers: RayResources, begun: Job | None, *, here: bool
) -> ResolvedJob:
    """The job for what Ray gives it, checked."""
    gpus = workers.count if workers.gpu else 0
    matmul = measured_here().matmul if here else _matmul(workers)
    machine = Machine(cores=workers.cpus * workers.count, gpus=gpus, matmul=matmul)
    unknown = "which GPUs the workers have isn't known here"
    resolved = resolve(
        loaded.job,
        machine,
        workers.count,
        planner=lambda job: leanest(job, unknown),
        begun=begun,
    )
    if loaded.job.launch.processes == "auto":
        reason = f"one for each GPU of the Ray cluster, {workers.count} found"
        resolved.reasons["launch", "workers"] = reason
    check(resolved.job, loaded.place, machine if here else None)
    return resolved


def _matmul(workers: RayResources) -> MatmulSpeed:
    """What workers elsewhere are fast in, so far as Ray names them."""
    if not workers.gpu:
        return MatmulSpeed((), "which CPUs the workers have isn't known here")
    for name in workers.accelerators:
        try:
            gpu = find_gpu(name)
        except JobError:
            continue
        if gpu.bf16_tflops is None:
            return gpu.matmul
    return gpu_matmul_speed(", ".join(workers.accelerators) or "a GPU of today", bf16=True)


def on_worker(task: RayTask) -> None:
    """One rank, on a worker of Ray."""
    if Path(task.folder).is_dir():
        os.chdir(task.folder)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    job = Job.model_validate_json(task.job)
    if task.halvings:
        micro_batch = int(job.train.micro_batch) >> task.halvings
        smaller = job.train.model_copy(update={"micro_batch": micro_batch})
        job = job.model_copy(update={"train": smaller})
    first = os.environ.get("RANK", "0") == "0"  # only here is it known what a worker has
    with reporting_errors():
        found = forecast_here(job, Machine.here(), outside_nodes()) if first else None
        predicted = RunForecast.of(found) if found is not None else None
        train(job, resume=task.resume, predicted=predicted, tracks=True)


def _last_step(run: RunDir) -> int:
    """How far the run has come, as far as its directory can be seen from here."""
    try:
        lines = run.metrics.read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["step"]) + 1
    except (OSError, ValueError, IndexError, KeyError):
        return 0


def _copy(folder: Path, target: str) -> None:
    """Copies the run directory to wherever fsspec can write."""
    try:
        system, path = _file_system(target)
        system.put(f"{folder}/", f"{path}/", recursive=True)
    except (OSError, ImportError, ValueError) as error:
        fact = f"{folder} could not be copied to {target}: {error}"
        fix = "the run itself is complete; copy it by hand, or fix launch.storage"
        raise LaunchRefused(Problem("launch.storage", fact, fix)) from error


def _file_system(target: str) -> tuple[Any, str]:
    """The file system that a path names, and the path in it. S3 is read and written by pyarrow,
    which is there anyway; other kinds need what fsspec asks for."""
    if target.startswith("s3://"):
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow import fs

        system, path = fs.FileSystem.from_uri(target)
        return ArrowFSWrapper(system), path
    import fsspec

    found: tuple[Any, str] = fsspec.core.url_to_fs(target)
    return found
