"""What `benchmarks.gpu` measures: the rows of its table, our settings for each, and the peers. Jobs
drawn at random are in `gpu_sample.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shardtune.core.model.family_support import FAMILY_SUPPORT, AttentionImplementation
from shardtune.core.model.known_models import find_model

Sections = dict[str, Any]
"""Sections of a job file, by their names."""

NF4: Sections = {"quantization": "nf4"}
FULL: Sections = {"gradient_checkpointing": "full"}
FP8: dict[str, Sections] = {"shardtune": {"model": {"quantization": "fp8"}}}
WIDE: Sections = {"gradient_checkpointing": "mlp"}
PAGED: Sections = {"optimizer": {"type": "adamw", "paged": True}}
COMMAND = "shardtune train"
"""The name of the method that is the command itself, on files, with a job's defaults."""
LEAST_BUT_EXPERTS: Sections = {"gradient_checkpointing": "most"}
LEAST: Sections = {"gradient_checkpointing": "most", "offload_activations": True}

SHORT_ROWS: dict[str, tuple[Literal["1B", "8B"], Literal["bf16", "nf4"], int, int]] = {
    f"{size} {base} {rows}x{length}": (size, base, rows, length)
    for size, base in (("1B", "bf16"), ("8B", "bf16"), ("8B", "nf4"))
    for rows, length in ((1, 512), (1, 1024), (2, 1024), (4, 1024))
}
"""Steps of few tokens, by the names of their rows: LoRA on a model of that size."""

