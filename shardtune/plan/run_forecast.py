"""What was predicted for a run: computed once, by whoever starts it, and kept in its directory."""

from __future__ import annotations

from shardtune.core.footprint import Held
from shardtune.core.layout import State
from shardtune.core.record import Record
from shardtune.core.runs.run_report import Compared, ForecastCheck, HeldBytes
from shardtune.core.units import GIB
from shardtune.plan.forecast import Forecast
from shardtune.plan.forecast_summary import ForecastSummary

STATES: tuple[State, ...] = ("params", "grads", "optim")


class RunForecast(Record):
    """The run's `forecast.json`."""

    summary: ForecastSummary
    """The figures of `estimate --json`."""
    held_bytes: dict[State, float]
    """What the first rank holds between two steps."""
    allocated_gib: float
    """The peak of what is allocated on a GPU."""

    @classmethod
    def of(cls, found: Forecast) -> RunForecast:
        return cls(
            summary=found.summary(),
            held_bytes={state: found.held.of(state) for state in STATES},
            allocated_gib=found.memory.allocated / GIB,
        )

    def compare(
        self, held: Held, *, peak: float | None, tokens_per_second: float | None
    ) -> ForecastCheck:
        """Predicted beside measured, for the run's report. `peak` is in bytes; None where the
        device doesn't count what is allocated on it."""
        speed = self.summary.tokens_per_second
        return ForecastCheck(
            held_bytes=HeldBytes(
                **{s: Compared.of(self.held_bytes[s], held.of(s)) for s in STATES},
            ),
            peak_gib=None if peak is None else Compared.of(self.allocated_gib, peak / GIB),
            tokens_per_second=Compared.of(speed, tokens_per_second) if tokens_per_second else None,
        )
