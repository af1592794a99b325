"""What some families do with logits behind their output head: a factor (Granite, Cohere,
Falcon-H1), and soft-capping (Gemma), `z = cap * tanh(factor * logit / cap)`.

The fused loss does the same inside its kernel, in fp32. While it answers in the head's place, the
model itself has to leave it out: what it would bend is a loss by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardtune.kernels.forward_ending import Operation, operations_behind_head


@dataclass(frozen=True)
class LogitTransform:
    """`cap * tanh(factor * logit / cap)`; without a cap the factor alone."""

    factor: float = 1.0
    cap: float = 0.0
    """0: none."""
    neutral: tuple[tuple[Any, str, float | None], ...] = field(default=(), compare=False)
    """Where the model reads them, each as an object and a name; with what changes nothing."""

    def __call__(self, logits: Tensor) -> Tensor:
        """In fp32, whatever the logits are in."""
        z = logits.float() * self.factor
        return torch.tanh(z / self.cap) * self.cap if self.cap else z

    def slope(self, z: Tensor) -> Tensor | float:
        """Its derivative where it gives `z`."""
        return self.factor * (1 - (z / self.cap) ** 2) if self.cap else self.factor

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, the model hands on what its head gives as it is."""
        before = [getattr(place, name) for place, name, _ in self.neutral]
        for place, name, nothing in self.neutral:
            setattr(place, name, nothing)
        try:
            yield
        finally:
            for (place, name, _), value in zip(self.neutral, before, strict=True):
                setattr(place, name, value)


@dataclass(frozen=True)
class _KnownEnding:
    """What a family does behind its head, and where its code reads the number."""

    operations: tuple[Operation, ...]
    name: str
    """Of the number: in the config, and in `place`."""
    place: Callable[[Any], Any]
    """Where a model's code reads it."""
    made_of: Callable[[float], tuple[float, float]]
    """The factor and the cap that the number stands for."""
    neutral: float | None = 1.0
    """With this the code does nothing."""


_CAP = "self.config.final_logit_softcapping"
_KNOWN_ENDINGS = (
    _KnownEnding(
        (Operation("logits / self.config.logits_scaling"),),
        "logits_scaling",
        lambda causal: causal.config,
        lambda number: (1.0 / number, 0.0),
    ),
    _KnownEnding(
        (Operation("logits * self.logit_scale"),),
        "logit_scale",
        lambda causal: causal,
        lambda number: (number, 0.0),
    ),
    _KnownEnding(
        (Operation("logits * self.model.lm_head_multiplier"),),
        "lm_head_multiplier",
        lambda causal: causal.model,
        lambda number: (number, 0.0),
    ),
    _KnownEnding(
        tuple(
            Operation(each, f"{_CAP} is not None")
            for each in (f"logits / {_CAP}", "torch.tanh(logits)", f"logits * {_CAP}")
        ),
        "final_logit_softcapping",
        lambda causal: causal.config,
        lambda number: (1.0, number),
        neutral=None,
    ),
)
_NUMBERS: dict[str, tuple[float | None, ...]] = {
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "lm_head_multiplier": (None, 1),
    "output_multiplier_scale": (None, 1),
    "final_logit_softcapping": (None, 0),
}
"""What families call it in their configs, and with what it does nothing."""


def logit_transform_of(causal: Any) -> LogitTransform | None:
    """What a model does behind its head; None where it does something else, or might."""
    head = causal.get_output_embeddings()
    kind: type = type(causal)
    heads = frozenset(name for name, module in causal._modules.items() if module is head)
    done = operations_behind_head(kind, heads)
    ending = next((each for each in _KNOWN_ENDINGS if each.operations == done), None)
    if done is None or (done and ending is None):
        return None
    config = causal.config.get_text_config()
    said = {
        name for name, nothing in _NUMBERS.items() if getattr(config, name, None) not in nothing
    }
    if said - ({ending.name} if ending else set()):
        return None  # it is used somewhere, and not where it is known to be
    if ending is None:
        return LogitTransform()
    place = ending.place(causal)
    number = getattr(place, ending.name)
    if number is None:
        return LogitTransform()
    if not isinstance(number, int | float):
        return None  # it is learned, say
    return LogitTransform(*ending.made_of(number), ((place, ending.name, ending.neutral),))
