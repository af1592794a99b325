"""Calibration of FP8 layers: samples of the training data go through the model before it is
trained.

Each layer collects the mean and the Hessian of its inputs (`HessianAccumulator`), group by group of
decoder layers; then its weights are requantized with GPTQ, so the next group sees its errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.fp8_memory import HESSIAN_BUDGET, hessian_bytes
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.models.quantization.fp8_linear import FP8Linear

CalibrationSamples = Sequence[Sequence[int]]
"""Token ids of documents."""


def calibration_groups(layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Decoder layers, as many at a time as the budget has room for their Hessians, but one at
    least."""
    group: list[nn.Module] = []
    taken = 0
    for layer in layers:
        size = sum(hessian_bytes(each.in_features) for each in weight_holders(layer))
        if group and taken + size > HESSIAN_BUDGET:
            yield group
            group, taken = [], 0
        group.append(layer)
        taken += size
    yield group


def weight_holders(part: nn.Module) -> list[FP8Linear]:
    """The FP8 layers that hold weights: their own, or those of several stacked ones."""
    found = [module for module in part.modules() if isinstance(module, FP8Linear)]
    return [module for module in found if module.holder is module]


class _StopForward(Exception):
    """Ends a forward pass."""


class CalibrationPass:
    """Runs the calibration samples through a model, one after the other, up to the layers that
    collect. Adapters add nothing yet.

    A layer runs twice: while it collects, and requantized, on the way to those that collect next.
    Its outputs are then cached in CPU memory, and it doesn't run a third time.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module],
        samples: CalibrationSamples,
        device: str,
        compute: torch.dtype,
    ) -> None:
        self._model: Any = unwrap_model(model).base_model
        self._layers, self._samples = layers, samples
        self._device, self._compute = device, compute
        self._cached_layers = 0
        """Layers whose outputs are cached."""
        self._outputs: list[Any] = [None] * len(samples)
        """Outputs of the last of them, for each sample."""
        self._reached, plainly = self._inspect()
        self._independent = plainly and self._reached == [
            layer for layer in layers if layer in self._reached
        ]
        """Whether layers know of those before them by their outputs alone."""

    @torch.no_grad()
    def _inspect(self) -> tuple[list[nn.Module], bool]:
        """Which layers a text runs through (in a vision-language model, not all), and whether they
        are given nothing mutable that one could leave something in for another, as some share keys
        and values."""
        reached: list[nn.Module] = []
        plain: list[bool] = []

        def inspect_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            reached.append(layer)
            plain.append(_is_plain((*args, *kwargs.values())))

        with ExitStack() as undo:
            for layer in self._layers:
                undo.callback(
                    layer.register_forward_pre_hook(inspect_inputs, with_kwargs=True).remove
                )
            self._run(0)
        return reached, all(plain)

    @torch.no_grad()
    def collect(self, group: Sequence[nn.Module]) -> None:
        """Runs all samples up to the end of `group`, which observes. Groups come in the order of
        their layers."""
        for part in group:
            for holder in weight_holders(part):
                holder.observe()
        if not any(layer in self._reached for layer in group):
            return
        begin = self._layers.index(group[0])
        given: Any = None
        caught: list[Any] = []
        kept = 0
        with ExitStack() as undo:
            for layer in self._layers[: self._cached_layers]:
                layer.forward = lambda *_, **__: _copy(given, self._device)
                undo.callback(delattr, layer, "forward")
            undo.callback(group[-1].register_forward_hook(_stop).remove)
            if begin and self._independent:
                last = self._layers[begin - 1]
                keep = last.register_forward_hook(lambda *of: caught.append(_copy(of[-1])))
                undo.callback(keep.remove)
            for number in range(len(self._samples)):
                given = _copy(self._outputs[number], self._device)
                with suppress(_StopForward):
                    self._run(number)
                if caught:
                    self._outputs[number] = caught.pop()
                    kept += 1
        if kept == len(self._samples):  # none, if it is a layer that they don't meet
            self._cached_layers = begin

    def _run(self, number: int) -> None:
        # Each sample has a length of its own, for which nothing is to be compiled.
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.autocast(torch.device(self._device).type, self._compute):
            ids = torch.tensor([list(self._samples[number])], device=self._device)
            self._model(input_ids=ids, use_cache=False)


def _stop(*_: Any) -> None:
    raise _StopForward


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Tensor | bool | int | float | str)


def _copy(value: Any, device: str = "cpu") -> Any:
    """A copy of a layer's output (a tensor, or a tuple with some), safe from in-place writes."""
    if isinstance(value, tuple):
        return tuple(_copy(each, device) for each in value)
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
