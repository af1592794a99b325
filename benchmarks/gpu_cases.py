"""What `benchmarks.gpu` measures: the rows of its table, our settings for each, and the peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Sections = dict[str, Any]
"""Sections of a job file, by their names."""

NF4: Sections = {"quantization": "nf4"}
FULL: Sections = {"gradient_checkpointing": "full"}
FP8: dict[str, Sections] = {"shardtune": {"model": {"quantization": "fp8"}}}
WIDE: Sections = {"gradient_checkpointing": "mlp"}
PAGED: Sections = {"optimizer": {"type": "adamw", "paged": True}}
COMMAND = "shardtune train"
"""The name of the method that is the command itself, on files, with a job's defaults."""
LEAST: Sections = {"gradient_checkpointing": "most", "offload_activations": True}

SHORT_ROWS: dict[str, tuple[Literal["1B", "8B"], Literal["bf16", "nf4"], int, int]] = {
    f"{size} {base} {rows}x{length}": (size, base, rows, length)
    for size, base in (("1B", "bf16"), ("8B", "bf16"), ("8B", "nf4"))
    for rows, length in ((1, 512), (1, 1024), (2, 1024), (4, 1024))
}
"""Steps of few tokens, by the names of their rows: LoRA on a model of that size."""

OURS: dict[str, dict[str, Sections]] = {
    "bf16 8x2048": {"shardtune": {}, COMMAND: {}},
    "bf16 2x8192": {"shardtune": {}},
    "lean 8x2048": {"shardtune": {"train": LEAST}},
    "middle 2x8192": {"shardtune": {"train": WIDE | {"keep_layers": 8}}},
    "fp8 8x2048": FP8,
    "fp8 2x8192": FP8,
    "nf4 8x2048": {"shardtune": {}},
    "70B nf4 4x2048": {"shardtune": {"train": WIDE}},
    "1B all 8x2048": {"shardtune": {}, COMMAND: {}, "shardtune, paged": {"train": PAGED}},
    "packed 8x2048": {"shardtune": {}, COMMAND: {}},
    "dropout 8x2048": {"shardtune": {}},
    **{name: {"shardtune": {}} for name in SHORT_ROWS},
}
"""What our job says beyond the row's model, batch, adapter and base; several names, several runs.
A name has to begin with `shardtune`."""

DEFAULTS: Sections = {
    "precision": "bf16",
    "steps": 1000,
    "schedule": "constant",
    "loss": "fused",
    "kernels": "compiled",
}
"""`train` of each of our jobs: what `auto` chooses on a GPU, and a rate that peers have too."""


@dataclass(frozen=True)
class Case:
    """A row of the table: one model on one shape of batch, and who is compared on it."""

    name: str
    model: str
    rows: int
    length: int
    peers: tuple[str, ...]
    lora: bool = True
    base: Literal["bf16", "nf4"] = "bf16"
    packed: bool = False
    """Documents of 50 to 2000 tokens, of which only the trained tokens count."""
    layers: int | None = None
    """In the place of the model's own number."""
    against: str = ""
    """The row whose peers stand for this one's, so that they run once."""
    asked: float = 1.08
    """The ratio to the best peer that we want to reach."""
    memory: float | None = None
    """GiB in which we want to reach it."""
    rank: int = 16
    dropout: float = 0.0
    """Of LoRA."""

    @property
    def adapter(self) -> Sections:
        """What a job says of it."""
        if not self.lora:
            return {"type": "none"}
        return {"type": "lora", "rank": self.rank, "dropout": self.dropout}


@dataclass(frozen=True)
class Peer:
    """How one of the others trains."""

    tool: Literal["hf", "torchtune", "unsloth"] = "hf"
    needs: tuple[str, ...] = ()
    """Modules without which it is left out."""
    liger: bool = False
    """Liger's layers and its fused loss."""
    compiled: bool = False
    """Each layer through torch.compile, with Liger's fused loss."""
    checkpointing: bool = False
    budget: float | None = None
    """torch's share of activations to keep, of what a compiled layer would."""
    fp32_adapters: bool = False
    """Adapters in fp32 under autocast, as TRL and peft have them by default."""
    padded: bool = False
    """Documents in rows of their own, padded to the longest of the micro-batch."""
    attention: str = "sdpa"
    """What transformers is asked for."""

    @property
    def on_gpu_only(self) -> bool:
        return bool(self.needs) or self.compiled


