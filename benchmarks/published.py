"""Published measurements as cases that the estimator can be asked about.

A row of `published_points.csv` becomes a `Case`, or a reason why it can't: a setting that the
estimator needs and the row doesn't give. What a source's tool does by default (widths, kernels,
what its memory figure counts) is said here once for each source, from that tool's documentation.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.published_models import gpt_shape, shape_of
from shardtune.core.layout import AxisRule, Layout
from shardtune.core.mesh import Mesh
from shardtune.core.shape import ModelShape
from shardtune.estimate.workload import (
    MIXED,
    NF4_DOUBLE_BITS,
    NF4_SINGLE_BITS,
    PURE_BF16,
    SHARDED_FP32,
    Adapter,
    Buckets,
    Widths,
    Workload,
)
from shardtune.strategies import DDP, FSDP, DeepSpeed
from shardtune.strategies.deepspeed import ZeRO

Row = dict[str, str]
Metric = Literal["memory", "throughput", "iteration"]
Counts = Literal["allocated", "reserved", "device"]
"""What a memory figure counts: torch's tensors, its allocator's blocks, or all of the device."""
GIB = float(1 << 30)
BITS_8 = 2 * (1 + 4 / 256)
"""Two 8-bit moments with an fp32 scale for 256 of them (bitsandbytes)."""


@dataclass(frozen=True)
class Case:
    """One measurement, and everything that the estimator needs to predict it."""

    number: int
    """The row in its file, the first after the heading being 0."""
    source: str
    name: str
    metric: Metric
    measured: float | None
    """GiB, tokens/s on one GPU, or seconds a step; None where the run was out of memory."""
    shape: ModelShape
    gpu: str
    nodes: int
    layout: Layout
    mesh: Mesh
    work: Workload
    counts: Counts = "reserved"
    link: float | None = None
    """Gbit/s between nodes, for each node, where the source says it."""
    apart: str = ""
    """Why the row is judged apart: something that the estimate needs is known in part only."""


@dataclass(frozen=True)
class Unknown:
    """A row that can't be asked about, and why."""

    number: int
    source: str
    name: str
    why: str


class Missing(Exception):
    """A setting that the row doesn't give."""


@dataclass(frozen=True)
class Settings:
    """A row read: the strategy and the work."""

    layout: Layout
    mesh: Mesh
    work: Workload
    counts: Counts = "reserved"
    apart: str = ""


LENGTHS = "rows cut at a length, how long they are isn't said"
LOADING = "litgpt's FSDP: no less memory with more GPUs, so what is measured isn't the training"
WIDTHS = "Megatron-Bridge: widths of gradients and optimizer states with fp8 aren't said"


# Strategies --------------------------------------------------------------------------------------


def fsdp(
    ranks: int, *, tensor: int = 1, context: int = 1, pipeline: int = 1
) -> tuple[Layout, Mesh]:
    """FSDP over `ranks`; ranks that share a long row divide the states too."""
    layout, mesh = FSDP().layout(), FSDP().mesh(ranks)
    return _inside(layout, mesh, tensor, context, pipeline)


def ddp(ranks: int, *, tensor: int = 1, context: int = 1, pipeline: int = 1) -> tuple[Layout, Mesh]:
    return _inside(DDP().layout(), DDP().mesh(ranks), tensor, context, pipeline)


def zero(stage: int, ranks: int, **settings: object) -> tuple[Layout, Mesh]:
    strategy = DeepSpeed(zero_optimization=ZeRO.model_validate({"stage": stage, **settings}))
    return strategy.layout(), strategy.mesh(ranks)


def _inside(
    layout: Layout, mesh: Mesh, tensor: int, context: int, pipeline: int
) -> tuple[Layout, Mesh]:
    axes = (("pipeline", pipeline), *mesh.axes, ("context", context), ("tensor", tensor))
    if context > 1:
        divides = frozenset({state for rule in layout.rules for state in rule.divides})
        layout = replace(layout, rules=(*layout.rules, AxisRule("context", divides)))
    kept = tuple((axis, size) for axis, size in axes if size > 1 or axis in dict(mesh.axes))
    return layout, Mesh(kept)


