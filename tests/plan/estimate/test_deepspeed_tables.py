"""DeepSpeed's published tables for T5-3B on eight GPUs, under its own conventions.

Source: docs/code-docs/source/memory.rst of DeepSpeed. Its tables say
GB and divide by 2^30.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.core.footprint import ModelBytes, predict_held
from shardtune.core.layout import Home
from shardtune.core.model.architectures import read_shape
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO
from shardtune.parallel.deepspeed.strategy import DeepSpeed

GIB = 1 << 30
GPUS, NODES = 8, 1
SLACK = 1.5
"""DeepSpeed's factor for buffers in main memory."""
T5_3B = read_shape(
    {
        "model_type": "t5",
        "d_model": 1024,
        "d_kv": 128,
        "d_ff": 16384,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "num_heads": 32,
        "vocab_size": 32128,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
    "t5-3b",
)


def test_the_model_is_the_one_of_the_tables() -> None:
    # "2851M total params, 32M largest layer params"
    assert T5_3B.parameters // 10**6 == 2851
    assert T5_3B.largest_module // 10**6 == 32


def on_gpu(stage: int, params: Home, optim: Home) -> float:
    """What our layout says that a GPU holds, plus what DeepSpeed adds by convention."""
    settings: dict[str, Any] = {"stage": stage}
    if optim != "gpu":
        settings["offload_optimizer"] = {"device": optim}
    if params != "gpu":
        settings["offload_param"] = {"device": params}
    strategy = DeepSpeed(zero_optimization=ZeRO.model_validate(settings))
    count = T5_3B.parameters
    # 16-bit weights, fp32 gradients, fp32 masters and two moments.
    whole = ModelBytes(params=2 * count, trained=2 * count, grads=4 * count, optim=12 * count)
    held = predict_held(strategy.layout().without_masters(), strategy.mesh(GPUS), whole)
    size = float(sum(size for (_, home), size in held.bytes.items() if home == "gpu"))
    if stage == 3:
        size += 4 * T5_3B.largest_module  # the layer at work, weights and gradients
    elif optim == "gpu":
        size += 2 * count  # 16-bit gradients, whole until they are reduced
    return size / GIB


def on_cpu(stage: int, params: Home, optim: Home, *, zero_init: bool) -> float:
    """DeepSpeed's rule for main memory: to build the model, or for what lives there."""
    count, share = T5_3B.parameters, 1 / NODES
    whole_model_on_each_rank = 4 * count * GPUS
    if stage == 2 or not zero_init:
        lives_there = 0 if optim == "gpu" else 18 * count * share
        return max(whole_model_on_each_rank, lives_there) * SLACK / GIB
    if optim == "gpu":
        return T5_3B.largest_module * 4 * GPUS * SLACK / GIB
    return (18 if params == "cpu" else 16) * count * share * SLACK / GIB


@pytest.mark.parametrize(
    ("stage", "params", "optim", "zero_init", "gpu", "cpu"),
    [
        (2, "gpu", "cpu", False, "5.31", "127.48"),
        (2, "gpu", "gpu", False, "15.93", "127.48"),
        (3, "cpu", "cpu", True, "0.12", "71.71"),
        (3, "cpu", "cpu", False, "0.12", "127.48"),
        (3, "gpu", "cpu", True, "0.79", "63.74"),
        (3, "gpu", "cpu", False, "0.79", "127.48"),
        (3, "gpu", "gpu", True, "6.10", "1.47"),
        (3, "gpu", "gpu", False, "6.10", "127.48"),
    ],
)
def test_every_line_to_the_printed_digit(
    stage: int, params: Home, optim: Home, zero_init: bool, gpu: str, cpu: str
) -> None:
    assert f"{on_gpu(stage, params, optim):.2f}" == gpu
    assert f"{on_cpu(stage, params, optim, zero_init=zero_init):.2f}" == cpu
