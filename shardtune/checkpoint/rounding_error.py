"""Rounding error of a forward pass: how far may the logits of two equal models be apart?

A number that is rounded to a dtype is off by at most its unit roundoff `u` (half of `eps`), times
its size; in a sum of `n` products the errors add up to about `sqrt(n) u` (Higham and Mary, 2019).
That is theory. What a model makes of it, no formula says: a bound through all its layers would
be astronomical. So it is measured: the model computes in fp32 while every weight, or the result of
every module, is moved by the largest error that theory allows, up or down by chance. The bound is
`SAFETY` times as far as the logits went.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SAFETY = 2.0
"""Two computations are compared, and both round."""

ModelCalls = Sequence[dict[str, Any]]
"""What a model is called with, one call after the other."""


@dataclass(frozen=True)
class Rounding:
    """What is rounded, and to what; None where nothing is."""

    weights: torch.dtype | None = None
    """What weights were written in."""
    results: torch.dtype | None = None
    """What is computed in. Products are added up in fp32 in any case."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


@torch.no_grad()
def fp32_logits(model: nn.Module, inputs: ModelCalls) -> Tensor:
    """All logits of `inputs`, computed in fp32 whatever the weights are held in, one row a token.

    A module's weights are widened while it computes: a model of 16 bits is never held in 32.
    """
    with _through(model, _widen), torch.compiler.set_stance("force_eager"):
        return _logits(model, inputs)


@torch.no_grad()
def rounded_logits(model: nn.Module, inputs: ModelCalls, dtype: torch.dtype) -> Tensor:
    """`fp32_logits` of the same model with all its weights rounded to `dtype`. It keeps its own."""

    def rounded(weight: Tensor) -> Tensor:
        return weight.to(dtype).float() if weight.is_floating_point() else weight

    with _through(model, rounded), torch.compiler.set_stance("force_eager"):
        return _logits(model, inputs)


@torch.no_grad()
def rounding_bound(
    model: nn.Module, inputs: ModelCalls, exact: Tensor, rounding: Rounding
) -> float:
    """How far logits may be from `exact`, those in fp32, by this rounding alone."""
    draw = torch.Generator().manual_seed(0)

    def move_weight(weight: Tensor) -> Tensor:
        wide = _widen(weight)
        return wide if rounding.weights is None else _moved(wide, rounding.weights, 1, draw)

    def move_result(result: Tensor) -> Tensor:
        if rounding.results is None or not result.is_floating_point():
            return result
        terms = _longest_sum(model) if rounding.results == torch.float32 else 1
        return _moved(result, rounding.results, math.sqrt(terms), draw)

    with _through(model, move_weight, move_result), torch.compiler.set_stance("force_eager"):
        return SAFETY * (_logits(model, inputs) - exact).abs().max().item()


def _moved(value: Tensor, dtype: torch.dtype, times: float, draw: torch.Generator) -> Tensor:
    """Each number off by the largest rounding error, up or down by chance."""
    signs = torch.randint(0, 2, value.shape, generator=draw, dtype=torch.int8).to(value.device)
    kinds = torch.finfo(dtype)
    smallest = kinds.smallest_normal * unit_roundoff(dtype)  # below that the grid is even
    error = (times * unit_roundoff(dtype) * value.abs()).clamp_min(smallest)
    return value + (2 * signs - 1) * error


def _longest_sum(model: nn.Module) -> int:
    """The most products that are added up in a linear layer."""
    return max([each.in_features for each in model.modules() if isinstance(each, nn.Linear)] or [1])


def _logits(model: Any, inputs: ModelCalls) -> Tensor:
    model.eval()
    rows = [model(**each, use_cache=False).logits for each in inputs]
    return torch.cat([row.float().flatten(0, 1).cpu() for row in rows])


def _widen(weight: Tensor) -> Tensor:
    return weight.float() if weight.is_floating_point() else weight


@contextmanager
def _through(model: nn.Module, weights: Any, results: Any = None) -> Iterator[None]:
    """While it lasts, each module computes with what `weights` makes of its own parameters, and
    hands on what `results` makes of a tensor that comes out of it.

    Its children's parameters are changed with its own: T5's feed-forward casts what it gives to a
    linear layer to the dtype of that layer's weights, before it calls it.
    """
    held: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}
    changed: set[nn.Parameter] = set()

    def before(module: nn.Module, given: Any) -> None:
        near = [module, *module.children()]
        each = (parameter for part in near for parameter in part.parameters(recurse=False))
        own = [parameter for parameter in dict.fromkeys(each) if parameter not in changed]
        held[module] = [(parameter, parameter.data) for parameter in own]
        for parameter in own:
            parameter.data = weights(parameter.data)
        changed.update(own)

    def after(module: nn.Module, given: Any, result: Any) -> Any:
        for parameter, data in held.pop(module):
            parameter.data = data
            changed.discard(parameter)
        if results is None:
            return result
        if isinstance(result, Tensor):
            return results(result)
        if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
            return (results(result[0]), *result[1:])
        return result

    hooks = []
    try:
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after, always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
