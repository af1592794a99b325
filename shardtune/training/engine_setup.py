"""From a job and the ranks at hand to everything that an engine needs to be built."""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.config.job import Job
from shardtune.core.layout import Layout
from shardtune.core.lr_schedule import Schedule
from shardtune.core.mesh import Mesh
from shardtune.core.setup import EngineSetup
from shardtune.errors import JobError, Problem
from shardtune.parallel import Strategy


@dataclass(frozen=True)
class Plan:
    """The strategy, what it declares, and the settings that follow."""

    strategy: Strategy
    mesh: Mesh
    layout: Layout
    setup: EngineSetup


def make_plan(job: Job, ranks: int, steps: int) -> Plan:
    """The plan for `job` on `ranks` ranks over `steps` optimizer steps."""
    train = job.train
    scheduled = max(1, steps - train.schedule_start)
    warmup = train.warmup(scheduled)
    if warmup >= scheduled and warmup:
        key = "warmup_steps" if train.warmup_ratio is None else "warmup_ratio"
        fact = f"{warmup} step{'s' * (warmup > 1)} of warmup in a run of {scheduled}"
        fix = "warm up for fewer steps, or train for more"
        raise JobError(Problem(f"train.{key}", fact, fix))
    mesh = job.strategy.mesh(ranks)
    mesh.require(ranks)
    micro_batch = 1 if train.micro_batch == "auto" else train.micro_batch
    setup = EngineSetup(
        precision=train.compute_precision,
        optimizer=train.optimizer.setup(),
        schedule=Schedule(
            train.schedule,
            train.learning_rate,
            warmup,
            scheduled,
            train.one_cycle if train.schedule == "one_cycle" else None,
            train.schedule_start,
        ),
        max_grad_norm=train.max_grad_norm,
        seed=train.seed,
        micro_batch=micro_batch,
        accumulation=max(1, -(-train.global_batch // (mesh.data_ranks * micro_batch))),
        loss="fused" if train.loss == "fused" else "plain",
        offload_activations=train.offload_activations,
        router_aux_loss_coef=train.balances_experts,
        router_z_loss_coef=train.router_z_loss_coef,
        split_fp32=job.splits_weights(mesh.size),
    )
    return Plan(job.strategy, mesh, job.layout(mesh.size), setup)
