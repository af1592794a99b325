"""`train.optimizer`: the update rule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from shardtune.config.sections.field_types import unless_said
from shardtune.core.job_section import Section
from shardtune.core.setup import Bits, OptimizerSetup


class AdamW(Section):
    """AdamW, with weight decay on matrices only."""

    type: Literal["adamw"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """Decay rates of Adam's first and second moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the update, for numerical stability."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay: each step subtracts learning rate x weight_decay x weight."""
    bits: Bits = 32
    """Bits of Adam's moments. 8 quantizes them block-wise, a byte per value and a scale per 256
    values: a quarter of the memory, slightly different updates. Needs `shardtune[quant]`."""
    paged: bool = False
    """Keep optimizer states, and the lower halves of split fp32 weights, in pinned CPU memory that
    the GPU reads and writes in place (host-mapped; bitsandbytes calls it paged): 10 bytes less per
    weight on the GPU, the same steps to the bit, one transfer over the bus per step. For a full
    fine-tune in bf16 on one GPU."""

    def setup(self) -> OptimizerSetup:
        """The update rule as the engine is told it."""
        return OptimizerSetup(
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            bits=self.bits,
            host_mapped=self.paged,
        )


class SGD(Section):
    """SGD. It shows errors of gradient scale that AdamW hides."""

    type: Literal["sgd"]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum factor."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty: weight_decay x weight is added to the gradient."""

    def setup(self) -> OptimizerSetup:
        """The update rule as the engine is told it."""
        return OptimizerSetup("sgd", momentum=self.momentum, weight_decay=self.weight_decay)


Optimizer = Annotated[
    Annotated[AdamW, Tag("adamw")] | Annotated[SGD, Tag("sgd")], unless_said("adamw")
]