# Reading a row -----------------------------------------------------------------------------------


def _int(row: Row, key: str) -> int:
    found = re.fullmatch(r"(\d+)( \(longest\))?", row[key].strip())
    if not found:
        raise Missing(f"{key} is {row[key] or 'not given'}")
    return int(found[1])


def _degree(row: Row, letters: str) -> int:
    found = re.search(rf"\b{letters}(\d+)", row["strategy"])
    return int(found[1]) if found else 1


def _ranks(row: Row) -> int:
    return _int(row, "n_gpus")


def _checkpointing(row: Row) -> Literal["none", "selective", "full"]:
    word = row["grad_ckpt"]
    if word.startswith("full"):
        return "full"
    if word.startswith("none"):
        return "none"
    if word in ("selective(op)", "selective op"):
        return "selective"
    raise Missing(f"checkpointing is {word or 'not given'}")


def _bits(row: Row) -> float | None:
    quantised = {"nf4": NF4_SINGLE_BITS, "nf4-dq": NF4_DOUBLE_BITS, "nf4+dq": NF4_DOUBLE_BITS}
    return quantised.get(row["quant"])


def _attention(row: Row) -> Literal["sdpa", "flash", "eager"]:
    """SDPA had no cuDNN kernels before torch 2.5, at the end of 2024."""
    if row["flash"] == "no":
        return "eager"
    new = "_2025" in row["source"] or "Automodel" in row["source"]
    return "sdpa" if new else "flash"


def _work(row: Row, **settings: object) -> Workload:
    work = Workload(
        micro_batch=_int(row, "micro_batch"),
        sequence=_int(row, "seq_len"),
        checkpointing=_checkpointing(row),
        fp8=("8" in row["quant"] and "fp" in row["quant"]) or "float8" in row["quant"],
        packed_bits=_bits(row),
        attention=_attention(row),
    )
    return replace(work, **settings)  # type: ignore[arg-type]