LIGER, TUNE, UNSLOTH = ("liger_kernel",), ("torchtune",), ("unsloth",)
FLASH: dict[str, Any] = {
    "needs": ("liger_kernel", "flash_attn.cute"),
    "attention": "flash_attention_4",
}
PEERS: dict[str, Peer] = {
    "HF": Peer(),
    "HF, checkpointing": Peer(checkpointing=True),
    "HF, checkpointing, fp32 adapters": Peer(checkpointing=True, fp32_adapters=True),
    "Liger": Peer(needs=LIGER, liger=True),
    "Liger, FlashAttention 4": Peer(liger=True, **FLASH),
    "Liger, checkpointing": Peer(needs=LIGER, liger=True, checkpointing=True),
    "compile + Liger loss": Peer(needs=LIGER, compiled=True),
    "compile + Liger loss, FlashAttention 4": Peer(compiled=True, **FLASH),
    "compile + Liger loss, budget 0.3, FlashAttention 4": Peer(compiled=True, budget=0.3, **FLASH),
    "compile + Liger loss, checkpointing": Peer(needs=LIGER, compiled=True, checkpointing=True),
    "compile + Liger loss, budget 0.3": Peer(needs=LIGER, compiled=True, budget=0.3),
    "torchtune + compile": Peer("torchtune", needs=TUNE, compiled=True),
    "Unsloth": Peer("unsloth", needs=UNSLOTH, checkpointing=True),
    "HF, padded": Peer(padded=True),
    "Liger, padded": Peer(needs=LIGER, liger=True, padded=True),
}

FAST = (
    "HF",
    "Liger",
    "compile + Liger loss",
    "compile + Liger loss, FlashAttention 4",
    "torchtune + compile",
)
LEAN = (
    "HF, checkpointing",
    "HF, checkpointing, fp32 adapters",
    "Liger, checkpointing",
    "compile + Liger loss, checkpointing",
    "Unsloth",
)
MIDDLE = (
    "Liger, checkpointing",
    "compile + Liger loss, checkpointing",
    "compile + Liger loss, budget 0.3",
    "compile + Liger loss, budget 0.3, FlashAttention 4",
)
QLORA = ("HF, checkpointing", "Liger, checkpointing", "Liger")
PACKED = (
    "HF",
    "HF, padded",
    "Liger",
    "Liger, FlashAttention 4",
    "Liger, padded",
    "compile + Liger loss",
    "compile + Liger loss, FlashAttention 4",
)
LARGE, HUGE, SMALL = (f"meta-llama/Llama-{size}" for size in ("3.1-8B", "3.1-70B", "3.2-1B"))


def _short(
    name: str, size: Literal["1B", "8B"], base: Literal["bf16", "nf4"], rows: int, length: int
) -> Case:
    model = {"1B": SMALL, "8B": LARGE}[size]
    peers = FAST[1:4] if base == "bf16" else ("Liger",)
    asked = 1.2 if rows * length == 1024 else 1.05
    return Case(name, model, rows, length, peers, base=base, asked=asked)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("bf16 8x2048", LARGE, 8, 2048, FAST, memory=75),
        Case("bf16 2x8192", LARGE, 2, 8192, FAST),
        Case("fp8 8x2048", LARGE, 8, 2048, (), against="bf16 8x2048", asked=1.5),
        Case("fp8 2x8192", LARGE, 2, 8192, (), against="bf16 2x8192", asked=1.4),
        Case("lean 8x2048", LARGE, 8, 2048, LEAN, memory=20),
        Case("middle 2x8192", LARGE, 2, 8192, MIDDLE, asked=1.1, memory=44),
        Case("nf4 8x2048", LARGE, 8, 2048, QLORA, base="nf4", memory=74.8),
        Case("70B nf4 4x2048", HUGE, 4, 2048, QLORA[:2], base="nf4", asked=1.2),
        Case("1B all 8x2048", SMALL, 8, 2048, FAST[:4], lora=False),
        Case("packed 8x2048", LARGE, 8, 2048, PACKED, packed=True, asked=1.2),
        Case("dropout 8x2048", LARGE, 8, 2048, FAST[1:4], rank=64, dropout=0.05),
        *(_short(name, *row) for name, row in SHORT_ROWS.items()),
    )
}


def chosen(rows: list[str], methods: list[str]) -> Iterator[tuple[Case, str]]:
    """Rows and methods of which any of the words is a part; all where there are no words."""
    for case in CASES.values():
        for method in (*case.peers, *OURS[case.name]):
            if _has(case.name, rows) and _has(method, methods):
                yield case, method


def _has(name: str, words: list[str]) -> bool:
    return not words or any(word.lower() in name.lower() for word in words)


def our_job(case: Case, method: str, *, tiny: bool = False) -> Sections:
    """The job of one of our methods, as a job file would have it."""
    extra = OURS[case.name][method]
    rows, length = (case.rows, case.length) if not tiny else TINY_BATCH
    train = {"micro_batch": rows, "global_batch": rows} | DEFAULTS | extra.get("train", {})
    if tiny:
        train["kernels"] = "eager"
    return {
        "launch": {"processes": 1},
        "adapter": case.adapter,
        **extra,
        "model": {"name": case.model}
        | (NF4 if case.base == "nf4" else {})
        | extra.get("model", {}),
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": length},
        "train": train,
    }


TINY_BATCH = (2, 64)
"""Rows and length where `--tiny` stands in for the real batch."""
