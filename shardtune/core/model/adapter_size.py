"""How many parameters an adapter trains (LoRA, DoRA, IA3), counted from a model's shape."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from shardtune.core.model.architectures.ia3 import ia3_modules
from shardtune.core.model.shape import ModelShape
from shardtune.core.model.weight import HEAD, Weight
from shardtune.errors import ModelError, Problem, did_you_mean

RANK_MULTIPLE = 8
"""Ranks beside experts are filled up with zeros to a multiple of it: GPUs read 16 bytes at once."""


def lora_parameters(
    shape: ModelShape,
    rank: int,
    targets: Literal["all-linear"] | Collection[str] = "all-linear",
    *,
    dora: bool = False,
    modules_to_save: Collection[str] = (),
    expert_rank: int = 0,
) -> int:
    """What LoRA trains: `rank` rows and columns beside each target, with DoRA its lengths too,
    `expert_rank` of them beside each expert, and whole modules where asked."""
    found = targeted(shape, targets, experts=expert_rank > 0)
    count = sum(
        (expert_rank if weight.routed else rank) * weight.lora_rows * weight.times
        for weight in found
    )
    if dora:
        count += sum(weight.features[0] * weight.times for weight in found)
    return count + _saved(shape, modules_to_save)


def require_plain_experts(adapted: bool, dropout: float, variant: str) -> None:
    """Refuses what LoRA can't do where experts are `adapted`: peft adds the correction to their
    whole tensors, before it sees an input."""
    problems = []
    fix = "or adapter.experts: none"
    if adapted and dropout:
        fact = f"is {dropout}, but experts are adapted as whole tensors, without an input to drop"
        problems.append(Problem("adapter.dropout", fact, f"set adapter.dropout: 0, {fix}"))
    if adapted and variant not in ("plain", "rslora"):
        fact = f"is {variant}, but experts are adapted as whole tensors, which it can't do"
        problems.append(
            Problem("adapter.variant", fact, f"set adapter.variant: plain or rslora, {fix}")
        )
    if problems:
        raise ModelError(problems)


def ia3_parameters(
    shape: ModelShape,
    targets: Literal["auto"] | Collection[str] = "auto",
    feedforward: Literal["auto"] | Collection[str] = "auto",
) -> int:
    """What IA3 trains: a factor for each output of a target, or each input of a feedforward."""
    chosen, inputs = ia3_modules(shape, targets, feedforward)
    return sum(
        weight.times * weight.shape[1 if _called(weight.module, inputs) else 0]
        for weight in scaled(shape, chosen)
    )


def scaled(shape: ModelShape, targets: Collection[str]) -> tuple[Weight, ...]:
    """What IA3 has factors on; experts that share a name with modules don't matter to it."""
    _check(shape, "adapter.targets", "linear layer", targets, [w.module for w in shape.linears])
    return tuple(weight for weight in shape.linears if _called(weight.module, targets))


def targeted(
    shape: ModelShape,
    targets: Literal["all-linear"] | Collection[str],
    *,
    experts: bool = False,
) -> tuple[Weight, ...]:
    """What LoRA adapts where it is told `targets`; `all-linear` is all but the output head, and
    routed experts where `experts` says so.

    Where experts bear the names of modules that older models had, peft takes such a name for
    the experts alone: an MLP without experts that has a module of this name stays as it is.
    """
    taken = {name for weight in shape.weights for name in weight.stands_for}
    linears = [
        weight for weight in shape.weights if weight.linear and _last(weight.module) not in taken
    ]
    if targets == "all-linear":
        found = [weight for weight in linears if weight.part != "head"]
    else:
        known = [weight.module for weight in linears]
        _check(shape, "adapter.targets", "linear layer", targets, known)
        found = [weight for weight in linears if _called(weight.module, targets)]
    if experts:
        found += [weight for weight in shape.weights if weight.routed and weight.kind == "matrix"]
    return tuple(found)


def _saved(shape: ModelShape, names: Collection[str]) -> int:
    if not names:  # every forecast of an adapter asks
        return 0
    _check(shape, "adapter.modules_to_save", "module", names, _modules(shape))
    head_is_table = shape.tied and _called(HEAD, names)
    return shape.count(
        lambda weight: (
            weight.parameter
            and (
                any(_called(module, names) for module in _enclosing(weight.module))
                or (head_is_table and weight is shape.token_table)
            )
        )
    )


def _modules(shape: ModelShape) -> list[str]:
    found = [module for weight in shape.weights for module in _enclosing(weight.module)]
    return list(dict.fromkeys([*found, HEAD]))


def _check(
    shape: ModelShape, key: str, what: str, wanted: Collection[str], modules: Iterable[str]
) -> None:
    """Refuses names that the model doesn't have."""
    known = dict.fromkeys(map(_last, modules))
    problems = []
    for index, name in enumerate(wanted):
        if not any(_called(module, (name,)) for module in modules):
            near = did_you_mean(name, known)
            fix = f"did you mean {near!r}?" if near else f"choose among {', '.join(known)}"
            fact = f"{shape.name} has no {what} {name!r}"
            problems.append(Problem(f"{key}.{index}", fact, fix))
    if problems:
        raise ModelError(problems)


def _called(module: str, names: Collection[str]) -> bool:
    """A module is meant by its whole name or by the last parts of it."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _enclosing(module: str) -> list[str]:
    """The module and those that it lies in: `mlp.up_proj` and `mlp`."""
    parts = module.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]
