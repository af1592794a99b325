"""The tensors of the usual modules, as the families put them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardtune.core.model.weight import HEAD, ModelPart, Weight, WeightKind

Tensors = list[Weight]
"""Of one layer or part; `placed` says which, and how often."""


def linear(
    name: str, outputs: int, inputs: int, *, bias: bool = False, kind: WeightKind = "linear"
) -> Tensors:
    weight = Weight(f"{name}.weight", (outputs, inputs), "root", kind)
    return [weight, *(vector(f"{name}.bias", outputs) if bias else [])]


def norm(name: str, size: int, *, bias: bool = False) -> Tensors:
    found = [Weight(f"{name}.weight", (size,), "root", "norm")]
    if bias:
        found.append(Weight(f"{name}.bias", (size,), "root", "norm"))
    return found


def table(name: str, rows: int, columns: int) -> Tensors:
    return [Weight(f"{name}.weight", (rows, columns), "root", "table")]


def vector(name: str, *shape: int, routed: bool = False) -> Tensors:
    return [Weight(name, shape, "root", "vector", routed=routed)]


def matrix(
    name: str, *shape: int, routed: bool = False, stands_for: tuple[str, ...] = ()
) -> Tensors:
    return [Weight(name, shape, "root", "matrix", routed=routed, stands_for=stands_for)]


def buffer(name: str, *shape: int) -> Tensors:
    return [Weight(name, shape, "root", "buffer")]


def placed(part: ModelPart, times: int, *tensors: Tensors) -> Tensors:
    """The tensors as those of `times` layers of a part; none if there is no such layer."""
    if times == 0:
        return []
    return [replace(weight, part=part, times=times) for weight in _joined(tensors)]


def head(vocab: int, hidden: int, *, tied: bool, bias: bool = False) -> Tensors:
    """The output head; one that is the embedding has no weight of its own."""
    found = placed("head", 1, linear(HEAD, vocab, hidden, bias=bias))
    return [weight for weight in found if not tied or weight.kind != "linear"]


def _joined(groups: Iterable[Tensors]) -> Tensors:
    return [weight for group in groups for weight in group]
