"""How the layers of a model family, as transformers writes them, differ in what they keep.

Counted tensor by tensor in dry runs (`tests/plan/test_families.py` holds each row against one).
Widths are numbers of 16 bits. Layers that are compiled keep less; `saved_tensors.py` has those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shardtune.core.model.shape import ModelShape
from shardtune.plan.estimate.workload import SHAPES


@dataclass(frozen=True)
class NormCopies:
    """What a norm keeps of each number of its input."""

    trained: float
    frozen: float
    """Where its own weight isn't trained."""

    def kept(self, *, trained: bool, width: float) -> float:
        """In numbers of `width` bytes: in fp32 nothing is cast, and each copy is one number."""
        each = self.trained if trained else self.frozen
        return math.ceil(each / 2) if width == 4 else each


RMS = NormCopies(3, 2)
"""Cast to fp32; the 16-bit result before the weight is kept for the weight's gradient."""
RMS_FP32 = NormCopies(4, 2)
"""The same, multiplied with its weight in fp32."""
NATIVE = NormCopies(1, 1)
"""torch's own layer norm keeps its input."""
LAYER_FP32 = NormCopies(6, 4)
"""Cohere's: subtracts the mean twice, each time in fp32."""
WITHOUT_WEIGHT = NormCopies(2, 2)
"""OLMo's: cast to fp32, and nothing to train."""


@dataclass(frozen=True)
class FamilyCopies:
    """What a family's layers keep beyond those of Llama."""

    norm: NormCopies | None = None
    """None: by the kind of norm that the shape names."""
    joins_heads: bool = False
    """Parts of queries and keys are rotated and joined with the rest, which makes them contiguous;
    attention's result then has the same layout, and is copied before the output projection."""
    score: float = 6
    """Bytes of a score that is written down: the softmax in fp32 and its 16-bit copy."""
    gate: float = 1
    """Copies of an MLP's width beside the products of a gated MLP and the last one's input."""
    stream: float = 0
    """Copies of the residual stream: a shared expert's result before its gate."""
    router: float = 0
    """Copies that a router makes of the residual stream for the gradient of its weight."""
    value_norm: bool = False
    """Values are normed too, without a weight."""
    broadcasts_keys: bool = False
    """Falcon's: one key for all heads is handed to torch's attention, which then writes the scores
    down; several are copied for all heads, and there is always a mask."""


FAMILY_COPIES: Mapping[str, FamilyCopies] = {
    "codegen": FamilyCopies(score=2),
    "cohere": FamilyCopies(LAYER_FP32),
    "cohere2": FamilyCopies(LAYER_FP32),
    "deepseek_v2": FamilyCopies(router=1),
    "deepseek_v3": FamilyCopies(router=1),
    "falcon": FamilyCopies(broadcasts_keys=True),
    "gemma": FamilyCopies(RMS_FP32),
    "gemma2": FamilyCopies(RMS_FP32, score=8),  # with the soft cap's
    "gemma3_text": FamilyCopies(RMS_FP32),
    "gemma4_text": FamilyCopies(RMS_FP32, value_norm=True),
    "glm": FamilyCopies(joins_heads=True),
    "glm4": FamilyCopies(joins_heads=True),
    "glm4_moe": FamilyCopies(joins_heads=True, router=1),
    "gpt_neo": FamilyCopies(score=2),
    "gpt_neox": FamilyCopies(joins_heads=True),
    "gpt_oss": FamilyCopies(RMS_FP32, score=2, gate=4),
    "gptj": FamilyCopies(score=2),
    "helium": FamilyCopies(RMS_FP32),
    "nemotron": FamilyCopies(joins_heads=True),
    "olmo": FamilyCopies(WITHOUT_WEIGHT),
    "olmo2": FamilyCopies(RMS_FP32),
    "olmo3": FamilyCopies(RMS_FP32),
    "persimmon": FamilyCopies(joins_heads=True),
    "phi": FamilyCopies(joins_heads=True),
    "phi3": FamilyCopies(joins_heads=True),
    "qwen2_moe": FamilyCopies(stream=1),
    "stablelm": FamilyCopies(joins_heads=True),
    "xglm": FamilyCopies(score=4),
}
"""By transformers' `model_type`; one that isn't here keeps what Llama does."""


@dataclass(frozen=True)
class ActivationCopies:
    """What an activation function keeps of its width, without its result."""

    trained: float = 1
    frozen: float = 1
    """With adapters."""
    result: bool = False
    """It keeps its result, which the last product may keep anyway."""


ACTIVATION_COPIES: Mapping[str, ActivationCopies] = {
    "relu": ActivationCopies(result=True),
    "gelu_new": ActivationCopies(4, 4),  # written in single operations
    "xielu": ActivationCopies(4.5, 3.5),
}
"""Of an MLP without a gate; one that isn't here keeps its input."""
LLAMA = FamilyCopies()


@lru_cache(maxsize=SHAPES)
def copies_of(shape: ModelShape) -> FamilyCopies:
    """What a family's layers keep beyond those of Llama."""
    found = FAMILY_COPIES.get(shape.family, LLAMA)
    return found if found.norm else replace(found, norm=RMS if shape.norm == "rms" else NATIVE)
