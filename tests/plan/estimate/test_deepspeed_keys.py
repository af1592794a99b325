"""DeepSpeed's own keys move the forecast: its buffers, what stays whole, and what overlaps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardtune.config.job import Job
from shardtune.core.model.known_models import known_model
from shardtune.core.units import GIB
from shardtune.errors import JobError, ModelError
from shardtune.parallel.deepspeed.buckets import sized_buckets
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.search import rank

MODEL = "meta-llama/Llama-3.2-1B"
A100 = "8xA100"


def job(strategy: dict[str, Any], *, name: str = MODEL, rows: int = 64, **train: Any) -> Job:
    document = {
        "model": {"name": name},
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": 1024},
        "train": {
            "micro_batch": 1,
            "global_batch": rows,
            "steps": 10,
            "kernels": "eager",
            "loss": "plain",
            "precision": "bf16",
            "gradient_checkpointing": "none",
            **train,
        },
        "strategy": strategy,
    }
    return Job.model_validate_json(json.dumps(document))


def zero(stage: int, spec: str = A100, **keys: Any) -> Forecast:
    strategy = {"type": "deepspeed", "zero_optimization": {"stage": stage, **keys}}
    return forecast(job(strategy), known_model(MODEL), parse_cluster(spec))


def moved(stage: int, phase: str, **keys: Any) -> float:
    """GiB by which a key moves what is allocated in a phase of the step."""
    moments: dict[str, float] = dict(zero(stage, **keys).memory.moments)
    return (moments[phase] - dict(zero(stage).memory.moments)[phase]) / GIB


BUCKET = 4e8 * 2 / GIB
"""A bucket that is smaller by 4e8 elements, in bf16."""


def test_the_reduce_bucket_is_held_while_gradients_are_sent() -> None:
    assert moved(2, "backward", reduce_bucket_size=10**8) == pytest.approx(-BUCKET)
    assert moved(2, "forward", reduce_bucket_size=10**8) == 0


def test_stage_3_holds_its_bucket_all_the_time() -> None:
    """Seen on an H200: docs/benchmarks/zero_memory.md, ZeRO-3 beside ZeRO-2 after a step."""
    assert moved(3, "save", reduce_bucket_size=10**8) == pytest.approx(-BUCKET)


def test_overlap_takes_a_second_bucket_and_hides_the_reduction() -> None:
    assert moved(2, "backward", overlap_comm=True) == pytest.approx(5e8 * 2 / GIB)
    assert zero(2, overlap_comm=True).speed.step.total < zero(2).speed.step.total
    assert zero(3, overlap_comm=False).speed.step.total > zero(3).speed.step.total


def test_without_contiguous_gradients_there_is_no_bucket() -> None:
    assert moved(2, "backward", contiguous_gradients=False) == pytest.approx(-5e8 * 2 / GIB)


def test_the_gather_bucket_is_there_at_the_update() -> None:
    assert moved(2, "optimizer", allgather_bucket_size=10**8) == pytest.approx(-BUCKET)


def test_fewer_gathered_weights_may_live() -> None:
    few = zero(3, stage3_max_live_parameters=0, stage3_prefetch_bucket_size=0)
    assert few.memory.required < zero(3).memory.required - GIB
    assert moved(3, "forward", stage3_max_live_parameters=0) < -1


def test_nothing_is_hidden_without_prefetch() -> None:
    waits = zero(3, stage3_prefetch_bucket_size=0).speed.step.communication
    assert waits > 1.5 * zero(3).speed.step.communication


def test_small_weights_stay_whole() -> None:
    """The norms of Llama-3.2-1B: 33 vectors of 2,048, beside which a rank holds its eighth."""
    kept = zero(3, stage3_param_persistence_threshold=2048).held.of("params")
    assert kept - zero(3).held.of("params") == 33 * 2048 * 2


def test_sub_groups_bound_what_an_update_turns_to_fp32() -> None:
    assert moved(3, "optimizer", sub_group_size=10**7) < -0.4


def test_small_buckets_are_slow() -> None:
    assert zero(2, reduce_bucket_size=10**5).speed.step.total > zero(2).speed.step.total


@pytest.mark.parametrize(
    ("spec", "elements"), [("8xA100", 50_000_000), ("8xRTX3090:pcie", 10_000_000)]
)
def test_plan_proposes_buckets_by_the_link(spec: str, elements: int) -> None:
    ranking = rank(job({"type": "ddp"}), known_model(MODEL), parse_cluster(spec))
    (found,) = [each.found for each in ranking.candidates if each.name == "zero2"]
    assert found is not None
    chosen: Any = found.job.strategy
    zeros: ZeRO = chosen.zero_optimization
    assert zeros.overlap_comm is True
    assert zeros.reduce_bucket_size == zeros.allgather_bucket_size
    assert zeros.reduce_bucket_size == elements


def test_what_is_said_is_left_alone() -> None:
    mine = ZeRO(stage=2, reduce_bucket_size=7, overlap_comm=False)
    found = sized_buckets(mine, 1e6)
    assert (found.reduce_bucket_size, found.overlap_comm) == (7, False)


def test_rows_of_the_plan() -> None:
    model = known_model(MODEL)
    several = {
        each.name for each in rank(job({"type": "ddp"}), model, parse_cluster(A100)).candidates
    }
    assert "zero3, optimizer in CPU memory" in several
    alone = {
        each.name for each in rank(job({"type": "ddp"}), model, parse_cluster("1xA100")).candidates
    }
    assert "one GPU, optimizer states in host memory" in alone


def test_a_gpu_without_bf16_is_refused_by_name() -> None:
    with pytest.raises(JobError) as caught:
        forecast(job({"type": "ddp"}), known_model(MODEL), parse_cluster("1xV100"))
    (problem,) = caught.value.problems
    assert "V100-32GB is older than Ampere and has no bf16" in problem.fact
    assert problem.fix == "set train.precision: fp16, fp32 or auto"


def test_rows_longer_than_learned_positions_are_refused_as_training_does() -> None:
    short = job({"type": "ddp"}, name="gpt2")
    data = short.data.model_copy(update={"sequence_length": 1025})
    long = short.model_copy(update={"data": data})
    with pytest.raises(ModelError) as caught:
        forecast(long, known_model("gpt2"), parse_cluster("1xA100"))
    (problem,) = caught.value.problems
    assert problem.fact == "1025 tokens a row, but the model has positions for 1024"
