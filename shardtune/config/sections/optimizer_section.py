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
    """How much of the past the means of the gradient and of its square remember."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Keeps the division by the root of the mean square from blowing up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Share of a weight that is taken off in each step, times the learning rate."""
    bits: Bits = 32
    """Of each of the two means. 8 stores them block-wise, a byte a number and a scale for 256 of
    them: a quarter of the memory, slightly other steps. Needs `shardtune[quant]`."""
    paged: bool = False
    """Optimizer states, and the lower halves of split fp32 weights, lie in pinned CPU memory that
    the GPU reads and writes in place (host-mapped; bitsandbytes calls it paged): 10 bytes less a
    weight on the GPU, the same steps to the bit, and the way over the bus once a step. Where one
    GPU trains all weights in bf16."""

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
    """Plain gradient descent. It shows errors of gradient scale that AdamW hides."""

    type: Literal["sgd"]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """How much of the last update goes into the next."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Share of a weight that is added to its gradient."""

    def setup(self) -> OptimizerSetup:
        """The update rule as the engine is told it."""
        return OptimizerSetup("sgd", momentum=self.momentum, weight_decay=self.weight_decay)


Optimizer = Annotated[
    Annotated[AdamW, Tag("adamw")] | Annotated[SGD, Tag("sgd")], unless_said("adamw")
]
