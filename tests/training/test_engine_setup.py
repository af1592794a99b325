"""From a job to what an engine is built from."""

from __future__ import annotations

from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.parallel.ddp.strategy import DDP
from shardtune.training.engine_setup import make_plan
from tests.jobs import make_job


def test_a_plan_carries_the_jobs_settings() -> None:
    job = make_job(
        train={
            "learning_rate": 1e-3,
            "schedule": "linear",
            "warmup_steps": 3,
            "precision": "fp16",
            "max_grad_norm": None,
            "seed": 7,
            "optimizer": {"type": "adamw", "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1},
        }
    )
    plan = make_plan(job, ranks=4, steps=50)
    assert plan.setup == EngineSetup(
        precision="fp16",
        optimizer=OptimizerSetup("adamw", betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
        schedule=Schedule("linear", 1e-3, 3, 50),
        max_grad_norm=None,
        seed=7,
        micro_batch=1,  # `auto`, which a resolved job has no more
        accumulation=4,  # 16 rows over four ranks
    )
    assert plan.strategy == DDP()
    assert plan.mesh.size == 4
    assert plan.layout == DDP().layout()


def test_an_update_rule_keeps_to_its_own_fields() -> None:
    job = make_job(train={"precision": "fp32", "optimizer": {"type": "sgd", "momentum": 0.9}})
    assert make_plan(job, 1, 1).setup.optimizer == OptimizerSetup("sgd", momentum=0.9)


def test_who_gets_copies() -> None:
    """One rank that trains all weights in bf16, with AdamW and moments of 32 bits."""
    yes = {"train": {"precision": "bf16"}}
    assert make_plan(make_job(**yes), 1, 9).setup.split_fp32
    assert not make_plan(make_job(**yes), 2, 9).setup.split_fp32
    for changes in (
        {"train": {"precision": "fp32"}},
        {"train": {"precision": "bf16", "optimizer": {"type": "sgd"}}},
        {"train": {"precision": "bf16", "optimizer": {"type": "adamw", "bits": 8}}},
        yes | {"adapter": {"type": "lora"}},
        yes | {"strategy": {"type": "fsdp"}},
    ):
        assert not make_plan(make_job(**changes), 1, 9).setup.split_fp32, changes


def test_warmup_may_be_a_share_of_the_run() -> None:
    """Rounded up, as in transformers; of what remains where a schedule begins anew."""
    for train, steps, warmup, scheduled in (
        ({"warmup_ratio": 0.1}, 41, 5, 41),
        ({"warmup_ratio": 0.1, "schedule_start": 20}, 40, 2, 20),
        ({"warmup_ratio": 0.0}, 40, 0, 40),
    ):
        schedule = make_plan(
            make_job(train={"precision": "fp32", **train}), 1, steps
        ).setup.schedule
        assert (schedule.warmup_steps, schedule.steps) == (warmup, scheduled)
        assert schedule.at(schedule.start + warmup) == schedule.peak
