"""How each source's rows are read: what its tool does by default, and what its figures count.

Widths, kernels and losses are those of the tool's documentation; what a row doesn't give and the
estimator needs is `Missing`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from benchmarks.cases import (
    Missing,
    Row,
    Settings,
    ddp,
    degree,
    fsdp,
    inside,
    integer,
    ranks_of,
    work_of,
    zero,
)
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.core.send_buckets import SendBuckets
from shardtune.parallel.fsdp.strategy import FSDP
from shardtune.plan.estimate.workload import (
    MIXED,
    NF4_DOUBLE_BITS,
    PURE_BF16,
    SHARDED_FP32,
    AdapterSize,
    Widths,
    Workload,
)

BITS_8 = 2 * (1 + 4 / 256)
"""Two 8-bit moments with an fp32 scale for 256 of them (bitsandbytes)."""

LENGTHS = "rows cut at a length, how long they are isn't said"
LOADING = "litgpt's FSDP: no less memory with more GPUs, so what is measured isn't the training"
WIDTHS = "Megatron-Bridge: widths of gradients and optimizer states with fp8 aren't said"


def _torchtitan(row: Row) -> Settings:
    """fp32 shares, bf16 computation; memory is what the allocator reserves."""
    text = row["strategy"]
    if "PP" in text:
        raise Missing("how the local batch is cut into micro-batches of the pipeline")
    if row["grad_ckpt"] == "selective layer":
        raise Missing("which layers are recomputed")
    tensor, context = degree(row, "TP"), degree(row, "CP")
    layout, mesh = fsdp(ranks_of(row) // tensor // context, tensor=tensor, context=context)
    compiled = "compile" in text
    work = work_of(
        row,
        widths=SHARDED_FP32,
        kernels="compiled" if compiled else "fused",
        sequence_parallel=True,
        async_tensor="async" in text.lower() or "AsyncTP" in row["quant"],
        # Since 2025 --compile covers the loss too.
        loss="compiled" if compiled and "_2025" in row["source"] else "plain",
    )
    return Settings(layout, mesh, work)


def _fms_fsdp(row: Row) -> Settings:
    """Its policy `bfSixteen` reduces gradients in bf16."""
    layout, mesh = fsdp(ranks_of(row))
    if row["grad_ckpt"] == "selective":
        raise Missing("which layers are recomputed")
    widths = replace(SHARDED_FP32, reduced=2)
    return Settings(layout, mesh, work_of(row, widths=widths, kernels="fused"))


def _llm_foundry(row: Row) -> Settings:
    """Composer: PURE reduces in bf16, DEFAULT in fp32. Flash attention, 16-bit layer norms."""
    ranks = ranks_of(row)
    gathers = FSDP(reshard_after_forward=row["zero_stage/shard"] == "FULL_SHARD")
    reduced = 2.0 if "PURE" in row["strategy"] else 4.0
    widths = replace(SHARDED_FP32, reduced=reduced)
    accumulation = re.search(r"GA (\d+)", row["quote/where"])
    assert accumulation
    work = work_of(row, widths=widths, kernels="fused", microbatches=int(accumulation[1]))
    return Settings(gathers.layout(), gathers.mesh(ranks), work)


def _torchtune(row: Row) -> Settings:
    """Memory is what is allocated: its tables say "active", and pull request 961, which corrects
    one of them, compares it with peak memory allocated."""
    optimizer = row["optimizer"]
    if optimizer == "?":
        raise Missing("optimizer is not given")
    if "unpacked" in row["strategy"]:
        raise Missing("lengths of the unpacked rows")
    adapter = None
    if row["peft"].startswith("LoRA"):
        targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        adapter = AdapterSize(8, targets)
    widths = PURE_BF16
    if "8bit" in optimizer:
        # Paged states lie in CPU memory until they are needed.
        widths = replace(widths, optimizer=0 if "Paged" in optimizer else BITS_8)
    flags = row["strategy"]
    kernels = "eager" if flags.endswith("+packed") else "compiled"
    loss = "plain" if flags.endswith(("+packed", "+compile")) else "chunked"
    work = work_of(
        row,
        widths=widths,
        adapter=adapter,
        kernels=kernels,
        loss=loss,
        in_backward="in-bwd" in optimizer or "optim-in-bwd" in optimizer,
        offloaded_checkpoints="activations" in row["offload"],
        ends_apart=True,  # custom_sharded_layers
        divides_scales=True,
        packed_bits=NF4_DOUBLE_BITS if row["quant"] == "nf4" else None,
    )
    ranks = ranks_of(row)
    if ranks == 1:
        layout, mesh = ddp(1)
    else:
        chosen = FSDP(offload="cpu" if row["offload"].startswith("cpu") else "none")
        layout, mesh = chosen.layout(), chosen.mesh(ranks)
    return Settings(layout, mesh, work, "allocated")


def _automodel(row: Row) -> Settings:
    """Logits live on in its loop (`out`) until the backward pass is over. Where layers aren't
    compiled, it checkpoints norms, attention and MLP each on its own."""
    ranks = ranks_of(row)
    if "PP" in row["strategy"] or "EP" in row["strategy"]:
        raise Missing("checkpointing is ?")
    adapter = None
    if row["peft"].startswith("LoRA"):
        adapter = AdapterSize(16)
    tensor, context = degree(row, "TP"), degree(row, "CP")
    if row["zero_stage/shard"] == "none":
        layout, mesh = ddp(ranks)
    else:
        layout, mesh = fsdp(ranks // tensor // context, tensor=tensor, context=context)
    loss = "fused" if "LC-CE" in row["strategy"] else "plain"
    work = work_of(
        row,
        widths=PURE_BF16,
        adapter=adapter,
        # Liger's kernels are its default.
        kernels="compiled" if "compile" in row["strategy"] else "fused",
        loss=loss,
        returns_logits=loss == "plain",
        by_module="compile" not in row["strategy"],
        sequence_parallel="SP" in row["strategy"],
    )
    if "GA16" in row["strategy"]:
        work = replace(work, microbatches=16)
    return Settings(layout, mesh, work, "allocated")


def _megatron_bridge(row: Row) -> Settings:
    """fp32 gradients and a distributed optimizer: 6 bytes a weight, 12 more over all replicas."""
    if row["grad_ckpt"] != "selective core_attn":
        raise Missing(f"checkpointing is {row['grad_ckpt']}")
    tensor, pipeline = degree(row, "TP"), degree(row, "PP")
    data = ranks_of(row) // tensor // pipeline
    layout, mesh = zero(1, data)
    layout, mesh = inside(layout, mesh, tensor, 1, pipeline)
    work = Workload(
        micro_batch=1,
        sequence=integer(row, "seq_len"),
        microbatches=32 // data,
        widths=replace(MIXED, gradients=4, reduced=4),
        fp8=True,
        kernels="fused",
        sequence_parallel=True,
        pipelining=Pipelining("interleaved", degree(row, "VP")),
    )
    return Settings(layout, mesh, work, "allocated", WIDTHS)


def _fsdp_qlora(row: Row) -> Settings:
    """Rank 64 on all linears, reentrant checkpointing, bf16 everywhere; reserved memory."""
    targets = ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "gate_proj")
    work = work_of(
        row,
        widths=PURE_BF16,
        adapter=AdapterSize(64, targets, dropout=0.1),
        packed_bits=NF4_DOUBLE_BITS if row["quant"] == "nf4" else None,
        kernels="eager",
        loss="shifted",
        returns_logits=True,
    )
    offload = row["offload"].startswith("cpu")
    if row["zero_stage/shard"] == "DDP":
        layout, mesh = ddp(ranks_of(row))
    else:
        chosen = FSDP(offload="cpu" if offload else "none")
        layout, mesh = chosen.layout(), chosen.mesh(ranks_of(row))
    if "acts" in row["offload"]:
        work = replace(work, offloaded_checkpoints=True)
    return Settings(layout, mesh, work)


def _peft_docs(row: Row) -> Settings:
    """Its script names no dtype for a model that isn't quantized: FSDP then has fp32 shares, while
    DeepSpeed turns them to bf16."""
    work = work_of(
        row,
        widths=PURE_BF16,
        adapter=AdapterSize(8, dropout=0.1),
        kernels="eager",
        loss="shifted",
        returns_logits=True,
    )
    if "ZeRO-3" in row["strategy"]:
        layout, mesh = zero(3, ranks_of(row))
        work = replace(work, buckets=SendBuckets())
    else:
        chosen = FSDP(offload="cpu" if row["offload"].startswith("cpu") else "none")
        layout, mesh = chosen.layout(), chosen.mesh(ranks_of(row))
        if work.packed_bits is None:
            work = replace(work, widths=replace(SHARDED_FP32, frozen=4, reduced=2))
    return Settings(layout, mesh, work, "device")


PEFT_METHODS: dict[str, AdapterSize | None] = {
    "full-finetuning-lr_0.00001": None,
    "lora-rank32": AdapterSize(32, ("q_proj", "v_proj")),
    "lora-rank64": AdapterSize(64, ("q_proj", "v_proj")),
    "lora-rank10-target-mlp": AdapterSize(10, ("gate_proj", "up_proj", "down_proj")),
    "lora-rank32-dora": AdapterSize(32, ("q_proj", "v_proj"), trained=9289728),
    "ia3-default": AdapterSize(1, ("k_proj", "v_proj", "down_proj"), trained=286720),
    "vera-default": AdapterSize(1, ("q_proj", "v_proj"), trained=129024),
}


def _peft_methods(row: Row) -> Settings:
    adapter = PEFT_METHODS[row["peft"]]
    widths = PURE_BF16 if adapter is None else Widths(trained=4, gradients=4, optimizer=8)
    work = Workload(
        micro_batch=4,
        sequence=768,
        widths=widths,
        adapter=adapter,
        kernels="eager",
        foreach=True,
        variable_lengths=True,
    )
    return Settings(*ddp(1), work, "reserved", LENGTHS)


def _litgpt(row: Row) -> Settings:
    """bf16-true, LoRA on queries and values; micro-batches of the longest row; GB are 10^9. What a
    block keeps was counted in its code of October 2023, when the table was made."""
    several = row["strategy"].startswith("FSDP")
    layout, mesh = fsdp(ranks_of(row)) if several else ddp(1)
    model = row["model"]
    targets = {
        "phi": ("q_proj", "v_proj"),
        "Sta": ("query_key_value",),
        "Fal": ("query_key_value",),
    }
    work = work_of(
        row,
        widths=PURE_BF16,
        adapter=AdapterSize(8, targets.get(model[:3], ("q_proj", "v_proj")), dropout=0.05),
        kernels="eager",
        loss="widened",
        stacked_qkv=True,
    )
    return Settings(layout, mesh, work, "allocated", LOADING if several else "")


def _ms_swift(row: Row) -> Settings:
    if row["strategy"] != "single GPU":
        raise Missing("how the layers are spread over the GPUs")
    adapter = None
    bits = None
    if row["peft"].startswith("LoRA"):
        rank = re.search(r"r(\d+)", row["peft"])
        assert rank
        every = "all-linear" in row["peft"]
        adapter = AdapterSize(
            int(rank[1]), "all-linear" if every else ("q_proj", "k_proj", "v_proj")
        )
    if row["quant"] != "none":
        bits = {"gptq-int4": 4.25, "gptq-int8": 8.25, "bnb-int4": NF4_DOUBLE_BITS}[row["quant"]]
    work = work_of(
        row,
        widths=PURE_BF16,
        adapter=adapter,
        packed_bits=bits,
        kernels="eager",
        foreach=True,
        fp8=False,
        loss="shifted",
        returns_logits=True,
        variable_lengths=True,
    )
    return Settings(*ddp(1), work, "reserved", LENGTHS)


def _unsloth(row: Row) -> Settings:
    own = row["strategy"].startswith("Unsloth")
    old = "no CCE" in row["strategy"]
    work = work_of(
        row,
        # peft turns what isn't quantized to fp32 (prepare_model_for_kbit_training).
        widths=Widths(2 if own else 4, trained=4, gradients=4, optimizer=2),
        adapter=AdapterSize(32),
        packed_bits=NF4_DOUBLE_BITS,
        kernels="fused" if own else "eager",
        loss=("chunked" if old else "fused") if own else "shifted",
        returns_logits=old or not own,
        offloaded_checkpoints=own,
        fp32_stream=not own,
    )
    # The longest context that just fits on a card: what must fit is what the card has.
    return Settings(*ddp(1), work, "required")


READERS: dict[str, Callable[[Row], Settings]] = {
    "pytorch/torchtitan": _torchtitan,
    "pytorch.org blog 2024-03": _fms_fsdp,
    "mosaicml/llm-foundry": _llm_foundry,
    "pytorch/torchtune": _torchtune,
    "NVIDIA-NeMo/Automodel": _automodel,
    "NVIDIA-NeMo/Megatron-Bridge skills": _megatron_bridge,
    "Megatron-Bridge skills": _megatron_bridge,
    "AnswerDotAI/fsdp_qlora": _fsdp_qlora,
    "huggingface/peft docs": _peft_docs,
    "huggingface/peft method_comparison": _peft_methods,
    "Lightning-AI/litgpt": _litgpt,
    "modelscope/ms-swift": _ms_swift,
    "unsloth.ai": _unsloth,
}
