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
    """Train a low-rank correction of each chosen linear layer; the model itself stays as it is."""

    type: Literal["lora"] = "lora"
    rank: Positive = 16
    """Columns of the correction. More of them learn more and cost more memory."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Strength: the correction is multiplied by alpha / rank, of experts by alpha / expert_rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that is dropped in training."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers to adapt, or every one but the output head and those of encoders
    of pictures and sounds, which text never goes through."""
    variant: Literal["plain", "dora", "rslora", "pissa"] = "plain"
    """`dora` trains the length of each row apart from its direction; `rslora` multiplies by
    alpha / sqrt(rank), so that high ranks keep their strength; `pissa` starts from the strongest
    directions of the weights instead of from nothing."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole beside the adapters, and saved with them, such as
    `embed_tokens` and `lm_head` after new tokens were added, or the router of a mixture of experts
    (`gate`, or `router`), which is frozen otherwise."""
    experts: Auto | Literal["all", "none"] = "auto"
    """Of a mixture of experts: adapt `all` routed experts of every layer, or `none`. `auto` adapts
    them with `targets: all-linear`, and not where targets are named."""
    expert_rank: Auto | Positive = "auto"
    """Rank of the correction of each expert's matrices. `auto` is rank / experts that a token goes
    through, at least 1: a token then meets about as many trained numbers as in a model without
    experts."""

    @property
    def adapts_experts(self) -> bool:
        """Whether routed experts are adapted, where a model has any."""
        return self.experts == "all" or (self.experts == "auto" and self.targets == "all-linear")

    def rank_of_experts(self, active: int) -> int:
        """The rank of each expert, where a token goes through so many."""
        auto = max(1, self.rank // max(1, active))
        return auto if self.expert_rank == "auto" else self.expert_rank


class IA3(Section):
    """Train one factor for each output of the keys and values and each input of the MLP's last
    layer: a few thousand numbers; the model itself stays as it is."""

    type: Literal["ia3"] = "ia3"
    targets: Auto | tuple[str, ...] = "auto"
    """Names of the linear layers to scale; `auto` knows the common families."""
    feedforward: Auto | tuple[str, ...] = "auto"
    """Those of the targets whose input is scaled, not their output."""


Adapter = Annotated[LoRA | IA3 | NoAdapter, Field(discriminator="type")]
