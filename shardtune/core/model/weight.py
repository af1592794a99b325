"""One tensor of a model: its name, its shape, and what can be done with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ModelPart = Literal["embedding", "layer", "moe_layer", "encoder_layer", "root", "head"]
"""Where a tensor lies: `moe_layer` is a layer with experts in a model that may have others too,
`root` is what lies outside the layers and is neither embedding nor output head (final norms)."""

WeightKind = Literal["linear", "conv1d", "matrix", "table", "norm", "vector", "buffer"]
"""What a tensor is: the weight of a linear module, or of GPT-2's transposed one; a matrix that is
multiplied with but is no module of its own (router, experts), so that it can't be quantized, and of
which LoRA adapts experts alone; a table to look up in; a norm's; a bias or the like; or a number
that is stored with the weights but is no parameter."""


HEAD = "lm_head"
"""What every architecture that we know calls its output head."""


@dataclass(frozen=True)
class Weight:
    """One tensor, or the same tensor of several layers."""

    name: str
    """Within its layer, as transformers calls it: `self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    """For linear ones (outputs, inputs), even where it is stored the other way round."""
    part: ModelPart
    kind: WeightKind
    times: int = 1
    """How many layers have it."""
    routed: bool = False
    """Whether the first dimension counts experts, of which a token uses a few."""
    stands_for: tuple[str, ...] = ()
    """For experts' matrices: the names of the modules that older versions of the model had in their
    place. peft still takes these names for the experts."""

    @cached_property
    def size(self) -> int:
        """Numbers in one of them."""
        return math.prod(self.shape)

    @property
    def total(self) -> int:
        """Numbers in all of them."""
        return self.size * self.times

    @cached_property
    def module(self) -> str:
        """The module that it belongs to: `self_attn.q_proj`."""
        return self.name.rpartition(".")[0]

    @property
    def linear(self) -> bool:
        """Whether it is the weight of a linear module, which can be adapted."""
        return self.kind in ("linear", "conv1d")

    @property
    def features(self) -> tuple[int, int]:
        """Outputs and inputs of a matrix, of one expert if there are several."""
        *_, outputs, inputs = self.shape
        return outputs, inputs

    @property
    def lora_rows(self) -> int:
        """Numbers that LoRA trains beside one of them for each rank: a row and a column, for every
        expert."""
        return math.prod(self.shape[:-2]) * sum(self.features)

    @property
    def parameter(self) -> bool:
        """Whether training may change it."""
        return self.kind != "buffer"
