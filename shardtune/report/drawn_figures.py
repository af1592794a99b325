"""The figures of a step that are drawn, each as a chart of its own: by the pages and by the
dashboard."""

from __future__ import annotations

from shardtune.core.record import Record
from shardtune.core.runs.metrics import StepMetrics
from shardtune.core.runs.run_history import StepForecast


class DrawnFigure(Record):
    """How a field of `StepMetrics` is drawn."""

    name: str
    """The field."""
    title: str
    unit: str
    from_zero: bool
    """Whether the axis begins at 0."""
    forecast: str | None
    """The field of `StepForecast` that is drawn beside it."""

    def value(self, step: StepMetrics) -> float | None:
        found: float | None = getattr(step, self.name)
        return found

    def predicted(self, forecast: StepForecast) -> float | None:
        found: float | None = getattr(forecast, self.forecast) if self.forecast else None
        return found


def _figure(
    name: str, title: str, unit: str, *, from_zero: bool = True, forecast: str | None = None
) -> DrawnFigure:
    return DrawnFigure(name=name, title=title, unit=unit, from_zero=from_zero, forecast=forecast)


DRAWN_FIGURES = (
    _figure("learning_rate", "Learning rate", "rate"),
    _figure("grad_norm", "Gradient norm before clipping", "norm", from_zero=False),
    _figure("tokens_per_second", "Speed, over all ranks", "tokens/s", forecast="tokens_per_second"),
    _figure("memory_gib", "Peak memory of rank 0", "GiB", forecast="allocated_gib"),
    _figure("utilisation", "Busy share of the ranks", "share"),
)
