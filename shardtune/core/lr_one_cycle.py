"""The shape of the one-cycle learning-rate policy, as a job gives it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardtune.core.job_section import Section


class OneCycle(Section):
    """The one-cycle policy, with the words and defaults of torch's OneCycleLR: along cosines from
    `learning_rate / div_factor` up to `learning_rate`, and down to a small fraction of where it
    began. Adam's betas and SGD's momentum stay as they are."""

    pct_start: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of the run in which the rate rises."""
    div_factor: Annotated[float, Field(ge=1)] = 25.0
    """The first rate is `learning_rate` divided by this."""
    final_div_factor: Annotated[float, Field(ge=1)] = 1e4
    """The last rate is the first one divided by this."""
