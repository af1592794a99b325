"""How far a run has come. The position in the data is the step: nothing else needs keeping."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardtune.core.step import Reading, StepResult


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
    stopped: bool = False

    def after(self, result: StepResult, reading: Reading, *, wished: bool) -> Progress:
        """The progress after one more step; `wished` says that a person wants to stop here."""
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
            stopped=wished,
        )
