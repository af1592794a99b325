"""The conformance table: every strategy with every kind of adapter, one row each.

A row says what to build. `guarantees.py` says what must hold for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LISTENED = 3  # the step in which collectives are counted
MICRO_BATCH = 2


@dataclass(frozen=True)
class Row:
    """One combination, on real gloo ranks."""

    strategy: str
    settings: dict[str, Any]
    adapter: str
    ranks: int = 2
    needs: str = ""
    """A Python package that this row can't do without."""
    model: str = "tiny"
    """`tiny`, one of `MODELS`, of `MIXTURES`, or a family of `tests/models/encoder_decoder.py`."""
    build: bool = False
    """Swaps to files, for which DeepSpeed compiles a part of itself; with a larger model, because
    shares below 1 MiB stay in memory."""
    refused: str = ""
    """What is told, before any rank is started on a machine without a GPU."""

    @property
    def id(self) -> str:
        return f"{self.strategy}-{self.adapter}"


_COMMON = {"vocab_size": 260, "max_position_embeddings": 128}
MODELS: dict[str, dict[str, Any]] = {
    "wide": _COMMON | {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "deep": _COMMON | {"num_hidden_layers": 6, "tie_word_embeddings": True},
}
"""Llamas of another shape than `tiny`: `wide` has key-value heads for four ranks and a head of its
own, `deep` has layers for many stages."""
MIXTURES: dict[str, dict[str, Any]] = {"qwen3_moe": _COMMON | {"tie_word_embeddings": False}}
"""Mixtures of experts by their family: four experts, of which a token meets two."""

ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({"type": "none"}, "none"),
    "lora": ({"type": "lora", "rank": 4, "alpha": 8}, "none"),
    "ia3": ({"type": "ia3"}, "none"),
    "qlora": ({"type": "lora", "rank": 4, "alpha": 8}, "nf4"),
    "fp8": ({"type": "lora", "rank": 4, "alpha": 8}, "fp8"),
}
"""What an adapter's name in a row's id means: the job's `adapter` and `model.quantization`."""


def _zero(stage: int, **settings: Any) -> dict[str, Any]:
    # By default DeepSpeed keeps small weights whole, and gathered ones as long as there are not
    # too many: the tiny model would never be divided, nor gathered twice.
    kept = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
    nothing = {f"stage3_{key}": 0 for key in kept} if stage == 3 else {}
    return {"type": "deepspeed", "zero_optimization": {"stage": stage, **nothing, **settings}}


_CPU = {"device": "cpu"}
SWAP = "swap"
"""Stands for a folder that is made for a row."""
_NVME = {"device": "nvme", "nvme_path": SWAP}


def _pipeline(stages: int, schedule: str, **settings: Any) -> dict[str, Any]:
    return {"type": "pipeline", "stages": stages, "schedule": schedule, **settings}


STRATEGIES: dict[str, tuple[dict[str, Any], int, str]] = {
    "ddp": ({"type": "ddp"}, 2, ""),
    "fsdp": ({"type": "fsdp"}, 2, ""),
    "fsdp-keep": ({"type": "fsdp", "reshard_after_forward": False}, 2, ""),
    "fsdp-hybrid": ({"type": "fsdp", "sharding": "hybrid", "replicas": 2}, 4, ""),
    "fsdp-offload": ({"type": "fsdp", "offload": "cpu"}, 2, ""),
    "tensor2": ({"type": "tensor", "degree": 2}, 2, ""),
    "tensor4": ({"type": "tensor", "degree": 4}, 4, ""),
    "tensor2-data2": ({"type": "tensor", "degree": 2}, 4, ""),
    "fsdp2-tensor2": ({"type": "fsdp", "tensor": 2}, 4, ""),
    "zero0": (_zero(0), 2, "deepspeed"),
    "zero1": (_zero(1), 2, "deepspeed"),
    "zero2": (_zero(2), 2, "deepspeed"),
    "zero3": (_zero(3), 2, "deepspeed"),
    "zero3-hpz": (_zero(3, zero_hpz_partition_size=2), 4, "deepspeed"),
    "zero2-offload": (_zero(2, offload_optimizer=_CPU), 2, "deepspeed"),
    "zero3-offload": (_zero(3, offload_optimizer=_CPU, offload_param=_CPU), 2, "deepspeed"),
}
"""Settings, ranks and the package needed, by the strategy's name in a row's id."""


def _fits(strategy: str, adapter: str) -> bool:
    """4-bit weights are packed in blocks that no slice respects; `rules.py` refuses them. FP8 has
    rows with mixtures, whose experts it stores."""
    return adapter != "fp8" and not ("tensor" in strategy and adapter == "qlora")


