"""Runs the ranks of a job as workers of Ray Train, to their end, through faults where that can be
done.

Ray places and starts the workers and tells them where rank 0 is; they join as ranks anywhere do. A
worker that fails leaves an error report beside the run's logs, and the same policy as on one
machine decides whether all are started again from the last checkpoint.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, get_context
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError, WorkerGroupError

from shardtune.config.job import RayLaunch
from shardtune.core.host.machine import Machine
from shardtune.core.host.network import LOOPBACK, free_port
from shardtune.errors import LaunchRefused, Problem
from shardtune.launch import SECRET
from shardtune.launch.error_file import ERROR_FILE, read_error_report
from shardtune.launch.failure import Failure
from shardtune.launch.followed_log import FollowedLog
from shardtune.launch.gate import new_secret
from shardtune.launch.ray_watch import RayWatch, show_heartbeat
from shardtune.launch.restart_policy import (
    RestartPolicy,
    count_faults,
    halvings,
    past_attempts,
    refuse_restart,
)

_PRINTED = "rank-0.log"


@dataclass(frozen=True)
class RayResources:
    """What the job gets of the cluster."""

    count: int
    gpu: bool
    cpus: int
    """Of each."""
    accelerators: tuple[str, ...] = ()
    """What Ray calls the GPUs of the cluster, such as `A100`."""


@dataclass(frozen=True)
class RayTask:
    """What each worker is given to do."""

    job: str
    """The resolved job, as JSON."""
    resume: bool
    folder: str
    """Where the run was started: paths in a job are relative to it."""
    logs: str = ""
    """The folder for what this attempt prints and for error reports."""
    halvings: int = 0
    """How often the micro-batch was halved, because memory ran out."""
    secret: str = field(default="", repr=False)
    """Of the run: workers that have it find each other."""


@contextmanager
def ray_cluster(launch: RayLaunch) -> Iterator[RayResources]:
    """A Ray to run on, which ends with the block if it was started here."""
    here = launch.address is None
    folder = tempfile.mkdtemp(prefix="shardtune-ray-") if here else None
    try:
        if here:
            _start_here(launch, folder)
        else:
            _connect(str(launch.address))
        yield _workers(launch, ray.cluster_resources())
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _start_here(launch: RayLaunch, folder: str | None) -> None:
    """On the loopback address only. As under `type: local` there may be more ranks than cores."""
    each = launch.resources_per_worker.get("CPU", 1)
    asked = launch.workers if isinstance(launch.workers, int) else 1
    ray.init(
        address="local",
        num_cpus=max(Machine.here().cores, math.ceil(asked * each)),
        include_dashboard=launch.dashboard,
        dashboard_host=LOOPBACK,
        log_to_driver=False,  # what rank 0 prints is shown; the rest is in Ray's logs
        _temp_dir=folder,
    )


def _connect(address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        fact = f"no Ray answers at {address!r}: {error}"
        fix = "start one (`ray start --head`), correct the address, or leave it out to start one"
        raise LaunchRefused(Problem("launch.address", fact, fix)) from None


def _workers(launch: RayLaunch, has: Mapping[str, float]) -> RayResources:
    gpus, each = int(has.get("GPU", 0)), launch.resources_per_worker
    gpu = gpus > 0 if launch.use_gpu == "auto" else launch.use_gpu
    count = gpus if launch.workers == "auto" else launch.workers
    problems = []
    if count == 0:
        fact = "there is to be one worker for each GPU, and the Ray cluster has none"
        problems.append(Problem("launch.workers", fact, "set launch.workers and use_gpu: false"))
    cpus = each.get("CPU", 1)
    asked = {"CPU": cpus, **({"GPU": 1.0} if gpu else {}), **each}
    for name, amount in asked.items():
        if count * amount > has.get(name, 0):
            fact = (
                f"{count} workers x {amount:g} {name} and the Ray cluster has {has.get(name, 0):g}"
            )
            fix = "lower launch.workers or launch.resources_per_worker"
            if name == "GPU":
                fix += ", or set launch.use_gpu: false"
            problems.append(Problem("launch", fact, fix))
    if problems:
        raise LaunchRefused(problems)
    kind = "accelerator_type:"
    names = tuple(sorted(name.removeprefix(kind) for name in has if name.startswith(kind)))
    return RayResources(count, gpu, max(1, int(cpus)), names)


def run_ray(
    body: Callable[[RayTask], None],
    task: RayTask,
    launch: RayLaunch,
    workers: RayResources,
    *,
    logs: Path,
    policy: RestartPolicy,
    step: Callable[[], int],
    say: Callable[[str], None],
) -> None:
    """Runs `body(task)` on each worker, and shows what rank 0 prints; LaunchError if it failed.

    An attempt that goes on is given `resume` and `halvings`. `step` tells how far the run has come.
    `logs` has to be seen by all workers, and here.
    """
    failures: list[Failure] = []
    earlier = past_attempts(logs)
    while True:
        folder = logs / f"attempt-{earlier + len(failures)}"
        folder.mkdir(parents=True, exist_ok=True)
        given = replace(
            task,
            secret=new_secret(),
            logs=str(folder),
            halvings=halvings(failures, policy),
            resume=task.resume or bool(failures),
        )
        watch = RayWatch(folder, workers.count, policy.patience)
        try:
            with watch.watching(), _shown(folder / _PRINTED):
                _fit(body, given, launch, workers)
            return
        except (TrainingFailedError, RayError) as error:
            failures.append(watch.failure() or _failure(error, folder, step()))
        last = failures[-1]
        reduced = halvings(failures, policy) > halvings(failures[:-1], policy)
        refused = None if reduced else refuse_restart(failures, policy)
        if refused is not None:
            raise last.error(*refused)
        what = "half the micro-batch" if reduced else f"restart {count_faults(failures)}"
        say(f"{last.cause}\ngoing on from the last checkpoint ({what} of {policy.restarts})")


def _fit(
    body: Callable[[RayTask], None],
    task: RayTask,
    launch: RayLaunch,
    workers: RayResources,
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # for Ray's own notes: the run directory is ours
        trainer = TorchTrainer(
            _worker,
            train_loop_config={"body": body, "task": task},
            torch_config=_Addresses(),
            scaling_config=ScalingConfig(
                num_workers=workers.count,
                use_gpu=workers.gpu,
                resources_per_worker=launch.resources_per_worker or None,
            ),
            run_config=RunConfig(
                storage_path=folder if launch.address is None else None,
                failure_config=FailureConfig(max_failures=0),  # our policy decides
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        )
        trainer.fit()


def _worker(given: dict[str, Any]) -> None:
    task: RayTask = given["task"]
    rank, logs = get_context().get_world_rank(), Path(task.logs)
    os.environ[SECRET] = task.secret
    os.environ[ERROR_FILE] = str(logs / f"error-{rank}.json")
    show_heartbeat(logs, rank, get_context().get_world_size())
    printed = logs / (f"rank-{rank}.log" if rank else _PRINTED)
    with printed.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        given["body"](task)


@contextmanager
def _shown(file: Path) -> Iterator[None]:
    """Prints here what is written there, as long as the block lasts."""
    ended, log = threading.Event(), FollowedLog(file)

    def follow() -> None:
        while not ended.wait(0.2):
            log.show(sys.stdout)
        log.show(sys.stdout)
        log.close()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _failure(error: Exception, folder: Path, step: int) -> Failure:
    """The worker that failed first: one that died without a report comes before those that
    complain, because they have only lost their peer."""
    failed = dict(error.worker_failures) if isinstance(error, WorkerGroupError) else {}
    words = {
        rank: said
        for rank in failed
        if (said := read_error_report(folder / f"error-{rank}.json")) is not None
    }
    mute = sorted(failed.keys() - words.keys())
    if mute:
        rank = mute[0]
        why = str(failed[rank]).strip().splitlines()[0]
        fix = "see Ray's logs of that worker; if its node ran out of memory, lower micro_batch"
        problem = Problem(
            f"rank {rank}", f"its Ray worker died without an error report: {why}", fix
        )
        return Failure("fault", rank, step, (problem,))
    if words:
        rank, said = min(words.items(), key=lambda item: item[1].time)
        fix = "a bug of shardtune or of a library"
        told = said.problems or (Problem(f"rank {rank}", said.traceback, fix),)
        kind = said.kind if said.problems or step else "problem"
        refused = bool(said.problems) and kind != "fault"
        return Failure(kind, rank, step, told, refused=refused)
    problem = Problem("Ray", str(error).strip(), "see Ray's logs")
    return Failure("fault", None, step, (problem,))


class _Addresses(TorchConfig):  # type: ignore[misc]
    """Tells the workers where rank 0 is, and leaves it to them to join when their data is ready:
    nobody waits in a collective while another one tokenizes."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _AddressBackend


class _AddressBackend(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, _own_address)
        worker_group.execute(_set_environment, address=address, port=port)


def _own_address() -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    return address, free_port(address)


def _set_environment(address: str, port: int) -> None:
    context = get_context()
    os.environ.update(
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
