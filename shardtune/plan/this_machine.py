"""Looks before the run: will it fit here, and which strategy does it best?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardtune.config.auto import MICRO_BATCH, Planner, ResolvedJob
from shardtune.config.job import Job
from shardtune.config.model_config import shape_of
from shardtune.config.rules import check
from shardtune.core.files.cache import cache_dir
from shardtune.core.files.yaml_document import dotted
from shardtune.core.host.machine import Machine
from shardtune.core.host.matmul_speed import (
    MatmulSpeed,
    cpu_matmul_speed,
    forced_matmul_speed,
    gpu_matmul_speed,
)
from shardtune.core.model.shape import ModelShape
from shardtune.core.setup import Precision
from shardtune.core.units import GIB
from shardtune.errors import JobError, ModelError, Problem
from shardtune.parallel import DEFAULT
from shardtune.plan.auto_micro_batch import leanest, with_rows, within_memory
from shardtune.plan.cluster import Cluster, Gpu, find_gpu, known_gpus, parse_cluster
from shardtune.plan.explain import provided
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.machine_profile import LinkKind
from shardtune.plan.on_cluster import as_planned, resolve_as_asked
from shardtune.plan.remedies import Change, in_words, overrides, smallest_change, smallest_cluster
from shardtune.plan.search import rank

CPU_TFLOPS, CPU_GBS = 0.1, 10.0
"""Of a core whose products nobody has measured, and of the memory: enough to rank strategies by."""


def profile_path() -> Path:
    """Where `shardtune bench` leaves what it measured on this machine."""
    return cache_dir() / "machine.yaml"


def cluster_here(machine: Machine, ranks: int, nodes: int = 1) -> Cluster:
    """This machine, and others like it, as a cluster of so many devices: as measured, or as its
    driver names it."""
    processes = max(1, ranks // nodes)
    if profile_path().is_file():
        measured = parse_cluster(str(profile_path()))
        if measured.gpus_per_node == processes and (machine.gpus > 0) == (
            measured.gpu.name != "CPU"
        ):
            return replace(measured, nodes=nodes)
    host = machine.memory / GIB or None
    if not machine.gpus:
        share = machine.memory / GIB / processes
        core = CPU_TFLOPS
        if machine.matmul is not None:
            core = max(machine.matmul.tflops.values(), default=core)
        gpu = Gpu(
            "CPU", share, core * machine.cores, core * machine.cores, CPU_GBS,
            None, "none", CPU_GBS, "this machine",
        )  # fmt: skip
        return Cluster("this machine", gpu, nodes, processes)
    gpu = _gpu_here(machine)
    link: LinkKind = "nvlink" if gpu.nvlink == "switch" else "pcie"
    name = f"{processes}x{gpu.name}" if nodes == 1 else f"{nodes}x{processes}x{gpu.name}"
    return Cluster(name, gpu, nodes, processes, link, host_gib=host)


def measured_here() -> Machine:
    """This machine, with what its device is fast in. The first time that imports torch."""
    machine = Machine.here()
    return replace(machine, matmul=forced_matmul_speed() or _matmul(machine))


def _matmul(machine: Machine) -> MatmulSpeed:
    def measure() -> Mapping[Precision, float]:
        from shardtune.kernels.measure_matmul import measure_cpu_matmul  # which imports torch

        return measure_cpu_matmul()

    if not machine.gpus:
        return cpu_matmul_speed(measure)
    try:
        return _gpu_here(machine).matmul
    except JobError:  # not in the catalogue
        from shardtune.kernels.measure_matmul import bf16_on_gpu

        return gpu_matmul_speed(machine.gpu_name, bf16=bf16_on_gpu())


def _gpu_here(machine: Machine) -> Gpu:
    """The catalogue's entry of the first GPU."""
    maker = ("NVIDIA", "GeForce", "Tesla")
    name = "".join(word for word in machine.gpu_name.split() if word not in maker)
    return find_gpu(name, "this machine")


def forecast_here(job: Job, machine: Machine, nodes: int = 1) -> Forecast | None:
    """The forecast of a job on this machine; None for what the estimator doesn't know."""
    try:
        return require_forecast_here(job, machine, nodes)
    except (JobError, ModelError):
        return None  # a GPU or a family that isn't in the catalogue is no reason to refuse a run


def require_forecast_here(job: Job, machine: Machine, nodes: int = 1) -> Forecast:
    """The same, for those who say why there is none."""
    cluster = cluster_here(machine, int(job.launch.processes), nodes)
    return forecast(job, shape_of(job.model), cluster)


def require_fit(found: Forecast, *, written: Job | None = None, rows_told: bool = False) -> None:
    """Refuses a job that will not fit, before any weight is loaded, and offers what will."""
    if found.fits:
        return
    fix = offer(found.job, found.shape, found.cluster, written=written, rows_told=rows_told)
    fix += "; --ignore-forecast runs it as it is"
    raise JobError(Problem("memory", shortage(found), fix))


