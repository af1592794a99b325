"""Capabilities: what a strategy can do, as data.

Rules, `auto`, forecast, search, remedies, doctor and dry run read this and ask nobody's name. The
defaults are what every engine here can do; a strategy declares what it can do beyond them, and of
what it can't, why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardtune.core.layout import Home, State

TrainedWeights = Literal["autocast", "cast_when_gathered", "compute_precision"]
"""How trained weights become those that are computed with: held in fp32 and cast for each product
by torch.autocast; held in fp32 and cast as they are gathered; held in the precision of the
computation, beside fp32 masters of the optimizer."""


@dataclass(frozen=True)
class Refusal:
    """Why something can't be done. It is false, so that `if capability:` reads well."""

    fact: str
    fix: str = ""
    """What to change in the strategy's own section, where that helps."""

    def __bool__(self) -> bool:
        return False


Can = bool | Refusal
"""True, or the reason; False where there is nothing to say about it."""


@dataclass(frozen=True)
class Support:
    """The values of a setting that a strategy takes; of some others, why it doesn't."""

    values: tuple[str, ...]
    refusals: Mapping[str, Refusal] = field(default_factory=dict)

    def __contains__(self, value: str) -> bool:
        return value in self.values

    def without(self, refusals: Mapping[str, Refusal]) -> Support:
        """The same without these values. What was refused before keeps its reason."""
        values = tuple(value for value in self.values if value not in refusals)
        return Support(values, {**refusals, **self.refusals})


@dataclass(frozen=True)
class Need:
    """A package that has to be installed, and the extra of shardtune that installs it, if any."""

    package: str
    extra: str = ""

    @property
    def command(self) -> str:
        """How it is installed."""
        what = f"'shardtune[{self.extra}]'" if self.extra else self.package
        return f"pip install {what}"


@dataclass(frozen=True)
class Capabilities:
    """What a strategy, with the settings that it has, can do."""

    models: Support = Support(("decoder", "encoder_decoder"))
    """Kinds of models (`core/model/kind.py`)."""
    precisions: Support = Support(("fp32", "bf16"))
    """Of the computation: `train.precision`."""
    quantizations: Support = Support(("none",))
    """How frozen weights may be stored: `model.quantization`."""
    adapters: Support = Support(("none", "lora", "ia3"))
    """What may be trained: `adapter.type`."""
    variants: Support = Support(("plain", "rslora", "pissa"))
    """Of LoRA: `adapter.variant`."""
    optimizer_bits: Support = Support(("32", "8"))
    """Of the optimizer's moments: `train.optimizer.bits`."""
    checkpointing: Support = Support(("none", "full"))
    """Levels of activation checkpointing: `train.gradient_checkpointing`."""
    activation_offload: Can = False
    """Whether saved activations may wait in CPU memory: `train.offload_activations`."""
    compiled_layers: Can = False
    """Whether layers may be compiled and fused: `train.kernels`."""
    fused_loss: bool = False
    """Whether output head and loss may be computed together: `train.loss`."""
    router_losses: Can = False
    """Whether routers of a mixture may have losses of their own: `train.router_aux_loss_coef`."""
    captures_alone: bool = False
    """Whether the short steps of a single rank become CUDA graphs."""
    split_weights: bool = False
    """Whether one rank that trains all weights in bf16 holds them as halves of fp32 numbers, and
    may keep the lower halves and the moments in host memory that the GPU addresses."""
    micro_batch_by_memory: bool = False
    """Whether only memory and speed speak for a micro-batch, so that the forecast may choose it."""
    resumes: Can = True
    """Whether a run can go on from its checkpoints, which any strategy here can read."""
    dry_run: Can = True
    """Whether its engine can take a step on fake tensors."""
    combines: frozenset[str] = frozenset()
    """Mesh axes that its own fields add to it."""
    offload: Mapping[State, tuple[Home, ...]] = field(default_factory=dict)
    """States that its own fields can put elsewhere than on the device, and where."""
    trained_weights: TrainedWeights = "autocast"
    """How trained weights are held and cast."""
    gathers_from_all_nodes: bool = False
    """Whether a step gathers weights over the network between nodes, in every micro-batch."""
    needs: tuple[Need, ...] = ()
    """Packages beside shardtune's own."""
