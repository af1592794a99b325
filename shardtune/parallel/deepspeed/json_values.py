"""What a DeepSpeed file decides of a job that doesn't: precision, batch, optimizer, schedule,
trackers.

Tutorials print files with numbers in the place of `"auto"`. Where the job has a value of its own
the two have to agree, which `json_file.py` checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtune.core.files.yaml_document import KeyPath
from shardtune.core.setup import Precision
from shardtune.core.strategy import ToldValue

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

_PLAIN: dict[KeyPath, str] = {
    ("train_batch_size",): "global_batch",
    ("steps_per_print",): "log_every",
    ("optimizer", "params", "lr"): "learning_rate",
    ("scheduler", "params", "warmup_max_lr"): "learning_rate",
    ("scheduler", "params", "warmup_num_steps"): "warmup_steps",
    ("scheduler", "params", "total_num_steps"): "steps",
}
"""Numbers that mean the same in the section `train`."""
_FILES = {"output_path": "directory", "job_name": "name"}
_MONITORS = {
    "tensorboard": ("tensorboard", _FILES),
    "csv_monitor": ("csv", _FILES),
    "wandb": ("wandb", {"project": "project", "team": "entity", "group": "group"}),
}
"""DeepSpeed's monitors: the tracker that each is here, and what its keys are called."""
_OF_OPTIMIZER = {"adamw": ("betas", "eps", "weight_decay"), "sgd": ("momentum", "weight_decay")}


def told_values(
    value: Mapping[str, Any], lines: Mapping[KeyPath, int], name: str, ranks: int
) -> dict[KeyPath, ToldValue]:
    """By the job's key what the file says of it, and in which line. `"auto"` says nothing."""
    found: dict[KeyPath, ToldValue] = {}

    def tell(key: KeyPath, said: object, where: KeyPath) -> None:
        found.setdefault(("train", *key), ToldValue(said, f"{name}:{lines[where]}"))

    for path, key in _PLAIN.items():
        number = at(value, path)
        if _is_number(number):
            tell((key,), _whole(number) if key != "learning_rate" else number, path)
    clipping = value.get("gradient_clipping")
    if _is_number(clipping):
        tell(("max_grad_norm",), clipping or None, ("gradient_clipping",))
    rows, steps = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    if _is_number(value.get(rows)) and _is_number(value.get(steps)):
        tell(("global_batch",), value[rows] * value[steps] * ranks, (steps,))
    if (curve := SCHEDULERS.get(str(at(value, ("scheduler", "type"))))) is not None:
        tell(("schedule",), curve, ("scheduler", "type"))
    if (rule := OPTIMIZERS.get(str(at(value, ("optimizer", "type"))).lower())) is not None:
        tell(("optimizer", "type"), rule, ("optimizer", "type"))
        for key in _OF_OPTIMIZER[rule]:
            where = ("optimizer", "params", key)
            if _is_number(said := at(value, where)) or isinstance(said, list):
                tell(("optimizer", key), said, where)
    if monitors := [block for block in _MONITORS if at(value, (block, "enabled")) is True]:
        trackers = [_tracker(block, value[block]) for block in monitors]
        found["track",] = ToldValue(trackers, f"{name}:{lines[monitors[0],]}")
    return found


def _tracker(block: str, given: Mapping[str, object]) -> dict[str, object]:
    """An item of the job's `track`. DeepSpeed's `""` is its default, as null is ours."""
    kind, names = _MONITORS[block]
    return {"type": kind, **{ours: given[key] for key, ours in names.items() if given.get(key)}}


def file_precision(value: Mapping[str, Any]) -> tuple[Precision, KeyPath] | None:
    """The 16-bit type that is switched on; fp32 where none is, and one is switched off. A file that
    says neither, or leaves one open, leaves it to the job."""
    switches = {
        (block, "enabled"): at(value, (block, "enabled")) for block in ("bf16", "bfloat16", "fp16")
    }
    for path, switch in switches.items():
        if switch is True:
            return ("fp16" if path[0] == "fp16" else "bf16"), path
    off = [path for path, switch in switches.items() if switch is False]
    return ("fp32", off[0]) if off and "auto" not in switches.values() else None


def two_precisions(value: Mapping[str, Any]) -> bool:
    """Whether both 16-bit types are switched on."""
    bf16 = any(at(value, (block, "enabled")) is True for block in ("bf16", "bfloat16"))
    return bf16 and at(value, ("fp16", "enabled")) is True


MISSING = object()


def at(value: Any, path: KeyPath) -> Any:
    """What a file has at a path; MISSING where it has nothing."""
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return MISSING
        value = value[part]
    return value


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number