def _torchtitan(row: Row) -> Settings:
    """fp32 shares, bf16 computation; memory is what the allocator reserves."""
    text = row["strategy"]
    if "PP" in text:
        raise Missing("how the local batch is cut into micro-batches of the pipeline")
    if row["grad_ckpt"] == "selective layer":
        raise Missing("which layers are recomputed")
    tensor, context = _degree(row, "TP"), _degree(row, "CP")
    layout, mesh = fsdp(_ranks(row) // tensor // context, tensor=tensor, context=context)
    compiled = "compile" in text
    work = _work(
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
    layout, mesh = fsdp(_ranks(row))
    if row["grad_ckpt"] == "selective":
        raise Missing("which layers are recomputed")
    return Settings(layout, mesh, _work(row, widths=SHARDED_FP32, kernels="fused"))


def _llm_foundry(row: Row) -> Settings:
    """Composer: PURE reduces in bf16, DEFAULT in fp32. Flash attention, 16-bit layer norms."""
    ranks = _ranks(row)
    gathers = FSDP(reshard_after_forward=row["zero_stage/shard"] == "FULL_SHARD")
    reduced = 2.0 if "PURE" in row["strategy"] else 4.0
    widths = replace(SHARDED_FP32, reduced=reduced)
    accumulation = re.search(r"GA (\d+)", row["quote/where"])
    assert accumulation
    work = _work(row, widths=widths, kernels="fused", microbatches=int(accumulation[1]))
    return Settings(gathers.layout(), gathers.mesh(ranks), work)


def _torchtune(row: Row) -> Settings:
    """Memory is what is allocated: its tables say "active", and pull request 961, which corrects
    one of them, compares it with peak memory allocated."""
    optimizer = row["optimizer"]
    if optimizer == "?":
        raise Missing("optimizer is not given")
    if "unpacked" in row["strategy"]:
        raise Missing("lengths of the unpacked rows")
    packed_ce = "Optimization flags" in row["quote/where"]
    adapter = None
    if row["peft"].startswith("LoRA"):
        targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        adapter = Adapter(8, targets)
        if packed_ce or _ranks(row) > 1:
            adapter = Adapter(8, targets)
    widths = PURE_BF16
    if "8bit" in optimizer:
        # Paged states lie in main memory until they are needed.
        widths = replace(widths, optimizer=0 if "Paged" in optimizer else BITS_8)
    flags = row["strategy"]
    kernels = "eager" if flags.endswith("+packed") else "compiled"
    loss = "plain" if flags.endswith(("+packed", "+compile")) else "chunked"
    work = _work(
        row,
        widths=widths,
        adapter=adapter,
        kernels=kernels,
        loss=loss,
        in_backward="in-bwd" in optimizer or "optim-in-bwd" in optimizer,
        offloaded_checkpoints="activations" in row["offload"],
        ends_apart=True,  # custom_sharded_layers
        packed_bits=NF4_DOUBLE_BITS if row["quant"] == "nf4" else None,
    )
    ranks = _ranks(row)
    if ranks == 1:
        layout, mesh = ddp(1)
    else:
        chosen = FSDP(offload="cpu" if row["offload"].startswith("cpu") else "none")
        layout, mesh = chosen.layout(), chosen.mesh(ranks)
    return Settings(layout, mesh, work, "allocated")


def _automodel(row: Row) -> Settings:
    ranks = _ranks(row)
    if "PP" in row["strategy"] or "EP" in row["strategy"]:
        raise Missing("checkpointing is ?")
    adapter = None
    if row["peft"].startswith("LoRA"):
        adapter = Adapter(16)
    tensor, context = _degree(row, "TP"), _degree(row, "CP")
    if row["zero_stage/shard"] == "none":
        layout, mesh = ddp(ranks)
    else:
        layout, mesh = fsdp(ranks // tensor // context, tensor=tensor, context=context)
    loss = "fused" if "LC-CE" in row["strategy"] else "plain"
    work = _work(
        row,
        widths=PURE_BF16,
        adapter=adapter,
        # Liger's kernels are its default.
        kernels="compiled" if "compile" in row["strategy"] else "fused",
        loss=loss,
        sequence_parallel="SP" in row["strategy"],
    )
    if "GA16" in row["strategy"]:
        work = replace(work, microbatches=16)
    return Settings(layout, mesh, work, "allocated")


def _megatron_bridge(row: Row) -> Settings:
    """fp32 gradients and a distributed optimizer: 6 bytes a weight, 12 more over all replicas."""
    if row["grad_ckpt"] != "selective core_attn":
        raise Missing(f"checkpointing is {row['grad_ckpt']}")
    tensor, pipeline = _degree(row, "TP"), _degree(row, "PP")
    data = _ranks(row) // tensor // pipeline
    layout, mesh = zero(1, data)
    layout, mesh = _inside(layout, mesh, tensor, 1, pipeline)
    work = Workload(
        micro_batch=1,
        sequence=_int(row, "seq_len"),
        microbatches=32 // data,
        widths=replace(MIXED, gradients=4, reduced=4),
        fp8=True,
        kernels="fused",
        sequence_parallel=True,
        interleaved=_degree(row, "VP"),
    )
    return Settings(layout, mesh, work, "allocated", WIDTHS)


def _fsdp_qlora(row: Row) -> Settings:
    """Rank 64 on all linears, reentrant checkpointing, bf16 everywhere; reserved memory."""
    targets = ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "gate_proj")
    work = _work(
        row,
        widths=PURE_BF16,
        adapter=Adapter(64, targets, dropout=0.1),
        packed_bits=NF4_DOUBLE_BITS if row["quant"] == "nf4" else None,
        kernels="eager",
        loss="shifted",
        returns_logits=True,
    )
    offload = row["offload"].startswith("cpu")
    if row["zero_stage/shard"] == "DDP":
        layout, mesh = ddp(_ranks(row))
    else:
        chosen = FSDP(offload="cpu" if offload else "none")
        layout, mesh = chosen.layout(), chosen.mesh(_ranks(row))
    if "acts" in row["offload"]:
        work = replace(work, offloaded_checkpoints=True)
    return Settings(layout, mesh, work)


def _peft_docs(row: Row) -> Settings:
    work = _work(
        row,
        widths=PURE_BF16,
        adapter=Adapter(8, dropout=0.1),
        kernels="eager",
        loss="shifted",
        returns_logits=True,
    )
    if "ZeRO-3" in row["strategy"]:
        layout, mesh = zero(3, _ranks(row))
        work = replace(work, buckets=Buckets())
    else:
        chosen = FSDP(offload="cpu" if row["offload"].startswith("cpu") else "none")
        layout, mesh = chosen.layout(), chosen.mesh(_ranks(row))
    return Settings(layout, mesh, work, "device")


PEFT_METHODS: dict[str, Adapter | None] = {
    "full-finetuning-lr_0.00001": None,
    "lora-rank32": Adapter(32, ("q_proj", "v_proj")),
    "lora-rank64": Adapter(64, ("q_proj", "v_proj")),
    "lora-rank10-target-mlp": Adapter(10, ("gate_proj", "up_proj", "down_proj")),
    "lora-rank32-dora": Adapter(32, ("q_proj", "v_proj"), trained=9289728),
    "ia3-default": Adapter(1, ("k_proj", "v_proj", "down_proj"), trained=286720),
    "vera-default": Adapter(1, ("q_proj", "v_proj"), trained=129024),
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
    """bf16-true, LoRA on queries and values; micro-batches of the longest row; GB are 10^9."""
    several = row["strategy"].startswith("FSDP")
    layout, mesh = fsdp(_ranks(row)) if several else ddp(1)
    model = row["model"]
    targets = {
        "phi": ("q_proj", "v_proj"),
        "Sta": ("query_key_value",),
        "Fal": ("query_key_value",),
    }
    work = _work(
        row,
        widths=PURE_BF16,
        adapter=Adapter(8, targets.get(model[:3], ("q_proj", "v_proj")), dropout=0.05),
        kernels="eager",
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
        adapter = Adapter(int(rank[1]), "all-linear" if every else ("q_proj", "k_proj", "v_proj"))
    if row["quant"] != "none":
        bits = {"gptq-int4": 4.25, "gptq-int8": 8.25, "bnb-int4": NF4_DOUBLE_BITS}[row["quant"]]
    work = _work(
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
    work = _work(
        row,
        # peft turns what isn't quantised to fp32 (prepare_model_for_kbit_training).
        widths=Widths(2 if own else 4, trained=4, gradients=4, optimizer=2),
        adapter=Adapter(32),
        packed_bits=NF4_DOUBLE_BITS,
        kernels="fused" if own else "eager",
        loss=("chunked" if old else "fused") if own else "shifted",
        returns_logits=old or not own,
        offloaded_checkpoints=own,
    )
    return Settings(*ddp(1), work, "device")


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

NOT_A_RUN = {
    "analytic": "a closed form, held by tests/estimate",
    "rule_of_thumb": "a rule of thumb, not a measurement",
}


def read_points(path: Path) -> Iterator[Case | Unknown]:
    """Every row of the file, as a case or with the reason why not."""
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            source = short(row["source"])
            name = f"{row['model']}, {row['n_gpus'] or '?'} x {row['gpu']}, {row['strategy']}"
            try:
                yield _case(number, source, name, row)
            except Missing as missing:
                yield Unknown(number, source, name, str(missing))


def short(source: str) -> str:
    """A source's name for a table."""
    for known in READERS:
        if source.startswith(known):
            gpu = re.search(r"\[(\w+ \d+GB)( (FP8|BF16))?", source)
            return known + (f" {gpu[1]}" if gpu else "")
    return source.split(" (")[0].split(" [")[0]


def _case(number: int, source: str, name: str, row: Row) -> Case:
    if row["kind"] in NOT_A_RUN:
        raise Missing(NOT_A_RUN[row["kind"]])
    if row["metric"] in ("mfu", "tflops_per_gpu"):
        raise Missing("the same run's tokens/s, or a rate without settings")
    reader = next((READERS[key] for key in READERS if row["source"].startswith(key)), None)
    if reader is None:
        raise Missing("settings: micro-batch, lengths or checkpointing are not published")
    try:
        shape = shape_of(row["model"])
    except KeyError:
        raise Missing("the model's shape") from None
    if row["metric"] == "peak_mem_GB" and "CPU" in row["unit"]:
        raise Missing("main memory of a run without settings")
    settings = reader(row)
    memory = row["metric"] == "peak_mem_GB"
    return Case(
        number,
        source,
        name,
        "memory" if memory else "throughput",
        _gib(row) if memory else _rate(row),
        shape,
        row["gpu"],
        int(row["n_nodes"] or 1),
        settings.layout,
        settings.mesh,
        settings.work,
        settings.counts,
        _link(row),
        settings.apart,
    )


def _gib(row: Row) -> float | None:
    value, unit = row["value"], row["unit"]
    if value == "OOM":
        return None
    low, _, high = value.partition("-")
    number = (float(low) + float(high)) / 2 if high else float(low)
    decimal = "1e9" in unit or row["source"].startswith(("Lightning-AI", "NVIDIA-NeMo"))
    return number * 1e9 / GIB if decimal else number


def _rate(row: Row) -> float:
    # "As printed" is a rate of one GPU: the text's 2,200 beside it is half of a run's 4,342.
    total = row["unit"] in ("tok/s total", "tok/s")
    return float(row["value"]) / (_ranks(row) if total else 1)


def _link(row: Row) -> float | None:
    found = re.search(r"(\d+) ?Gbps", row["gpu"] + row["source"])
    if not found:
        return None
    # fms-fsdp names the bandwidth of a GPU, llm-foundry that of a node.
    return float(found[1])


# Iteration times ---------------------------------------------------------------------------------

VOCAB = 50257
"""GPT-2's. The files don't name it, but the time of the head does: without tensor parallelism it
runs at a third of its speed with it, as products of an odd width do."""


def _padded(tensor: int) -> int:
    """Slices must be equal: Megatron pads to a multiple of 128 for each."""
    step = 128 * tensor
    return VOCAB if tensor == 1 else -(-VOCAB // step) * step


def read_iterations(path: Path, *, nodes: bool) -> Iterator[Case]:
    """Steps of GPTs on A100s, cut three ways. The files name neither precision nor recomputation:
    fp16 with fp32 gradients as Megatron has, and on several nodes everything recomputed (175 B
    would not fit otherwise)."""
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            gpus, batch, rows = (int(row[k]) for k in ("# GPUs", "global batch", "micro batch"))
            tensor, data, pipeline = (
                int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline")
            )
            hidden, heads, layers = (
                int(row[k]) for k in ("hidden size", "attention heads", "# layers")
            )
            layout, mesh = ddp(data, tensor=tensor, pipeline=pipeline)
            work = Workload(
                micro_batch=rows,
                sequence=int(row["sequence length"]),
                microbatches=batch // (rows * data),
                widths=replace(MIXED, gradients=4),
                checkpointing="full" if nodes else "none",
                attention="eager",
                kernels="fused",
                dropout=True,
                overlap=False,
            )
            yield Case(
                number,
                path.stem,
                f"h {hidden} L {layers}, batch {rows} of {batch}, "
                f"tensor {tensor} data {data} pipeline {pipeline}",
                "iteration",
                float(row["iteration time (ms)"]) / 1e3,
                gpt_shape(hidden, layers, heads, _padded(tensor)),
                "A100-80GB",
                max(1, gpus // 8) if nodes else 1,
                layout,
                mesh,
                work,
            )
