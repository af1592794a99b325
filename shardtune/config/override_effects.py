"""What an override (`key=value`) means for other keys of the file: the later word wins.

Who tries a recipe for 3 steps doesn't want to hear that it saves every 12, and who sets
`adapter.type=none` means that nothing of the file's LoRA is left; nor of words behind the command
for a `type` that a later word replaces. Where both stand in the file, or both behind the command,
nothing is decided here: that is a mistake, which the rules name.
"""

from __future__ import annotations

from typing import Any

from shardtune.config.job_keys import sections_at, type_of
from shardtune.core.files.yaml_document import KeyPath, dotted

_TYPED: tuple[KeyPath, ...] = (("adapter",), ("launch",), ("strategy",), ("train", "optimizer"))


def apply_override_effects(
    value: dict[str, Any], origins: dict[KeyPath, str], command_line: str
) -> dict[KeyPath, str]:
    """Changes `value` and `origins` where an override makes a key of the file void; the reasons."""
    reasons: dict[KeyPath, str] = {}
    for path in _TYPED:
        reasons |= _other_type(value, origins, command_line, path)
    reasons |= _other_length(value, origins, command_line)
    reasons |= _shorter(value, origins, command_line)
    return reasons


def _other_type(
    value: dict[str, Any], origins: dict[KeyPath, str], command_line: str, path: KeyPath
) -> dict[KeyPath, str]:
    """Keys that were written for one `type`, where the command line then chose another."""
    section: Any = value
    for part in path:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict) or origins.get((*path, "type")) != command_line:
        return {}
    kinds = {type_of(model): model for model in sections_at(path)}
    chosen = kinds.get(section["type"])
    if chosen is None:
        return {}
    known = {key for model in kinds.values() for key in model.model_fields}
    foreign = [
        key
        for key in section
        if key in known - chosen.model_fields.keys() and origins.get((*path, key)) != command_line
    ]
    earlier = any(origins.get((*path, key), "").startswith(command_line) for key in foreign)
    whose = "the earlier" if earlier else "the file's"
    for key in foreign:
        del section[key]
        for old in [old for old in origins if old[: len(path) + 1] == (*path, key)]:
            del origins[old]
    if not foreign:
        return {}
    return {(*path, "type"): f"{whose} {', '.join(foreign)} belong to another type: left out"}


def _other_length(
    value: dict[str, Any], origins: dict[KeyPath, str], command_line: str
) -> dict[KeyPath, str]:
    """`train.steps` on the command line and `train.epochs` in the file, or the other way round."""
    train = value.get("train")
    if not isinstance(train, dict):
        return {}
    for mine, theirs in (("steps", "epochs"), ("epochs", "steps"), *_WARMUPS):
        told = origins.get(("train", mine)) == command_line and train.get(mine) is not None
        if told and train.get(theirs) is not None and origins[("train", theirs)] != command_line:
            given = train.pop(theirs)
            origins.pop(("train", theirs))
            return {("train", mine): f"in the place of the file's {theirs}: {given}"}
    return {}


_WARMUPS = (("warmup_steps", "warmup_ratio"), ("warmup_ratio", "warmup_steps"))


def _shorter(
    value: dict[str, Any], origins: dict[KeyPath, str], command_line: str
) -> dict[KeyPath, str]:
    """A run that the command line makes shorter than what the file plans for it."""
    train = value.get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    if type(steps) is not int or origins.get(("train", "steps")) != command_line:
        return {}
    reasons: dict[KeyPath, str] = {}
    for path, most, new in (
        (("train", "warmup_steps"), steps - 1, max(0, steps - 1)),
        (("save", "every"), steps, 0),
    ):
        section, key = value.get(path[0]), path[1]
        given = section.get(key) if isinstance(section, dict) else None
        if type(given) is int and given > most and origins.get(path) != command_line:
            assert isinstance(section, dict)
            section[key] = new
            origins[path] = command_line
            what = "one checkpoint, at the end" if key == "every" else "less warmup"
            reasons[path] = f"{dotted(path)} is {given} in the file, this run has {steps}: {what}"
    return reasons
