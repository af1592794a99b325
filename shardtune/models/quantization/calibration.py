"""Lets 8-bit layers hear what goes into them, before they are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.fp8_memory import HESSIAN_BUDGET, hessian_bytes
from shardtune.models.quantization.fp8 import FP8Linear

CalibrationSamples = Sequence[Sequence[int]]
"""Token ids."""


def calibration_groups(layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Decoder layers, as many at a time as there is room to listen to, but one at least."""
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
    """The layers that hold 8-bit weights, their own or those of several."""
    found = [module for module in part.modules() if isinstance(module, FP8Linear)]
    return [module for module in found if module.holder is module]


class _Enough(Exception):
    """Ends a forward pass."""


class CalibrationPass:
    """Texts on their way through a model that has its weights, one after the other and as far as to
    the layers that listen. Adapters add nothing yet.

    A layer is passed twice: when it listens, and rounded by what it has heard, on the way to those
    that listen next. What it gives then is kept in main memory, and nobody passes it a third time.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module],
        samples: CalibrationSamples,
        device: str,
        compute: torch.dtype,
    ) -> None:
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._model: Any = causal.base_model
        self._layers, self._samples = layers, samples
        self._device, self._compute = device, compute
        self._behind = 0
        """Layers that are passed for good."""
        self._kept: list[Any] = [None] * len(samples)
        """What the last of them gave, for each text."""
        self._met, plainly = self._look()
        self._apart = plainly and self._met == [layer for layer in layers if layer in self._met]
        """Layers know of those before them by what these give, and by nothing else."""

    @torch.no_grad()
    def _look(self) -> tuple[list[nn.Module], bool]:
        """Which layers a text meets (in a model that sees, not all), and whether they are given
        nothing that one could leave something in for another, as some share keys and values."""
        met: list[nn.Module] = []
        plain: list[bool] = []

        def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            met.append(layer)
            plain.append(_is_plain((*args, *kwargs.values())))

        with ExitStack() as undo:
            for layer in self._layers:
                undo.callback(layer.register_forward_pre_hook(look, with_kwargs=True).remove)
            self._send(0)
        return met, all(plain)

    @torch.no_grad()
    def collect(self, group: Sequence[nn.Module]) -> None:
        """Up to the end of `group`, which listens. Groups come in the order of their layers."""
        for part in group:
            for holder in weight_holders(part):
                holder.observe()
        if not any(layer in self._met for layer in group):
            return
        begin = self._layers.index(group[0])
        given: Any = None
        caught: list[Any] = []
        kept = 0
        with ExitStack() as undo:
            for layer in self._layers[: self._behind]:
                layer.forward = lambda *_, **__: _copied(given, self._device)
                undo.callback(delattr, layer, "forward")
            undo.callback(group[-1].register_forward_hook(_stop).remove)
            if begin and self._apart:
                last = self._layers[begin - 1]
                keep = last.register_forward_hook(lambda *of: caught.append(_copied(of[-1])))
                undo.callback(keep.remove)
            for number in range(len(self._samples)):
                given = _copied(self._kept[number], self._device)
                with suppress(_Enough):
                    self._send(number)
                if caught:
                    self._kept[number] = caught.pop()
                    kept += 1
        if kept == len(self._samples):  # none, if it is a layer that they don't meet
            self._behind = begin

    def _send(self, number: int) -> None:
        # Each text has a length of its own, for which nothing is to be compiled.
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.autocast(torch.device(self._device).type, self._compute):
            ids = torch.tensor([list(self._samples[number])], device=self._device)
            self._model(input_ids=ids, use_cache=False)


def _stop(*_: Any) -> None:
    raise _Enough


def _is_plain(what: Any) -> bool:
    if isinstance(what, tuple):
        return all(map(_is_plain, what))
    return what is None or isinstance(what, Tensor | bool | int | float | str)


def _copied(what: Any, device: str = "cpu") -> Any:
    """What a layer gives (a tensor, in some models among others), safe from who writes into it."""
    if isinstance(what, tuple):
        return tuple(_copied(each, device) for each in what)
    return what.to(device, copy=True) if isinstance(what, Tensor) else what