def shortage(found: Forecast) -> str:
    """What is needed, what there is, and what takes most of it."""
    if found.over <= 0:
        room = found.cluster.host_gib or 0.0
        return f"a node needs {found.host / GIB:.1f} GiB of CPU memory and has {room:.1f}"
    largest = sorted(found.memory.gpu.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    gpu, room = found.cluster.gpu, found.capacity / GIB
    needed = f"needs {found.memory.required / GIB:.1f} GiB on each {gpu.name}"
    told = " (train.memory_gib)" if room < gpu.memory_gib else ""
    return f"{needed} and there are {room:.1f}{told}: {parts}"


def offer(
    job: Job,
    shape: ModelShape,
    cluster: Cluster,
    *,
    written: Job | None = None,
    rows_told: bool = False,
) -> str:
    """The smallest change that fits, or the smallest cluster. `written` is the job before `auto`
    was replaced: behind it the change is pasted. `rows_told`: the strategy's own file says the
    micro-batch."""
    change = smallest_change(job, shape, cluster, rows_told=rows_told)
    if change is not None:
        how = "the same result" if change.same_result else "another result"
        found = change.found if written is None else _as_pasted(change, written)
        return f"{change}  ({how}; leaves {-found.over / GIB:.1f} GiB{provided(found)})"
    larger = smallest_cluster(job, shape, cluster)
    if larger is not None and larger.found is not None:
        values = overrides(job, larger.found.job)
        how = "another result" if "train.global_batch" in values else "the same result"
        words = _with_cluster(larger.found.cluster, in_words(values))
        return f"{words}  (a larger cluster; {how}; {larger.name} {larger.why})"
    return "no cluster of such devices that we know of would do"


def _with_cluster(cluster: Cluster, changes: str) -> str:
    """The cluster and the changes as they are asked for; a GPU of somebody's own is known by its
    profile alone."""
    if cluster.gpu.name in known_gpus():
        return f"--cluster {cluster.name} {changes}".strip()
    words = f"nodes: {cluster.nodes} and gpus_per_node: {cluster.gpus_per_node} in the profile"
    return f"{words}, with {changes}" if changes else words


def _as_pasted(change: Change, written: Job) -> Forecast:
    """What the changed job takes with the micro-batch and the recomputation that stand in place of
    its `auto` then: they may be others than those that fitted first."""
    found = change.found
    auto = {
        key: "auto"
        for key in ("micro_batch", "gradient_checkpointing")
        if getattr(written.train, key) == "auto" and f"train.{key}" not in change.values
    }
    if not auto or found.cluster.gpu.name == "CPU":  # where no forecast chooses
        return found
    job = found.job.model_copy(update={"train": found.job.train.model_copy(update=auto)})
    chosen = resolve_as_asked(job, found.shape, found.cluster).job
    return forecast(chosen, found.shape, found.cluster)


def planner_here(machine: Machine, nodes: int = 1, begun: Job | None = None) -> Planner:
    """Chooses by forecasts for this machine: the best strategy in place of `auto`, or else the
    micro-batch and the least recomputation that fit. `begun` is the job of a run that goes on.
    """

    def plan(job: Job) -> ResolvedJob:
        if job.strategy.planned:
            return _with_strategy(job, shape_of(job.model), _cluster(job, machine, nodes))
        kept = _as_begun(job, machine, nodes, begun) if begun is not None else None
        job, reasons = (kept.job, kept.reasons) if kept is not None else (job, {})
        try:
            found = within_memory(job, shape_of(job.model), _cluster(job, machine, nodes))
        except (JobError, ModelError) as error:
            found = leanest(job, f"there is no forecast ({error.problems[0].fact})")
        return ResolvedJob(found.job, reasons | found.reasons)

    return plan


def _cluster(job: Job, machine: Machine, nodes: int) -> Cluster:
    return cluster_here(machine, int(job.launch.processes), nodes)


def _as_begun(job: Job, machine: Machine, nodes: int, before: Job) -> ResolvedJob | None:
    """With the micro-batch that the run has had so far, if it is on as many ranks and fits: another
    one would add up in another order."""
    if job.train.micro_batch != "auto":
        return None
    if before.launch.processes != job.launch.processes:
        return None
    job = with_rows(job, int(before.train.micro_batch))
    found = forecast_here(job, machine, nodes)
    if found is not None and not found.fits:
        return None
    return ResolvedJob(job, {MICRO_BATCH: "as the run was begun"})


def _with_strategy(job: Job, shape: ModelShape, cluster: Cluster) -> ResolvedJob:
    ranking = rank(job, shape, cluster, installed_only=True)
    planned = as_planned(job, ranking)
    if planned is not None:
        return planned
    first = ranking.candidates[0]
    if first.found is None:  # it isn't memory that is lacking: rules or the forecast say what
        default = job.model_copy(update={"strategy": DEFAULT})
        check(default, dotted)
        forecast(default, shape, cluster)
        fact = f"no strategy can do this on {cluster.name}; {first.name} {first.why}"
        raise JobError(Problem("strategy", fact, "name one: what it can't do is said of it alone"))
    fact = f"no strategy fits on {cluster.name}; nearest is {first.name}: {first.why}"
    raise JobError(Problem("strategy", fact, offer(first.found.job, shape, cluster)))
