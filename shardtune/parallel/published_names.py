"""Names under which other tools publish what is a strategy here.

torch's `ShardingStrategy`, the `fsdp` and `deepspeed` arguments of Hugging Face's Trainer, and
accelerate's numbers for the former. `config/published_words.py` looks for them in a job.
"""

from __future__ import annotations

from collections.abc import Mapping

Settings = dict[str, object]
"""Keys of the section `strategy`."""

SHARDING_KEYS = ("sharding", "sharding_strategy", "fsdp_sharding_strategy")
_NAMES = "one of torch's names, FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD"
STRATEGY_KEYS = {
    **dict.fromkeys(SHARDING_KEYS, f"give {_NAMES}, or write strategy: {{type: fsdp}}"),
    "fsdp": f"give {_NAMES} and offload or auto_wrap, or write strategy: {{type: fsdp}}",
    "deepspeed": "name a .json file, or write strategy: {type: deepspeed, ...} with its keys",
}
"""Keys outside of `strategy` that stand for one, and what to do where their value doesn't."""
STRATEGY_LEADS = {
    "sharding_strategy": "use strategy.sharding: full or hybrid; torch's names, too",
    "distributed_type": "use strategy.type: ddp, fsdp or deepspeed",
    "deepspeed_config": "use strategy: {type: deepspeed, config: FILE}",
    "dist_config": "use the section strategy: {type: fsdp}",
    "fsdp_config": (
        "use strategy: {type: fsdp}; of its keys there are sharding, offload and "
        "reshard_after_forward, and layers are found without being named"
    ),
    "fsdp_version": "leave it out: strategy: {type: fsdp} is FSDP2",
    "fsdp_cpu_offload": "use strategy.offload: cpu, with strategy.type: fsdp",
    "tensor_parallel_size": "use strategy: {type: tensor, degree: N}",
    "tensor_parallel_dim": "use strategy: {type: tensor, degree: N}",
    "dp_shard_size": "use strategy: {type: fsdp, sharding: hybrid}, with replicas",
}
"""Keys of other tools that aren't understood, and what they are called here."""

_ZERO = "write strategy: {{type: deepspeed, zero_optimization: {{stage: {}}}}}"
STRATEGY_VALUES = {
    **{f"zero{stage}": _ZERO.format(stage) for stage in range(4)},
    "fsdp2": "write fsdp, which is FSDP2",
    "tp": "write strategy: {type: tensor, degree: N}",
    "pp": "write strategy: {type: pipeline, stages: N}",
    "ep": "write strategy: {type: expert, degree: N}",
}
"""What people give as the type of a strategy, and how it is written here."""

_KEPT = {"reshard_after_forward": False}
_SHARDING: dict[str, Settings] = {
    "full_shard": {"type": "fsdp", "sharding": "full"},
    "shard_grad_op": {"type": "fsdp", "sharding": "full", **_KEPT},
    "no_shard": {"type": "ddp"},
    "hybrid_shard": {"type": "fsdp", "sharding": "hybrid"},
    "hybrid_shard_zero2": {"type": "fsdp", "sharding": "hybrid", **_KEPT},
}
"""torch's names, in the order in which accelerate numbers them from 1."""


def torch_sharding(given: object) -> Settings | None:
    """What one of torch's names, or accelerate's number for it, is here."""
    if isinstance(given, int) and not isinstance(given, bool):
        names = list(_SHARDING)
        return dict(_SHARDING[names[given - 1]]) if 1 <= given <= len(names) else None
    if not isinstance(given, str):
        return None
    name = given.lower().removeprefix("shardingstrategy.").removeprefix("_")
    return dict(_SHARDING[name]) if name in _SHARDING else None


def published_strategy(key: str, given: object) -> Settings | None:
    """What a key of another tool, outside of `strategy`, is here; None where it can't be told."""
    if key in SHARDING_KEYS:
        return torch_sharding(given)
    if key == "fsdp" and isinstance(given, list):  # as YAML has it: [full_shard, auto_wrap]
        given = " ".join(map(str, given))
    if not isinstance(given, str):
        return None
    if key == "deepspeed":
        return {"type": "deepspeed", "config": given} if given.endswith(".json") else None
    words = given.lower().split()  # Hugging Face: `full_shard auto_wrap`, or `... offload`
    found = [settings for word in words if (settings := torch_sharding(word)) is not None]
    if len(found) != 1 or {*words} - {*_SHARDING, "offload", "auto_wrap"}:
        return None
    if "offload" in words:
        return {**found[0], "offload": "cpu"} if found[0]["type"] == "fsdp" else None
    return found[0]


def sharding_in(section: Mapping[str, object]) -> tuple[str, Settings] | None:
    """The key of a section `strategy` under which one of torch's names stands, and what that is
    here; None where there is none, or where the section is of a type that torch has none for."""
    if section.get("type", "fsdp") != "fsdp":
        return None
    for key in SHARDING_KEYS:
        settings = torch_sharding(section.get(key))
        if settings is not None:
            return key, settings
    return None
