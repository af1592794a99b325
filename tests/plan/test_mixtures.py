"""Mixtures of experts in the planner: counted as they are stored, and divided by expert."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from shardtune.core.model.known_models import known_model
from shardtune.core.model.quantized_size import fp8_bytes, fp8_expert_bytes, quantizable
from shardtune.core.units import GIB
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.estimate.expert_load import imbalance
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.search import rank
from shardtune.report.plan_table import print_forecast
from tests.plan.test_search import LORA, job


def test_qwen3_30b_in_nf4_fits_on_one_small_card() -> None:
    """30.5 B weights: 16 bits would be 57 GiB, and the card has 24."""
    name = "Qwen/Qwen3-30B-A3B"
    asked = job(name, adapter=LORA, model={"name": name, "quantization": "nf4"})
    best = rank(asked, known_model(name), parse_cluster("1xRTX4090")).best
    assert best is not None
    assert best.found is not None
    assert best.found.memory.peak < 24 * GIB


def test_experts_in_fp8_take_a_byte_a_weight_and_a_scale_for_each_output() -> None:
    """Half of what they take in bf16. All other matrices are there for either direction."""
    name = "Qwen/Qwen3-30B-A3B"
    shape = known_model(name)
    found = {}
    for kind in ("none", "fp8"):
        asked = job(name, adapter=LORA, model={"name": name, "quantization": kind})
        found[kind] = forecast(asked, shape, parse_cluster("1xH200"))
    routed = shape.count(lambda weight: weight.routed)
    outputs = 48 * 128 * (2 * 768 + 2048)  # layers, experts, outputs of gate, up and down
    assert fp8_expert_bytes(shape) == routed + 2 * outputs
    weights = found["none"].held.of("params") - found["fp8"].held.of("params")
    linears = 2 * (quantizable(shape) - routed)
    twice = fp8_bytes(shape) - fp8_expert_bytes(shape) - linears  # columns of channels that matter
    assert weights == 2 * routed - fp8_expert_bytes(shape) - twice
    assert 0 < twice < 0.03 * linears
    # The largest weight is whole in bf16 for a moment.
    buffers = [each.memory.gpu["buffers"] for each in found.values()]
    assert buffers[1] - buffers[0] == pytest.approx(2 * 128 * 2 * 768 * 2048, rel=0.01)


def test_mixtral_is_offered_expert_parallelism() -> None:
    """46.7 B weights in 16 bits are 87 GiB. Of 8 experts a rank keeps one, and all else."""
    name = "mistralai/Mixtral-8x7B-v0.1"
    shape = known_model(name)
    ranking = rank(job(name, adapter=LORA), shape, parse_cluster("8xA100-40GB"))
    offered = {each.name.partition("(")[0]: each for each in ranking.candidates}
    assert {"expert", "fsdp + expert"} <= offered.keys()
    found = offered["expert"].found
    assert found is not None
    routed = shape.count(lambda weight: weight.routed)
    ranks = found.mesh.size_of("expert")
    assert ranks > 1
    weights = 2 * (shape.parameters - routed * (1 - 1 / ranks))
    assert weights < found.memory.peak < 39 * GIB
    assert shape.active_parameters < shape.parameters / 3


MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"


def divided(strategy: dict[str, Any], cluster: str = "8xA100-80GB", **train: Any) -> Forecast:
    told = {"precision": "bf16", "kernels": "eager", "loss": "plain", "micro_batch": 1, **train}
    asked = job(MIXTRAL, adapter=LORA, strategy=strategy, train=told)
    return forecast(asked, known_model(MIXTRAL), parse_cluster(cluster))


def test_experts_beside_fsdp_are_in_equal_shares_with_all_else() -> None:
    """Each rank holds an eighth of everything, however many ranks have the same experts."""
    held = [divided({"type": "fsdp", "expert": n}).held.of("params") for n in (1, 2, 8)]
    assert max(held) - min(held) <= 8


def test_the_busiest_rank_has_more_tokens_and_the_plan_says_so() -> None:
    """Gini 0.2 is a deviation of 0.354 of the mean; the largest of eight is 1.43 deviations above
    it. Of 128 experts sixteen on a rank even out to a fourth of that."""
    assert imbalance(known_model(MIXTRAL), 1) == 1.0
    assert imbalance(known_model(MIXTRAL), 8) == pytest.approx(1 + 0.3545 * 1.434, abs=1e-3)
    qwen = imbalance(known_model("Qwen/Qwen3-30B-A3B"), 8)
    assert qwen == pytest.approx(1 + 0.3545 * 1.434 / 4, abs=1e-3)
    found = divided({"type": "expert", "degree": 8})
    assert found.summary().expert_imbalance == found.imbalance > 1
    assert any("busiest of 8 ranks gets 1.51 x" in reason for reason in found.reasons)
    assert "busiest" not in " ".join(divided({"type": "fsdp"}).reasons)


def test_sending_tokens_takes_time_that_nothing_hides() -> None:
    """Four all-to-alls in each of 32 layers; six where the layers are computed again."""
    took = {}
    for level in ("none", "full"):
        found = divided({"type": "expert", "degree": 8}, gradient_checkpointing=level)
        waits = [each.seconds for each in found.speed.waits if each.op == "all_to_all"]
        assert len(waits) == 4
        took[level] = sum(waits)
    assert took["none"] > 0
    assert took["full"] == pytest.approx(1.5 * took["none"])


def test_a_divided_mixture_is_shown() -> None:
    told = Console(width=160, file=StringIO(), highlight=False)
    for strategy in ({"type": "expert", "degree": 8}, {"type": "fsdp", "expert": 4}):
        print_forecast(divided(strategy), told)
    assert isinstance(told.file, StringIO)
    shown = told.file.getvalue()
    assert "all-to-all of tokens to experts and back" in shown
    assert "1.51 x the mean" in shown
    assert "gradients of experts" in shown


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
