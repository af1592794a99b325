"""The keys that a DeepSpeed JSON file may have, and what becomes of each here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from shardtune.parallel.deepspeed.deepspeed_fields import (
    AsyncIO,
    LossScale,
    OffloadOptimizer,
    OffloadParam,
    ZeRO,
)

Known = Mapping[str, Any]
"""Keys of a section: None for a plain value, a mapping for a section, the reason to refuse, or the
reason to leave it out."""


@dataclass(frozen=True)
class LeftOutKey:
    """Why a key has no effect here, and what there is instead. A run goes on without it."""

    reason: str


_OURS = "shardtune does this itself"
_IDLE = "no model of transformers uses it"
_COMET = LeftOutKey(
    "shardtune sends nothing to it; `track:` takes tensorboard, wandb, mlflow, trackio and csv"
)
_FILE_MONITOR = dict.fromkeys(("enabled", "output_path", "job_name"))
_ACTIVATIONS = LeftOutKey(
    "it acts on models that call DeepSpeed's own checkpointing, which those of transformers don't; "
    "`train.gradient_checkpointing: full` saves activation memory"
)
_OWN_FILES = LeftOutKey("it is about DeepSpeed's own checkpoints, which are not written here")


def _keys(model: type[BaseModel], **more: Any) -> dict[str, Any]:
    return dict.fromkeys(model.model_fields) | more


def _zero_keys() -> dict[str, Any]:
    return _keys(
        ZeRO,
        offload_optimizer=_keys(OffloadOptimizer),
        offload_param=_keys(OffloadParam),
        elastic_checkpoint=_OWN_FILES,
        load_from_fp32_weights=_OWN_FILES,
        legacy_stage1="DeepSpeed has removed it",
        zenflow="it applies updates late, so the result is another one",
        compute_grad_norm=LeftOutKey("shardtune reports the norm in every step"),
    )


_OPTIMIZER_KEYS = {
    "type": None,
    "params": dict.fromkeys(
        ("lr", "betas", "eps", "momentum", "weight_decay", "torch_adam", "adam_w_mode")
    ),
}
_SCHEDULER_KEYS = {
    "type": None,
    "params": dict.fromkeys(
        (
            "warmup_min_lr",
            "warmup_max_lr",
            "warmup_num_steps",
            "total_num_steps",
            "warmup_type",
            "warmup_min_ratio",
            "cos_min_ratio",
        )
    ),
}
_CHECKPOINTING_KEYS = dict.fromkeys(
    (
        "partition_activations",
        "cpu_checkpointing",
        "contiguous_memory_optimization",
        "number_checkpoints",
        "synchronize_checkpoint_boundary",
        "profile",
    ),
    _ACTIVATIONS,
)

KNOWN: dict[str, Any] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "gradient_clipping": None,
    "steps_per_print": None,
    "wall_clock_breakdown": None,
    "communication_data_type": None,
    "prescale_gradients": None,
    "gradient_predivide_factor": None,
    "zero_allow_untested_optimizer": None,
    "zero_force_ds_cpu_optimizer": None,
    "bf16": {"enabled": None},
    "bfloat16": {"enabled": None},
    "fp16": _keys(LossScale, enabled=None),
    "optimizer": _OPTIMIZER_KEYS,
    "scheduler": _SCHEDULER_KEYS,
    "activation_checkpointing": _CHECKPOINTING_KEYS,
    "zero_optimization": _zero_keys(),
    "aio": _keys(AsyncIO),
    "tensorboard": _FILE_MONITOR,
    "csv_monitor": _FILE_MONITOR,
    "wandb": dict.fromkeys(("enabled", "group", "team", "project")),
    # Known to DeepSpeed, but not to be had through such a file here:
    "comet": _COMET,
    "checkpoint": _OWN_FILES,
    "elasticity": f"{_OURS}: a run resumes on any number of ranks",
    "autotuning": f"{_OURS}: `shardtune plan`",
    "data_types": {"grad_accum_dtype": None},
    "amp": "it needs apex; use `bf16` or `fp16`",
    "torch_autocast": "weights are computed with in train.precision; use `bf16` or `fp16`",
    "flops_profiler": LeftOutKey("`shardtune estimate` counts the operations of a step"),
    "comms_logger": LeftOutKey("`shardtune estimate` says what a step sends"),
    "compression_training": "it trains another model than the one declared",
    "data_efficiency": "it trains on other data than the job's",
    "curriculum_learning": "it trains on other data than the job's",
    "sparse_gradients": _IDLE,
    "sparse_attention": _IDLE,
    "hybrid_engine": _IDLE,
    "compile": LeftOutKey(
        "DeepSpeed runs layers as transformers writes them here; `strategy: {type: fsdp}` and "
        "`{type: ddp}` compile them on a GPU (train.kernels)"
    ),
    "tensor_parallel": "not supported yet",
    "gradient_allreduce_op": "gradients are averaged here",
    "managed_gradient_accumulation": "shardtune decides where a step ends",
    "dump_state": LeftOutKey("it prints DeepSpeed's settings; `shardtune show` prints the job's"),
}
NOT_FIELDS = {
    "steps_per_print",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "optimizer",
    "scheduler",
    "activation_checkpointing",
    "data_types",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "bf16",
    "bfloat16",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
}
"""Keys that are checked, and don't become fields."""


def _cpu(asked: Any) -> dict[str, str]:
    return {"device": "cpu"} if asked is True else {}


OLD_NAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{
        key.removeprefix("stage3_"): (key, lambda given: given)
        for key in ZeRO.model_fields
        if key.startswith("stage3_")
    },
    "stage3_gather_fp16_weights_on_model_save": (
        "stage3_gather_16bit_weights_on_model_save",
        lambda given: given,
    ),
    "cpu_offload": ("offload_optimizer", _cpu),
    "cpu_offload_param": ("offload_param", _cpu),
    "cpu_offload_params": ("offload_param", _cpu),
}
"""Keys of `zero_optimization` that DeepSpeed takes under another name, too, or once took: the name
that they have here, and what the value is under it."""


def switched_off(block: Any) -> bool:
    """Whether a block does nothing: `false`, nothing at all, or one that isn't enabled. Hugging
    Face's `auto` is the Trainer's to switch on, which isn't here."""
    if isinstance(block, Mapping):
        return block.get("enabled") in (False, "auto") or block.get("disable") is True
    return not block


def section_of(key: str) -> str:
    """The section that a key belongs to, `.` for the top, or nothing."""
    if key in KNOWN:
        return "."
    for section, known in KNOWN.items():
        if isinstance(known, Mapping):
            if key in known:
                return repr(section)
            for inner, deeper in known.items():
                if isinstance(deeper, Mapping) and key in deeper:
                    return repr(f"{section}.{inner}")
    return ""