FAMILY_ROWS: dict[str, str] = {
    f"{model.partition('/')[2] or model} 8x2048": model
    for model in (
        "mistralai/Mistral-7B-v0.1",
        "Qwen/Qwen3-8B",
        "google/gemma-2-2b",
        "gemma-3-4b-text",
        "microsoft/Phi-3-mini-4k-instruct",
        "ibm-granite/granite-3.1-8b-base",
        "allenai/OLMo-2-1124-7B",
        "HuggingFaceTB/SmolLM3-3B",
        "tiiuae/falcon-7b",
        "EleutherAI/pythia-6.9b",
        "bigcode/starcoder2-7b",
    )
}
"""Other families than Llama, by the names of their rows: LoRA with 16,384 tokens a step."""
WITHOUT_LIGER = frozenset({"falcon", "gpt_neox", "starcoder2"})
"""Families that Liger doesn't know."""
MIXTURE_ROWS: dict[str, str] = {
    "Qwen3-30B-A3B 8x2048": "Qwen/Qwen3-30B-A3B",
    "gpt-oss-20b 8x2048": "openai/gpt-oss-20b",
    "OLMoE-1B-7B all 8x2048": "allenai/OLMoE-1B-7B-0924",
}
"""Mixtures of experts, by the names of their rows: 16,384 tokens a step through the real router;
LoRA has the experts among its layers."""
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")

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
    "Qwen3-30B-A3B 8x2048": {"shardtune": {"train": LEAST_BUT_EXPERTS}},
    "gpt-oss-20b 8x2048": {"shardtune": {}},
    "OLMoE-1B-7B all 8x2048": {"shardtune": {}},
    **{
        name: {"shardtune": {}}
        for name in (
            *SHORT_ROWS,
            *FAMILY_ROWS,
            *("DoRA 8x2048", "attention only 8x2048", "MLP only 8x2048"),
            *("0.5B all 8x2048", "3B all 8x2048", "1B all 1x1024"),
        )
    },
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
    variant: Literal["plain", "dora"] = "plain"
    targets: tuple[str, ...] = ()
    """Layers with an adapter; all linear ones where none is named."""
    level: Literal["none", "most"] = "none"
    """Of activation checkpointing: `most` of ours, the whole layer with peers."""

    @property
    def adapter(self) -> Sections:
        """What a job says of it."""
        if not self.lora:
            return {"type": "none"}
        found: Sections = {"type": "lora", "rank": self.rank, "dropout": self.dropout}
        if self.variant != "plain":
            found["variant"] = self.variant
        if self.targets:
            found["targets"] = list(self.targets)
        return found

    @property
    def family(self) -> str:
        """As transformers calls it: `model_type`."""
        return str(find_model(self.model).config["model_type"])

    @property
    def attention(self) -> AttentionImplementation:
        """What transformers computes its attention with, unless another is asked for."""
        return FAMILY_SUPPORT[self.family].best_attention

    @property
    def ours(self) -> dict[str, Sections]:
        """Our methods, each with what its job says beyond the row."""
        return OURS.get(self.name, {"shardtune": {}})


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
    own_loss: bool = False
    """Transformers' loss in place of Liger's."""
    checkpointing: bool = False
    budget: float | None = None
    """torch's share of activations to keep, of what a compiled layer would."""
    fp32_adapters: bool = False
    """Adapters in fp32 under autocast, as TRL and peft have them by default."""
    padded: bool = False
    """Documents in rows of their own, padded to the longest of the micro-batch."""
    attention: str = "sdpa"
    """What transformers is asked for."""
    experts: str = ""
    """How transformers multiplies experts (`experts_implementation`), where it is told."""

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
    "compile": Peer(compiled=True, own_loss=True),
    "compile + Liger loss": Peer(needs=LIGER, compiled=True),
    "compile + Liger loss, FlashAttention 4": Peer(compiled=True, **FLASH),
    "compile + Liger loss, budget 0.3, FlashAttention 4": Peer(compiled=True, budget=0.3, **FLASH),
    "compile + Liger loss, checkpointing": Peer(needs=LIGER, compiled=True, checkpointing=True),
    "compile + Liger loss, budget 0.3": Peer(needs=LIGER, compiled=True, budget=0.3),
    "compile, checkpointing": Peer(compiled=True, own_loss=True, checkpointing=True),
    "torchtune + compile": Peer("torchtune", needs=TUNE, compiled=True),
    "Unsloth": Peer("unsloth", needs=UNSLOTH, checkpointing=True),
    "HF, padded": Peer(padded=True),
    "HF, grouped experts": Peer(experts="grouped_mm"),
    "HF, grouped experts, checkpointing": Peer(experts="grouped_mm", checkpointing=True),
    "HF, batched experts, checkpointing": Peer(experts="batched_mm", checkpointing=True),
    "Liger, grouped experts, checkpointing": Peer(
        needs=LIGER, liger=True, experts="grouped_mm", checkpointing=True
    ),
    "compile, grouped experts": Peer(compiled=True, own_loss=True, experts="grouped_mm"),
    "compile + Liger loss, grouped experts, checkpointing": Peer(
        needs=LIGER, compiled=True, experts="grouped_mm", checkpointing=True
    ),
    "HF, grouped experts, FlexAttention, checkpointing": Peer(
        experts="grouped_mm", checkpointing=True, attention="flex_attention"
    ),
    "Liger, grouped experts, FlexAttention, checkpointing": Peer(
        needs=LIGER,
        liger=True,
        experts="grouped_mm",
        checkpointing=True,
        attention="flex_attention",
    ),
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
MIXTURE = (
    "HF, grouped experts, checkpointing",
    "HF, batched experts, checkpointing",
    "Liger, grouped experts, checkpointing",
    "compile + Liger loss, grouped experts, checkpointing",
)
FLEX_MIXTURE = (
    "Liger, grouped experts, checkpointing",
    "HF, grouped experts, FlexAttention, checkpointing",
    "Liger, grouped experts, FlexAttention, checkpointing",
)
WHOLE_MIXTURE = (
    "HF, grouped experts",
    "HF, grouped experts, checkpointing",
    "compile, grouped experts",
)
LARGE, HUGE, SMALL = (f"meta-llama/Llama-{size}" for size in ("3.1-8B", "3.1-70B", "3.2-1B"))


