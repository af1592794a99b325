"""Bytes of a rank: closed forms against what was measured on one H200, and how they move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardtune.config.job import Job
from shardtune.core.mesh import Mesh
from shardtune.core.model.architectures import read_shape
from shardtune.core.model.known_models import known_model
from shardtune.core.model.shape import ModelShape
from shardtune.core.pipeline_schedule import PipelineKind, Pipelining
from shardtune.core.units import GIB
from shardtune.parallel.ddp.strategy import DDP
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from shardtune.parallel.fsdp.strategy import FSDP
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.estimate.activations import layer_bytes, stack_bytes
from shardtune.plan.estimate.layer_tensors import norm_numbers
from shardtune.plan.estimate.memory import Memory, estimate_memory
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.workload import (
    NF4_DOUBLE_BITS,
    PURE_BF16,
    SHARDED_FP32,
    AdapterSize,
    Workload,
)
from shardtune.plan.forecast import forecast


def llama(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool = False) -> ModelShape:
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": ffn,
        "vocab_size": 128256,
        "tie_word_embeddings": tied,
    }
    return read_shape(config, "llama")


SMALL, MIDDLE = llama(2048, 16, 32, 8192, tied=True), llama(4096, 32, 32, 14336)
WORK = Workload(8, 2048, widths=PURE_BF16)
LORA = replace(WORK, adapter=AdapterSize(16))
FULL: dict[str, Any] = {"checkpointing": "full"}
FUSED: dict[str, Any] = {"kernels": "fused", "loss": "fused"}
NF4: dict[str, Any] = {"packed_bits": NF4_DOUBLE_BITS}


def alone(shape: ModelShape, work: Workload) -> Memory:
    return estimate_memory(DDP().layout(), shape, DDP().mesh(1), work)


@pytest.mark.parametrize(
    ("shape", "work", "measured"),
    [
        (MIDDLE, LORA, 129.3),
        (MIDDLE, replace(LORA, **FULL), 43.0),
        (MIDDLE, replace(LORA, **FUSED), 84.4),
        (MIDDLE, replace(LORA, **FUSED, **FULL), 22.3),
        (MIDDLE, replace(LORA, **NF4, **FULL), 33.3),
        (MIDDLE, replace(LORA, **NF4, **FUSED), 74.8),
        (SMALL, WORK, 57.2),
        (SMALL, replace(WORK, **FUSED), 26.3),
    ],
)
def test_peak_allocated_on_an_h200(shape: ModelShape, work: Workload, measured: float) -> None:
    # 8 x 2048 tokens, rank 16 on all linears; torch 2.11, transformers 5.17 (reference gpu.md).
    assert alone(shape, work).allocated / GIB == pytest.approx(measured, rel=0.05)


def test_classes_add_up_to_the_moment_of_the_peak() -> None:
    memory = alone(MIDDLE, LORA)
    assert memory.allocated == pytest.approx(max(memory.moments.values()))
    assert memory.allocated == pytest.approx(memory.moments[memory.moment])
    assert memory.allocated < memory.required < memory.peak


def test_small_batches_peak_at_the_update_and_large_ones_at_the_loss() -> None:
    short = replace(WORK, micro_batch=1, sequence=64, foreach=True)
    assert alone(MIDDLE, short).moment == "optimizer"
    assert alone(MIDDLE, WORK).moment == "forward"


@pytest.mark.parametrize("change", [{"micro_batch": 9}, {"sequence": 2049}])
def test_more_tokens_never_need_less(change: dict[str, int]) -> None:
    for work in (WORK, LORA, replace(LORA, **FULL), replace(LORA, **FUSED, **NF4)):
        assert alone(MIDDLE, replace(work, **change)).peak > alone(MIDDLE, work).peak


def test_a_longer_row_needs_no_less_where_another_moment_is_fullest() -> None:
    """GPT-J's weights in CPU memory: short rows are fullest at the update, which gathers most."""

    def needed(length: int) -> Memory:
        job = Job.model_validate(
            {
                "model": {"name": "EleutherAI/gpt-j-6b", "attention": "eager"},
                "data": {"train": ({"path": "-", "format": "chat"},), "sequence_length": length},
                "adapter": {"type": "none"},
                "strategy": {
                    "type": "deepspeed",
                    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
                },
                "train": {"micro_batch": 1, "global_batch": 8, "steps": 9, "kernels": "eager"}
                | {"precision": "bf16", "loss": "plain", "gradient_checkpointing": "none"}
                | {"optimizer": {"type": "adamw", "bits": 8}},
                "launch": {"processes": 1},
            }
        )
        return forecast(job, known_model("EleutherAI/gpt-j-6b"), parse_cluster("1xA30")).memory

    short, long = needed(128), needed(256)
    assert (short.moment, long.moment) == ("optimizer", "backward")
    assert long.required >= short.required


