"""Lets 8-bit layers hear what goes into them, before they are trained."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.eight_bits import ROOM, square
from shardtune.models.fp8 import FP8Linear

Texts = Sequence[Sequence[int]]
"""Token ids."""


def in_turn(layers: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Decoder layers, as many at a time as there is room to listen to, but one at least."""
    group: list[nn.Module] = []
    taken = 0
    for layer in layers:
        size = sum(square(each.in_features) for each in holders(layer))
        if group and taken + size > ROOM:
            yield group
            group, taken = [], 0
        group.append(layer)
        taken += size
    yield group


def holders(part: nn.Module) -> list[FP8Linear]:
    """The layers that hold 8-bit weights, their own or those of several."""
    found = [module for module in part.modules() if isinstance(module, FP8Linear)]
    return [module for module in found if module.whole is module]


class _Enough(Exception):
    """Ends a forward pass."""


class Passage:
    """Texts on their way through a model that has its weights, one after the other and as far as to
    the layers that listen. Adapters add nothing yet.

    A layer is passed twice: when it listens, and rounded by what it has heard, on the way to those
    that listen next. What it gives then is kept in main memory, and nobody passes it a third time.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module],
        texts: Texts,
        device: str,
        compute: torch.dtype,
    ) -> None:
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._model: Any = causal.base_model
        self._layers, self._texts = layers, texts
        self._device, self._compute = device, compute
        self._behind = 0
        """Layers that are passed for good."""
        self._kept: list[Any] = [None] * len(texts)
        """What the last of them gave, for each text."""
        self._given: Any = None
        """The same, for the text that is on its way."""
        self._apart = True
        """Layers know of those before them by what they are given alone."""

    @torch.no_grad()
    def hear(self, group: Sequence[nn.Module]) -> None:
        """Up to the end of `group`, which listens. Groups come in the order of their layers."""
        for part in group:
            for holder in holders(part):
                holder.listen()
        begin = self._layers.index(group[0])
        with ExitStack() as undo:
            for layer in self._layers[: self._behind]:
                layer.forward = self._as_before
                undo.callback(delattr, layer, "forward")
            handles = [group[-1].register_forward_hook(_stop)]
            if begin and self._apart:
                handles.append(self._layers[begin - 1].register_forward_hook(self._keep))
            if not begin:
                handles.append(group[0].register_forward_pre_hook(self._look, with_kwargs=True))
            for handle in handles:
                undo.callback(handle.remove)
            # Each text has a length of its own, for which nothing is to be compiled.
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            undo.enter_context(torch.autocast(torch.device(self._device).type, self._compute))
            for number, text in enumerate(self._texts):
                self._given = _moved(self._kept[number], self._device)
                ids = torch.tensor([list(text)], device=self._device)
                with suppress(_Enough):
                    self._model(input_ids=ids, use_cache=False)
                self._kept[number] = _moved(self._given, "cpu")
        if self._apart:
            self._behind = begin

    def _as_before(self, *_: Any, **__: Any) -> Any:
        return self._given

    def _keep(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        self._given = output

    def _look(self, _layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """What layers are given to write into tells one of another: some models share keys and
        values so. These are passed from their beginning each time."""
        given = (*args, *kwargs.values())
        self._apart &= not any(isinstance(each, MutableMapping | list) for each in given)


def _stop(*_: Any) -> None:
    raise _Enough


def _moved(what: Any, device: str) -> Any:
    """What a layer gives, on another device: a tensor, in some models among others."""
    if isinstance(what, tuple):
        return tuple(_moved(each, device) for each in what)
    return what.to(device) if isinstance(what, Tensor) else what