def _short(
    name: str, size: Literal["1B", "8B"], base: Literal["bf16", "nf4"], rows: int, length: int
) -> Case:
    model = {"1B": SMALL, "8B": LARGE}[size]
    peers = FAST[1:4] if base == "bf16" else ("Liger",)
    asked = 1.2 if rows * length == 1024 else 1.05
    return Case(name, model, rows, length, peers, base=base, asked=asked)


def _family(name: str, model: str) -> Case:
    family = str(find_model(model).config["model_type"])
    if family in WITHOUT_LIGER:
        peers: tuple[str, ...] = ("HF", "compile")
    elif family == "granite":  # Liger has no fused loss for it
        peers = ("Liger", "compile")
    elif FAMILY_SUPPORT[family].best_attention == "eager":
        peers = FAST[1:3]
    else:
        peers = FAST[1:4]
    return Case(name, model, 8, 2048, peers, asked=1.05)


def _mixtures() -> Iterator[Case]:
    """Liger doesn't know OLMoE."""
    qwen, gpt_oss, olmoe = MIXTURE_ROWS.items()
    yield Case(*qwen, 8, 2048, MIXTURE, asked=1.5, memory=75)
    yield Case(*gpt_oss, 8, 2048, FLEX_MIXTURE, asked=1.3)
    whole = (
        "HF, grouped experts",
        "HF, grouped experts, checkpointing",
        "compile, grouped experts",
    )
    yield Case(*olmoe, 8, 2048, whole, lora=False, asked=1.05)


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
        *(_family(*row) for row in FAMILY_ROWS.items()),
        Case("DoRA 8x2048", LARGE, 8, 2048, FAST[1:3], variant="dora", asked=1.05),
        Case("attention only 8x2048", LARGE, 8, 2048, FAST[1:4], targets=ATTENTION, asked=1.05),
        Case("MLP only 8x2048", LARGE, 8, 2048, FAST[1:4], targets=MLP, asked=1.05),
        Case("0.5B all 8x2048", "Qwen/Qwen2.5-0.5B", 8, 2048, FAST[1:4], lora=False),
        Case("3B all 8x2048", "meta-llama/Llama-3.2-3B", 8, 2048, FAST[1:4], lora=False),
        Case("1B all 1x1024", SMALL, 1, 1024, FAST[1:3], lora=False, asked=1.05),
        *_mixtures(),
    )
}


def chosen(rows: list[str], methods: list[str]) -> Iterator[tuple[Case, str]]:
    """Rows and methods of which any of the words is a part; all where there are no words."""
    for case in CASES.values():
        for method in (*case.peers, *case.ours):
            if _has(case.name, rows) and _has(method, methods):
                yield case, method


def _has(name: str, words: list[str]) -> bool:
    return not words or any(word.lower() in name.lower() for word in words)


def our_job(case: Case, method: str, *, tiny: bool = False) -> Sections:
    """The job of one of our methods, as a job file would have it."""
    extra = case.ours[method]
    rows, length = (case.rows, case.length) if not tiny else TINY_BATCH
    train = {"micro_batch": rows, "global_batch": rows} | DEFAULTS | extra.get("train", {})
    if case.level != "none":
        train["gradient_checkpointing"] = case.level
    if tiny:
        train["kernels"] = "eager"
    return {
        "launch": {"processes": 1},
        "adapter": case.adapter,
        **extra,
        "model": {"name": case.model}
        | ({"attention": case.attention} if case.attention != "sdpa" else {})
        | (NF4 if case.base == "nf4" else {})
        | extra.get("model", {}),
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": length},
        "train": train,
    }


TINY_BATCH = (2, 64)
"""Rows and length where `--tiny` stands in for the real batch."""
TINY_SIZES: Sections = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
"""Of a toy, where `--tiny` stands in for the real model."""
TINY_EXPERTS: Sections = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""The same of a mixture, where its configuration has them."""
