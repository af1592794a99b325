"""What some families do with logits behind their output head: a factor (Granite, Cohere,
Falcon-H1), and soft-capping (Gemma), `z = cap * tanh(factor * logit / cap)`.

The fused loss does the same inside its kernel, in fp32. While it answers in the head's place, the
model itself has to leave it out: what it would bend is a loss by then.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

_HEAD_ALONE = re.compile(r"self\.\w+\((?!.*\bself\.\w+\().*\)(\.float\(\)|\.contiguous\(\))?")
"""One module's answer, as it is."""
_KNOWN_ENDINGS = frozenset({
    "logits / self.config.logits_scaling",
    "logits * self.logit_scale",
    "self.lm_head(hidden_states) * self.model.lm_head_multiplier",
    "logits / self.config.final_logit_softcapping",
    "torch.tanh(logits)",
    "logits * self.config.final_logit_softcapping",
})  # fmt: skip
"""What `logit_transform_of` finds the numbers of."""


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
    kind: type = type(causal)
    if not _ends_as_known(kind):
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
    if (given := getattr(config, "lm_head_multiplier", None)) not in (None, 1):
        if family != "falcon_h1":
            return None
        factor = given
        read.append((causal.model, "lm_head_multiplier", 1.0))
    if given := getattr(config, "final_logit_softcapping", None):
        if not family.startswith("gemma") or config is not causal.config:
            return None
        cap = given
        read.append((causal.config, "final_logit_softcapping", None))
    return LogitTransform(float(factor), float(cap), tuple(read))


@cache
def _ends_as_known(kind: type) -> bool:
    """Whether a model's class hands on what its head gives, or does with it what is known here: by
    the values that its forward pass gives to what it returns as logits."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError):
        return False  # nobody can read it
    keywords = [each for each in ast.walk(tree) if isinstance(each, ast.keyword)]
    returned = {ast.unparse(each.value) for each in keywords if each.arg == "logits"}
    assigned = [each for each in ast.walk(tree) if isinstance(each, ast.Assign | ast.AugAssign)]
    return all(_is_known_ending(each) for each in assigned if returned & _names(each))


def _names(assigned: ast.Assign | ast.AugAssign) -> set[str]:
    """What is written to, be it in part."""
    targets = assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]
    parts = (part for target in targets for part in ast.walk(target))
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _is_known_ending(assigned: ast.Assign | ast.AugAssign) -> bool:
    value = ast.unparse(assigned.value)
    whole = isinstance(assigned, ast.Assign) and isinstance(assigned.targets[0], ast.Name)
    known = value in _KNOWN_ENDINGS or value == "None" or _HEAD_ALONE.fullmatch(value)
    return bool(whole and known)