@pytest.mark.parametrize("saving", [FULL, {"loss": "fused"}, {"kernels": "fused"}, NF4])
def test_what_is_meant_to_save_memory_does(saving: dict[str, Any]) -> None:
    assert alone(MIDDLE, replace(LORA, **saving)).peak < alone(MIDDLE, LORA).peak


def test_selective_checkpointing_lies_between_none_and_full() -> None:
    none, selective, full = (
        alone(MIDDLE, replace(WORK, checkpointing=kind)).gpu["activations"]
        for kind in ("none", "selective", "full")
    )
    assert full < selective < none


def test_more_ranks_hold_less_each() -> None:
    work = replace(WORK, widths=SHARDED_FP32, **FULL)
    peaks = [
        estimate_memory(FSDP().layout(), MIDDLE, FSDP().mesh(ranks), work).allocated
        for ranks in (2, 4, 8, 64)
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_higher_stages_hold_less() -> None:
    held = []
    for stage in (0, 1, 2, 3):
        strategy = DeepSpeed(zero_optimization=ZeRO(stage=stage))
        memory = estimate_memory(strategy.layout(), MIDDLE, strategy.mesh(8), WORK)
        held.append(sum(memory.gpu[k] for k in ("params", "optimizer")))
    assert held == sorted(held, reverse=True)


def test_weights_that_are_let_go_after_the_forward_pass_are_gathered_by_layers() -> None:
    """Kept for the backward pass, all of them are whole: 16 GB of 8 B weights in 16 bits."""
    work = replace(WORK, widths=SHARDED_FP32, checkpointing="full")
    whole = MIDDLE.parameters * 2
    kept, let_go = (
        estimate_memory(FSDP(reshard_after_forward=again).layout(), MIDDLE, FSDP().mesh(8), work)
        for again in (False, True)
    )
    assert kept.gpu["buffers"] >= whole
    assert let_go.gpu["buffers"] < whole / 4


def test_tensor_and_pipeline_axes_divide_states_and_activations() -> None:
    whole = alone(MIDDLE, WORK).gpu
    for axis in ("tensor", "pipeline"):
        mesh = Mesh((("data", 1), (axis, 4)))
        part = estimate_memory(DDP().layout(), MIDDLE, mesh, WORK).gpu
        assert part["params"] < whole["params"] / 3
        assert part["activations"] < whole["activations"]


@pytest.mark.parametrize(
    ("order", "first", "last"), [("layers", 1, 1), ("1f1b", 4, 1), ("gpipe", 8, 8)]
)
def test_a_stage_holds_the_micro_batches_that_are_under_way(
    order: PipelineKind, first: int, last: int
) -> None:
    """Of 8 on 4 stages; docs/pipeline.md draws them."""
    mesh = Mesh((("pipeline", 4), ("data", 1)))
    one = stack_bytes(MIDDLE, LORA, RankShare(pipeline=4))
    work = replace(LORA, microbatches=8, pipelining=Pipelining(order))
    held = [stack_bytes(MIDDLE, work, cut) for cut in RankShare.extremes(MIDDLE, mesh, work)]
    assert held == [first * one, last * one]


def test_only_the_last_stage_has_logits() -> None:
    mesh, work = Mesh((("pipeline", 4), ("data", 1))), replace(WORK, checkpointing="full")
    found = estimate_memory(DDP().layout(), MIDDLE, mesh, work)
    assert found.gpu["logits"] > 0  # with them it is the fullest
    # A quarter of 32 layers and the head; the embedding is on another rank.
    layers = MIDDLE.parameters_in("layer") / 4
    assert found.gpu["params"] == pytest.approx(2 * (layers + 128256 * 4096), rel=1e-4)


def test_offload_moves_states_to_the_host_or_the_disk() -> None:
    for device in ("cpu", "nvme"):
        settings = {"stage": 3, "offload_optimizer": {"device": device, "nvme_path": "disk"}}
        strategy = DeepSpeed(zero_optimization=ZeRO.model_validate(settings))
        memory = estimate_memory(strategy.layout(), MIDDLE, strategy.mesh(8), WORK)
        assert memory.gpu["optimizer"] == 0
        assert (memory.nvme if device == "nvme" else memory.host) > 0


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_of_all_layers_but_two_leave_the_gpu(checkpointing: Any) -> None:
    work = replace(LORA, checkpointing=checkpointing)
    stays, waits = alone(MIDDLE, work), alone(MIDDLE, replace(work, offloaded=True))
    stack = stack_bytes(MIDDLE, work, RankShare())
    saved = stays.moments["forward"] - waits.moments["forward"]
    assert saved == pytest.approx(stack * 30 / 32)
    assert waits.host - stays.host == pytest.approx(stack * 31 / 32)


def test_the_head_of_unscored_tokens_costs_nothing() -> None:
    half = alone(MIDDLE, replace(LORA, scored=0.5))
    assert half.gpu["logits"] == pytest.approx(alone(MIDDLE, LORA).gpu["logits"] / 2)


# What factors keep -------------------------------------------------------------------------------

OWN = Workload(2, 512, counted=True)
IA3 = AdapterSize(1, ("k_proj", "v_proj", "down_proj"), trained=1, scaled_inputs=("down_proj",))


@pytest.mark.parametrize("autocast", [True, False])
def test_a_factor_keeps_what_it_scales(autocast: bool) -> None:
    """Keys and values in 16 bits, what the last linear reads in fp32 under autocast; no linear but
    that one keeps its input, where LoRA on all of them keeps each."""
    work = replace(OWN, adapter=IA3, autocast=autocast)
    keys = replace(work, adapter=replace(IA3, targets=("k_proj", "v_proj"), scaled_inputs=()))
    down = replace(work, adapter=replace(IA3, targets=("down_proj",)))
    nothing = replace(keys, adapter=replace(IA3, targets=(), scaled_inputs=()))
    less, none = (layer_bytes(SMALL, each, RankShare()) / work.tokens for each in (keys, nothing))
    assert less - none == 2 * 2 * 512
    assert (
        layer_bytes(SMALL, down, RankShare()) / work.tokens - none == (4 if autocast else 2) * 8192
    )
    both = layer_bytes(SMALL, work, RankShare()) / work.tokens
    assert both - less == (4 if autocast else 2) * 8192
    lora = replace(work, adapter=AdapterSize(1))
    assert both < layer_bytes(SMALL, lora, RankShare()) / work.tokens


def test_norms_are_not_cast_in_fp32() -> None:
    """A norm of Llama keeps its input, and with a trained weight what that is multiplied with."""
    fp32 = replace(OWN, widths=replace(PURE_BF16, compute=4.0))
    for work, numbers in ((fp32, 2), (replace(fp32, adapter=AdapterSize(1)), 1)):
        assert norm_numbers(SMALL, work) == numbers * 2 * 2048
    assert norm_numbers(SMALL, OWN) == 3 * 2 * 2048
