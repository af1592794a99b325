"""Curves that warn: overfitting, divergence, a learning rate that doesn't suit, dead adapters.

Each is said once. The rules want a lasting trend beyond the curve's own noise: a warning that is
wrong teaches people to skip the next one. The same lines of metrics give the same warnings, so a
resumed run is shown its own past and doesn't repeat itself.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from statistics import fmean

from shardtune.core.runs.metrics import (
    CurveWarning,
    EvaluationMetrics,
    LossSpike,
    MetricsLine,
    NonfiniteGradient,
    StepMetrics,
    WarningKind,
)

WINDOW = 20  # losses whose mean is compared
RISING_EVALUATIONS = 3  # after the best one, each above it
RISE = 0.02  # of the best held-out loss: less may be chance
DIVERGED = 0.25  # of the lowest mean of a window
STUCK_STEPS = 100  # at a rate that no longer rises, before the loss is called stuck
STUCK = 0.005  # the least fall in these, as a share
LEARNT = 0.05  # a loss below this has nowhere to fall
TROUBLED_STEPS = 100  # in which spikes and gradients that aren't finite are counted
MOST_TROUBLES = 3  # of them
DEAD_STEPS = 5  # in a row without any gradient


class CurveWatch:
    """Takes the lines of the metrics in their order, and says what is wrong."""

    def __init__(self) -> None:
        self._said: set[tuple[WarningKind, str | None]] = set()
        self._losses: deque[float] = deque(maxlen=STUCK_STEPS + WINDOW)
        self._means: list[tuple[int, float]] = []
        self._lowest: tuple[int, float] | None = None
        self._rate, self._steady = 0.0, 0
        self._without_gradient, self._had_gradient = 0, False
        self._troubles: deque[int] = deque(maxlen=MOST_TROUBLES)
        self._evaluations: dict[str, list[tuple[int, float]]] = {}

    def see(self, line: MetricsLine) -> list[CurveWarning]:
        """What this line makes plain; mostly nothing."""
        if isinstance(line, CurveWarning):
            self._said.add((line.about, line.set))
            return []
        if isinstance(line, StepMetrics):
            found = self._step(line)
        elif isinstance(line, EvaluationMetrics):
            found = self._evaluation(line)
        elif isinstance(line, LossSpike | NonfiniteGradient):
            found = self._trouble(line)
        else:
            return []
        fresh = [each for each in found if self.is_news(each)]
        self._said |= {(each.about, each.set) for each in fresh}
        return fresh

    def is_news(self, warning: CurveWarning) -> bool:
        """Whether nothing of the kind was said yet."""
        return (warning.about, warning.set) not in self._said

    def _step(self, line: StepMetrics) -> list[CurveWarning]:
        self._steady = 0 if line.learning_rate > self._rate else self._steady + 1
        self._rate = max(self._rate, line.learning_rate)
        gone = line.applied and line.grad_norm == 0.0
        self._without_gradient = self._without_gradient + 1 if gone else 0
        self._had_gradient |= line.grad_norm is not None and line.grad_norm > 0
        found = []
        if self._without_gradient == DEAD_STEPS:
            fact = f"the gradient was exactly 0 in {DEAD_STEPS} steps: nothing is trained "
            if self._had_gradient:
                fact += (
                    "any more: the weights have left where they answer; lower train.learning_rate "
                    f"(at most {self._rate:.3g} so far)"
                )
            else:
                fact += (
                    "(dead adapters?); look at adapter.targets, and at which tokens `shardtune "
                    "data` shows as trained"
                )
            found.append(_warn(line.step, "dead_adapter", fact, since=line.step - DEAD_STEPS + 1))
        if line.loss is None or not math.isfinite(line.loss):
            return found
        self._losses.append(line.loss)
        if len(self._losses) < WINDOW:
            return found
        recent = list(islice(reversed(self._losses), WINDOW))
        mean = fmean(recent)
        self._means.append((line.step, mean))
        noise = _standard_error(recent, mean)
        found += self._diverged(line.step, mean, noise)
        found += self._stuck(line, mean, noise)
        if self._lowest is None or mean < self._lowest[1]:
            self._lowest = line.step, mean
        return found

    def _diverged(self, step: int, mean: float, noise: float) -> list[CurveWarning]:
        if self._lowest is None or step < self._lowest[0] + WINDOW:
            return []
        since, lowest = self._lowest
        if mean - lowest <= max(DIVERGED * abs(lowest), 4 * noise):
            return []
        fact = (
            f"the training loss diverges: its mean was {lowest:.4g} by step {since} and is "
            f"{mean:.4g} over the last {WINDOW}; try half of train.learning_rate (now at "
            f"{self._rate:.3g}), or go on from a checkpoint before it"
        )
        return [_warn(step, "divergence", fact, since=since)]

    def _stuck(self, line: StepMetrics, mean: float, noise: float) -> list[CurveWarning]:
        """The first and the last window of the steps since the rate stopped rising."""
        if self._steady < STUCK_STEPS + WINDOW or len(self._losses) < STUCK_STEPS + WINDOW:
            return []
        first = list(islice(self._losses, WINDOW))
        before = fmean(first)
        noise += _standard_error(first, before)
        if line.grad_norm == 0.0 or before < LEARNT:
            return []
        if abs(before - mean) > max(STUCK * before, noise):
            return []
        if self._lowest is not None and self._lowest[1] < 0.98 * self._means[0][1]:
            return []  # it has learnt, and is through
        fact = (
            f"the training loss hasn't moved in {STUCK_STEPS} steps ({before:.4g} to {mean:.4g}): "
            f"train.learning_rate ({self._rate:.3g}) may be too low; try ten times as much"
        )
        since = line.step - STUCK_STEPS
        return [_warn(line.step, "learning_rate_too_low", fact, since=since)]

    def _trouble(self, line: LossSpike | NonfiniteGradient) -> list[CurveWarning]:
        self._troubles.append(line.step)
        since = self._troubles[0]
        if len(self._troubles) < MOST_TROUBLES or line.step - since > TROUBLED_STEPS:
            return []
        fact = (
            f"{MOST_TROUBLES} steps since step {since} had a loss out of line or a gradient that "
            f"was not finite: train.learning_rate ({self._rate:.3g}) may be too high; try a third "
            "of it, or a longer warmup"
        )
        return [_warn(line.step, "learning_rate_too_high", fact, since=since)]

    def _evaluation(self, line: EvaluationMetrics) -> list[CurveWarning]:
        if line.loss is None or not math.isfinite(line.loss):
            return []
        past = self._evaluations.setdefault(line.set, [])
        if past and past[-1][0] >= line.step:  # the end of a run evaluates its last step again
            return []
        past.append((line.step, line.loss))
        return self._gets_worse(line.set, past) or self._overfits(line.set, past)

    def _overfits(self, name: str, past: list[tuple[int, float]]) -> list[CurveWarning]:
        at = min(range(len(past)), key=lambda number: past[number][1])
        since, best = past[at]
        step, now = past[-1]
        rising = past[at + 1 :]
        if len(rising) < RISING_EVALUATIONS or now <= best * (1 + RISE):
            return []
        then = next((mean for seen, mean in self._means if seen >= since), None)
        if then is None or self._means[-1][1] >= then:
            return []
        better = f"the checkpoint by step {since}" if since else "the model before training"
        fact = (
            f"held-out set {name}: its loss rises since step {since} ({best:.4g} to {now:.4g}) "
            f"while the training loss falls ({then:.4g} to {self._means[-1][1]:.4g}): overfitting; "
            f"{better} answers better, and fewer epochs would do"
        )
        return [_warn(step, "overfitting", fact, name, since)]

    def _gets_worse(self, name: str, past: list[tuple[int, float]]) -> list[CurveWarning]:
        """One set is worse than it was before training, and others aren't."""
        start, step, now = past[0][1], *past[-1]
        if past[0][0] != 0 or len(past) < RISING_EVALUATIONS or now <= start * (1 + RISE):
            return []
        if past[-2][1] <= start * (1 + RISE):  # it was, the last time, too
            return []
        others = [each for other, each in self._evaluations.items() if other != name]
        better = [each for each in others if len(each) > 1 and each[-1][1] < each[0][1]]
        if not better:
            return []
        fact = (
            f"held-out set {name} gets worse: its loss was {start:.4g} before training and is "
            f"{now:.4g}, while {len(better)} other set{'s' * (len(better) > 1)} got better; add "
            "data of its kind, or train less"
        )
        return [_warn(step, "set_gets_worse", fact, name)]


def _standard_error(values: list[float], mean: float) -> float:
    """How far the mean may be off by chance. `statistics.stdev` is exact, and 50 times slower."""
    return math.sqrt(sum((each - mean) ** 2 for each in values) / (len(values) - 1) / len(values))


def _warn(
    step: int, about: WarningKind, fact: str, name: str | None = None, since: int | None = None
) -> CurveWarning:
    return CurveWarning(kind="warning", step=step, about=about, fact=fact, set=name, since=since)
