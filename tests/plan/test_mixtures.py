"""Mixtures of experts in the planner: counted as they are stored, and divided by expert."""

from __future__ import annotations

import pytest

from shardtune.core.model.known_models import known_model
from shardtune.core.units import GIB
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.forecast import forecast
from shardtune.plan.search import rank
from tests.plan.test_search import LORA, job


def test_qwen3_30b_in_nf4_fits_on_one_small_card() -> None:
    """30.5 B weights: 16 bits would be 57 GiB, and the card has 24."""
    name = "Qwen/Qwen3-30B-A3B"
    asked = job(name, adapter=LORA, model={"name": name, "quantization": "nf4"})
    best = rank(asked, known_model(name), parse_cluster("1xRTX4090")).best
    assert best is not None
    assert best.found is not None
    assert best.found.memory.peak < 24 * GIB


def test_mixtral_is_offered_expert_parallelism() -> None:
    """46.7 B weights in 16 bits are 87 GiB. Of 8 experts a rank keeps one, and all else."""
    name = "mistralai/Mixtral-8x7B-v0.1"
    shape = known_model(name)
    ranking = rank(job(name, adapter=LORA), shape, parse_cluster("8xA100-40GB"))
    offered = {each.name: each.found for each in ranking.candidates}
    found = offered["expert(8)"]
    assert found is not None
    routed = shape.count(lambda weight: weight.routed)
    weights = 2 * (shape.parameters - routed * 7 / 8)
    assert weights < found.memory.peak < 39 * GIB
    assert shape.active_parameters < shape.parameters / 3


@pytest.mark.parametrize(
    ("train", "counted"),
    [
        ({"router_aux_loss_coef": 0.01, "micro_batch": 1}, True),
        ({"router_aux_loss_coef": 0.01, "micro_batch": 8}, False),
        ({"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.01, "micro_batch": 1}, False),
    ],
)
def test_experts_are_counted_before_the_first_gradient(
    train: dict[str, float], counted: bool
) -> None:
    """A step of one micro-batch counts in its own forward pass, and the z-loss needs no count."""
    name = "Qwen/Qwen3-30B-A3B"
    told = {"global_batch": 8, "precision": "bf16", "kernels": "eager", "loss": "plain"}
    asked = job(name, adapter=LORA, train=told | train)
    found = forecast(asked, known_model(name), parse_cluster("1xH200"))
    assert found.work.counts_routed == counted
