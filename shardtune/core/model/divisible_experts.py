"""Experts that ranks can have some of each, and those that can only stay together.

transformers marks modules that hold all experts of a layer and are told which of them each token
has chosen (`use_experts_implementation`). Families with code of their own there have no such mark.
"""

from __future__ import annotations

from typing import Any

from shardtune.errors import ModelError, Problem


def has_divisible_experts(module: Any) -> bool:
    """Whether a module holds the experts of a layer so that ranks can divide them."""
    return hasattr(module, "has_gate") and hasattr(module, "num_experts")


def require_divisible_experts(model: Any, family: str, count: int, ranks: int) -> None:
    """Refuses a model of whose experts each of `ranks` would have to keep all, or some layers' all.
    `count` is how many a layer has."""
    inside: set[Any] = set()
    divided, whole = 0, []
    for module in model.modules():  # parents come before their children
        if module in inside:
            continue
        if has_divisible_experts(module):
            inside.update(module.modules())
            if all(len(each) == module.num_experts for each in module.parameters()):
                divided += 1
            else:  # Muse Spark's have a norm that all of them share
                whole.append(type(module).__name__)
        elif isinstance(getattr(module, "num_experts", None), int) and any(
            each.ndim == 3 for each in module.parameters(recurse=False)
        ):
            whole.append(type(module).__name__)
    if divided and not whole:
        return
    kept = f"{divided} of {divided + len(whole)} modules of experts" if whole else "no module"
    named = f" ({', '.join(sorted(set(whole)))} can't)" if whole else ""
    fact = (
        f"expert({ranks}) can't divide the {count} experts of a layer of {family!r}: {kept} in "
        f"transformers' code of this family can be divided{named}"
    )
    fix = "leave expert parallelism out: use a strategy that shards all weights alike"
    raise ModelError(Problem("strategy", fact, fix))
