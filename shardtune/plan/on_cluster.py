"""A job as it would run on a cluster that isn't this machine: every `auto` has its value."""

from __future__ import annotations

from functools import partial

from shardtune.config.auto import PRECISION, Planner, ResolvedJob, resolve
from shardtune.config.job import Job
from shardtune.core.machine import Machine
from shardtune.core.model.shape import ModelShape
from shardtune.parallel import DEFAULT
from shardtune.plan.auto_micro_batch import within_memory
from shardtune.plan.cluster import Cluster
from shardtune.plan.search import rank

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


def resolve_as_asked(job: Job, shape: ModelShape, cluster: Cluster) -> ResolvedJob:
    """The job with the strategy that it asks for, and with a micro-batch and a level of activation
    checkpointing that fit; `strategy: auto` is the best, or the default where nothing
    fits."""
    return resolve_on(job, cluster, partial(_planned, shape=shape, cluster=cluster))


def _planned(job: Job, shape: ModelShape, cluster: Cluster) -> ResolvedJob:
    if not job.strategy.planned:
        return within_memory(job, shape, cluster)
    best = rank(job, shape, cluster).best
    if best is not None and best.found is not None:
        return ResolvedJob(best.found.job, {})
    return ResolvedJob(job.model_copy(update={"strategy": DEFAULT}), {})
