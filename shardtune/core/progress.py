"""How far a run has come. The position in the data is the step: nothing else needs keeping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardtune.core.host.stop_request import StopRequest
from shardtune.core.step import Reading, StepResult

_NOT_KEPT = ("step", "stopped", "preempted")


@dataclass(frozen=True)
class Progress:
    """Steps done, and what the summary says about them."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    tokens_per_second: float = 0.0
    utilisation: float | None = None
    """The share of the time in which ranks computed, over the last steps."""
    skipped: int = 0
    """Steps whose gradient wasn't finite."""
    skipped_in_a_row: int = 0
    judged_step: int = 0
    """The last step whose evaluation early stopping and the best checkpoint have seen."""
    best_value: float | None = None
    best_step: int | None = None
    """The best value of `save.best`, and the step that had it."""
    early_stop_value: float | None = None
    early_stop_waited: int = 0
    """The best value of `train.early_stop`, and the evaluations since then."""
    stopped: bool = False
    """Ended before its last step, because a person or the cluster asked for it."""
    preempted: bool = False
    """Preempted: nothing but a checkpoint was made."""

    def facts(self) -> dict[str, float | None]:
        """What a checkpoint keeps besides the step; a loss that is no number is left out."""
        found = {key: value for key, value in asdict(self).items() if key not in _NOT_KEPT}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in found.items()
        }

    @staticmethod
    def resumed(step: int, facts: Mapping[str, Any]) -> Progress:
        """The progress that `facts` were taken of."""
        known = Progress().facts().keys()
        return Progress(step, **{key: facts[key] for key in known & facts.keys()})

    def after(
        self, result: StepResult, reading: Reading, stop: StopRequest = StopRequest.NONE
    ) -> Progress:
        """The progress after one more step; `stop` says whether it shall be the last."""
        return replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + result.tokens,
            seconds=self.seconds + reading.seconds,
            first_loss=result.loss if self.first_loss is None else self.first_loss,
            last_loss=result.loss,
            tokens_per_second=reading.tokens_per_second,
            utilisation=reading.utilisation,
            skipped=self.skipped + (not result.applied),
            skipped_in_a_row=0 if result.applied else self.skipped_in_a_row + 1,
            stopped=stop > StopRequest.NONE,
            preempted=stop is StopRequest.PREEMPT,
        )
