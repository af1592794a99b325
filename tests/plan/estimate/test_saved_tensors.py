"""Levels of recomputation: what a layer keeps, what a step then holds and takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shardtune.config.job import Job
from shardtune.core.model.architectures import read_shape
from shardtune.core.model.known_models import known_model
from shardtune.core.units import GIB
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.estimate.activations import saved_bytes, stack_bytes
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.saved_tensors import kept_bytes
from shardtune.plan.estimate.workload import AdapterSize, Workload
from shardtune.plan.forecast import Forecast, forecast

SMALL, LARGE, HUGE = (f"meta-llama/Llama-{size}" for size in ("3.2-1B", "3.1-8B", "3.1-70B"))
SHAPE = known_model(LARGE)
COMPILED = Workload(
    8, 2048, adapter=AdapterSize(16), kernels="compiled", counted=True, autocast=True
)
LORA = {"type": "lora", "rank": 16}
FP8 = {"quantization": "fp8"}
LEVELS = ("none", "mlp", "most", "full")


def foretold(
    name: str = LARGE, *, gpu: str = "H200", rows: int = 8, length: int = 2048, **sections: Any
) -> Forecast:
    """8 x 2048 tokens on one GPU, compiled and with the loss in pieces."""
    train = {"micro_batch": rows, "global_batch": rows, "steps": 10}
    train |= {"loss": "fused", "kernels": "compiled"} | sections.pop("train", {})
    document = {
        "model": {"name": name, **sections.pop("model", {})},
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": length},
        "train": train,
        "launch": {"processes": 1},
        **sections,
    }
    job = Job.model_validate_json(json.dumps(document))
    return forecast(job, known_model(name), parse_cluster(f"1x{gpu}"))


def lora(**train: Any) -> Forecast:
    return foretold(adapter=LORA, train=train)


def nf4(name: str = LARGE, **sections: Any) -> Forecast:
    return foretold(name, adapter=LORA, model={"quantization": "nf4"}, **sections)


def long_rows(**train: Any) -> Forecast:
    return foretold(adapter=LORA, rows=2, length=8192, train=train)


@pytest.mark.parametrize(("level", "numbers"), [("none", 47248), ("mlp", 18544), ("most", 8224)])
def test_what_a_compiled_layer_keeps(level: Any, numbers: int) -> None:
    """As counted in test_activation_checkpointing.py, but for two of norms; 32 are in fp32."""
    found = kept_bytes(SHAPE, COMPILED, RankShare(), level)
    assert found == COMPILED.tokens * (2 * numbers + 2 * 32)


@pytest.mark.parametrize(
    ("level", "more"), [("none", 32 * 2048 - 2 * 32), ("mlp", -2 * 32), ("most", -4096 - 2 * 32)]
)
def test_attention_that_writes_scores_down_is_two_products(level: Any, more: int) -> None:
    """As counted in test_activation_checkpointing.py. No logarithms of sums, which are in fp32."""
    written = replace(COMPILED, attention="eager")
    found = kept_bytes(SHAPE, written, RankShare(), level)
    fused = kept_bytes(SHAPE, COMPILED, RankShare(), level)
    assert found - fused == COMPILED.tokens * 2 * more


@pytest.mark.parametrize(
    ("found", "gib", "milliseconds", "near"),
    [
        # One H200, torch 2.11, our own path.
        (lora(), 63.4, 919, 0.05),
        (foretold(adapter=LORA, model=FP8), 63.4, 627, 0.05),
        (long_rows(), 63.4, 1097, 0.05),
        (foretold(adapter=LORA, rows=2, length=8192, model=FP8), 63.4, 804, 0.05),
        (long_rows(gradient_checkpointing="mlp", keep_layers=8), 42.4, 1233, 0.05),
        (nf4(), 53.7, 950, 0.05),
        (lora(gradient_checkpointing="most", offload_activations=True), 19.2, 1207, 0.06),
        (foretold(SMALL), 28.7, 239, 0.06),
        # With earlier kernels, which took longer.
        (nf4(HUGE, rows=4, train={"gradient_checkpointing": "mlp"}), 84.7, 5032, 0.1),
        (lora(gradient_checkpointing="full", offload_activations=True), 19.2, 1363, 0.08),
    ],
)
def test_predicted_beside_measured(
    found: Forecast, gib: float, milliseconds: float, near: float
) -> None:
    assert found.memory.allocated / GIB == pytest.approx(gib, rel=0.03)
    assert found.speed.step.total * 1e3 == pytest.approx(milliseconds, rel=near)


def test_each_level_holds_less_and_takes_longer() -> None:
    found = [lora(gradient_checkpointing=level) for level in LEVELS]
    held = [each.memory.allocated for each in found]
    took = [each.speed.step.total for each in found]
    assert held == sorted(held, reverse=True)
    assert took == sorted(took)


def test_the_same_holds_where_layers_are_not_compiled() -> None:
    found = [lora(gradient_checkpointing=level, kernels="eager") for level in LEVELS]
    held = [each.memory.moments["forward"] for each in found]
    assert held == sorted(held, reverse=True)
    took = [each.speed.step.total for each in found]
    assert took == sorted(took)


def test_layers_that_keep_more_lie_between_two_levels() -> None:
    none, mlp = lora(), lora(gradient_checkpointing="mlp")
    half = lora(gradient_checkpointing="mlp", keep_layers=16)
    middle = (none.memory.gpu["activations"] + mlp.memory.gpu["activations"]) / 2
    # The layer at work in the end is one that keeps all, and needs less beside it.
    assert half.memory.gpu["activations"] == pytest.approx(middle, rel=0.03)
    took = (none.speed.step.total + mlp.speed.step.total) / 2
    assert half.speed.step.total == pytest.approx(took, rel=0.001)
    every = lora(gradient_checkpointing="mlp", keep_layers=32)
    assert every.memory.moments == pytest.approx(none.memory.moments)
    assert every.speed.step.total == pytest.approx(none.speed.step.total)


def test_a_layer_excepted_from_none_or_full_is_no_exception() -> None:
    for level in ("none", "full"):
        plain, more = (lora(gradient_checkpointing=level, keep_layers=n) for n in (0, 8))
        assert plain.memory == more.memory


def test_products_that_are_not_wide_are_kept() -> None:
    """An MLP no more than twice as wide as the model: `mlp` drops nothing."""
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 2048,
        "vocab_size": 1000,
    }
    shape = read_shape(config, "narrow")
    none, mlp = (replace(COMPILED, checkpointing=level) for level in ("none", "mlp"))
    assert saved_bytes(shape, none, RankShare()) == saved_bytes(shape, mlp, RankShare())
    assert stack_bytes(shape, none, RankShare()) == 2 * saved_bytes(shape, none, RankShare())


def test_an_8_bit_base_needs_a_gpu_that_multiplies_so() -> None:
    for gpu, faster in (("H200", True), ("H100", True), ("RTX4090", True), ("A100-80GB", False)):
        wide, narrow = (foretold(adapter=LORA, gpu=gpu, model=model) for model in ({}, FP8))
        assert (narrow.speed.step.total < 0.9 * wide.speed.step.total) is faster
        # As much for two directions as for one in 16 bits, and 64 columns more of 4096 and 14336.
        more = narrow.memory.gpu["params"] - wide.memory.gpu["params"]
        assert more == 32 * 64 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