STAGES: dict[str, tuple[dict[str, Any], int, str]] = {
    "layers2": ({"type": "layers", "stages": 2}, 2, "tiny"),
    "pipeline2-gpipe": (_pipeline(2, "gpipe"), 2, "tiny"),
    "pipeline2-1f1b": (_pipeline(2, "1f1b"), 2, "tiny"),
    "pipeline2-interleaved": (_pipeline(2, "interleaved"), 2, "deep"),
    "pipeline2-zero-bubble": (_pipeline(2, "zero_bubble"), 2, "deep"),
    "pipeline4": (_pipeline(4, "1f1b"), 4, "deep"),
    "pipeline2-data2": (_pipeline(2, "1f1b"), 4, "tiny"),
    "pipeline2-tensor2": (_pipeline(2, "1f1b", tensor=2), 4, "tiny"),
    "fsdp2-pipeline2": ({"type": "fsdp", "pipeline": 2}, 4, "tiny"),
    "pipeline2-tensor2-data2": (_pipeline(2, "1f1b", tensor=2), 8, "tiny"),
    "fsdp2-pipeline2-tensor2": ({"type": "fsdp", "pipeline": 2, "tensor": 2}, 8, "tiny"),
}
"""Settings, ranks and the model of strategies that cut it into stages."""

BOTH_HALVES = ("ddp", "fsdp", "fsdp-hybrid", "zero1", "zero2", "zero3", "zero3-offload")
"""Strategies with models that have an encoder and a decoder."""

EXPERTS: dict[str, tuple[dict[str, Any], int]] = {
    "expert2": ({"type": "expert", "degree": 2}, 2),
    "expert2-data2": ({"type": "expert", "degree": 2}, 4),
    "fsdp1-expert2": ({"type": "fsdp", "expert": 2}, 2),
    "fsdp2-expert2": ({"type": "fsdp", "expert": 2}, 4),
    "fsdp2-expert4": ({"type": "fsdp", "expert": 4}, 8),
}
"""Settings and ranks of strategies that divide experts."""
WITH_EXPERTS = ("ddp", "fsdp", "fsdp-hybrid", "zero1", "zero2", "zero3")
EXPERTS_IN_FP8 = {"ddp": STRATEGIES["ddp"][:2]} | {
    name: EXPERTS[name] for name in ("expert2", "expert2-data2")
}
"""Strategies whose ranks have whole matrices, be it of some experts."""
STAGED_EXPERTS = ("layers2", "pipeline2-1f1b", "fsdp2-pipeline2")
"""Strategies with mixtures of experts."""

SWAPPED = _zero(
    3,
    offload_optimizer={**_NVME, "buffer_count": 5},
    offload_param={**_NVME, "buffer_count": 12, "buffer_size": 300_000, "max_in_cpu": 0},
)
NO_BYTES = "DeepSpeed reads their packed bytes back as numbers in the model's dtype"
GPU_ONLY = "DeepSpeed's quantized collectives are written for GPUs, and there is none here"
REFUSED: dict[str, dict[str, Any]] = {
    "zero3-qwz": _zero(3, zero_quantized_weights=True),
    "zero3-qgz": _zero(3, zero_quantized_gradients=True),
}
"""Settings of what can't be done on a CPU."""

ROWS: tuple[Row, ...] = (
    *(
        Row(name, settings, adapter, ranks, needs, "wide" if name == "tensor4" else "tiny")
        for name, (settings, ranks, needs) in STRATEGIES.items()
        for adapter in ADAPTERS
        if _fits(name, adapter)
    ),
    *(
        Row(name, settings, adapter, ranks, model=model)
        for name, (settings, ranks, model) in STAGES.items()
        for adapter in ("full", "lora")
    ),
    *(
        Row(f"zero{stage}-allreduce", _zero(stage, reduce_scatter=False), "full", 2, "deepspeed")
        for stage in (1, 2, 3)
    ),
    *(
        Row(f"{family}-{name}", *STRATEGIES[name][:1], adapter, *STRATEGIES[name][1:], family)
        for family in ("flan_t5", "bart")
        for name in BOTH_HALVES
        for adapter in ("full", "lora")
    ),
    *(
        Row(f"moe-{name}", *STRATEGIES[name][:1], adapter, *STRATEGIES[name][1:], model=family)
        for family in MIXTURES
        for name in WITH_EXPERTS
        for adapter in ("full", "lora", "qlora")
    ),
    *(
        Row(f"moe-{name}", settings, adapter, ranks, model=family)
        for family in MIXTURES
        for name, (settings, ranks) in EXPERTS.items()
        for adapter in ("full", "lora", "qlora")
    ),
    *(
        Row(f"moe-{name}", settings, "fp8", ranks, model=family)
        for family in MIXTURES
        for name, (settings, ranks) in EXPERTS_IN_FP8.items()
    ),
    *(
        Row(f"moe-{name}", *STAGES[name][:1], adapter, STAGES[name][1], model=family)
        for family in MIXTURES
        for name in STAGED_EXPERTS
        for adapter in ("full", "lora", "qlora")
    ),
    *(
        Row("zero3-nvme", SWAPPED, adapter, 2, "deepspeed", build=True)
        for adapter in ("full", "lora", "ia3")
    ),
    Row("zero3-nvme", SWAPPED, "qlora", refused=NO_BYTES),
    *(
        Row(name, settings, adapter, refused=GPU_ONLY)
        for name, settings in REFUSED.items()
        for adapter in ADAPTERS
        if _fits(name, adapter)
    ),
)
