"""`adapter`: what is trained, all weights or an adapter beside them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardtune.config.sections.field_types import Auto, Positive
from shardtune.core.job_section import Section


class NoAdapter(Section):
    """Train all weights."""

    type: Literal["none"] = "none"


class LoRA(Section):
    """LoRA: train a low-rank update of each chosen linear layer; the base model stays frozen."""

    type: Literal["lora"] = "lora"
    rank: Positive = 16
    """Rank r of the update BA. A higher rank can learn more, and costs more memory."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scaling: the update is multiplied by alpha / rank (of experts: alpha / expert_rank)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' inputs."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers to adapt, or `all-linear`: every one except the output head and
    those of image and audio encoders."""
    variant: Literal["plain", "dora", "rslora", "pissa"] = "plain"
    """`dora` trains the magnitude of each weight row apart from its direction; `rslora` scales by
    alpha / sqrt(rank), so that high ranks keep their strength; `pissa` initialises A and B with the
    top singular components of the weight."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained in full beside the adapters, and saved with them, such as
    `embed_tokens` and `lm_head` after new tokens were added, or the router of a mixture of experts
    (`gate`, or `router`), which is frozen otherwise."""
    experts: Auto | Literal["all", "none"] = "auto"
    """Of a mixture of experts: adapt `all` routed experts of every layer, or `none`. `auto` adapts
    them with `targets: all-linear`, and not where targets are named."""
    expert_rank: Auto | Positive = "auto"
    """LoRA rank of each expert. `auto` is rank / active experts per token, at least 1: a token then
    passes about as many trained weights as in a dense model."""

    @property
    def adapts_experts(self) -> bool:
        """Whether routed experts are adapted, where a model has any."""
        return self.experts == "all" or (self.experts == "auto" and self.targets == "all-linear")

    def rank_of_experts(self, active: int) -> int:
        """The rank of each expert, where a token goes through so many."""
        auto = max(1, self.rank // max(1, active))
        return auto if self.expert_rank == "auto" else self.expert_rank


class IA3(Section):
    """IA3: train one scaling factor for each output of the K and V projections and each input of
    the MLP's down projection; the base model stays frozen."""

    type: Literal["ia3"] = "ia3"
    targets: Auto | tuple[str, ...] = "auto"
    """Names of the linear layers to scale; `auto` knows the common families."""
    feedforward: Auto | tuple[str, ...] = "auto"
    """Those of the targets whose inputs are scaled, not their outputs."""


Adapter = Annotated[LoRA | IA3 | NoAdapter, Field(discriminator="type")]
