"""What some families do with logits behind their output head: a factor (Granite, Cohere), and
soft-capping (Gemma), `z = cap * tanh(factor * logit / cap)`.

The fused loss does the same inside its kernel, in fp32. While it answers in the head's place, the
model itself has to leave it out: what it would bend is a loss by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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


def logit_transform_of(causal: Any) -> LogitTransform | None:
    """What a model does behind its head; None where it does something else."""
    config = causal.config.get_text_config()
    if getattr(config, "output_multiplier_scale", None) not in (None, 1):
        return None
    family = config.model_type
    read: list[tuple[Any, str, float | None]] = []
    factor, cap = 1.0, 0.0
    if (given := getattr(config, "logits_scaling", None)) not in (None, 1):
        if not family.startswith("granite"):
            return None
        factor = 1.0 / given
        read.append((causal.config, "logits_scaling", 1.0))
    if (given := getattr(config, "logit_scale", None)) not in (None, 1):
        if family not in ("cohere", "cohere2"):
            return None
        factor = given
        read.append((causal, "logit_scale", 1.0))
    if given := getattr(config, "final_logit_softcapping", None):
        if not family.startswith("gemma") or config is not causal.config:
            return None
        cap = given
        read.append((causal.config, "final_logit_softcapping", None))
    return LogitTransform(float(factor), float(cap), tuple(read))
