"""A job as it would run on a cluster that isn't this machine: every `auto` has its value."""

from __future__ import annotations

from functools import partial
from typing import Any

from shardtune.config.auto import PRECISION, Planner, ResolvedJob, resolve
from shardtune.config.job import Job
from shardtune.config.job_file import LoadedJob
from shardtune.core.files.yaml_document import KeyPath, dotted
from shardtune.core.host.machine import Machine
from shardtune.core.model.shape import ModelShape
from shardtune.parallel import DEFAULT
from shardtune.plan.auto_micro_batch import within_memory
from shardtune.plan.cluster import Cluster
from shardtune.plan.forecast_summary import ChosenValue
from shardtune.plan.search import Ranking, planned_value, rank

STRATEGY: KeyPath = ("strategy", "type")
NOTHING_FITS = "nothing fits: the simplest one"
PLANNED_KEYS = (
    "micro_batch", "gradient_checkpointing", "keep_layers", "loss", "kernels", "optimizer.paged",
)  # fmt: skip
"""Keys of the section `train` that a ranking decides, too."""
CORES_PER_GPU = 16
"""What is assumed of a node; only the number of data workers follows from it."""


def resolve_on(job: Job, cluster: Cluster, planner: Planner | None = None) -> ResolvedJob:
    """The job on all GPUs of the cluster; what only the planner can say stays `auto`."""
    machine = Machine(
        cores=CORES_PER_GPU * cluster.gpus_per_node, gpus=cluster.gpus, matmul=cluster.gpu.matmul
    )
    return resolve(job, machine, cluster.gpus, nodes=cluster.nodes, planner=planner)


def chosen_precision(resolved: ResolvedJob) -> tuple[str, ...]:
    """Which precision was chosen, and why, in a line; nothing where the job says it."""
    reason = resolved.reasons.get(PRECISION)
    return () if reason is None else (f"precision: {resolved.job.train.precision} ({reason})",)


def planned_anew(written: LoadedJob, ranking: Ranking) -> tuple[str, ...]:
    """What the job says of keys that a ranking decides for itself, where the best one says
    otherwise; a line each."""
    best = ranking.best
    if best is None or best.found is None:
        return ()
    found = []
    for key in PLANNED_KEYS:
        path: KeyPath = ("train", *key.split("."))
        said, taken = planned_value(written.job, key), planned_value(best.found.job, key)
        if written.origin(path) != "default" and said not in ("auto", taken):
            found.append(
                f"{dotted(path)}: {taken} with {best.name}, though {written.origin(path)} says "
                f"{said}: a ranking tries all; `shardtune estimate` keeps it"
            )
    return tuple(found)


def chosen_values(asked: Job, resolved: ResolvedJob) -> tuple[ChosenValue, ...]:
    """What was put in place of `auto`, and why. How a machine is used (`launch`) and what data sets
    are called are no questions of a forecast."""
    before, after = asked.model_dump(mode="json"), resolved.job.model_dump(mode="json")
    found = []
    for path, why in resolved.reasons.items():
        whole = path[:1] if path == STRATEGY else path  # with its stage, offload and degrees
        value = _at(after, whole)
        if path[0] != "launch" and path[-1] != "name" and value != _at(before, whole):
            found.append(ChosenValue(key=dotted(whole), value=value, why=why))
    return tuple(found)


def _at(document: Any, path: KeyPath) -> Any:
    """What stands at a path of a job; None where another type has no such key."""
    for key in path:
        if isinstance(document, list):
            document = document[int(key)]
        else:
            document = document.get(key) if isinstance(document, dict) else None
    return document


def resolve_as_asked(job: Job, shape: ModelShape, cluster: Cluster) -> ResolvedJob:
    """The job with the strategy that it asks for, and with a micro-batch and a level of activation
    checkpointing that fit; `strategy: auto` is the best, or the default where nothing
    fits."""
    return resolve_on(job, cluster, partial(_planned, shape=shape, cluster=cluster))


def _planned(job: Job, shape: ModelShape, cluster: Cluster) -> ResolvedJob:
    if not job.strategy.planned:
        return within_memory(job, shape, cluster)
    ranking = rank(job, shape, cluster)
    default = job.model_copy(update={"strategy": DEFAULT})
    return as_planned(job, ranking) or ResolvedJob(default, {STRATEGY: NOTHING_FITS})


def as_planned(job: Job, ranking: Ranking) -> ResolvedJob | None:
    """The job with the best strategy of a ranking, and why; None where none fits."""
    best = ranking.best
    if best is None or best.found is None:
        return None
    runner_up = next((each for each in ranking.candidates[1:] if each.why), None)
    reason = f"planned: {best.name} {best.why}"
    if runner_up is not None:
        reason += f"; {runner_up.name}: {runner_up.why}"
    reasons: dict[KeyPath, str] = {STRATEGY: reason}
    for key in PLANNED_KEYS:
        if planned_value(best.found.job, key) != planned_value(job, key):
            place: KeyPath = ("train", *key.split("."))
            reasons[place] = f"planned with {best.name}"
    return ResolvedJob(best.found.job, reasons)
