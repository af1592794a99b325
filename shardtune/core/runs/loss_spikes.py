"""Tells a loss that is out of line from the ordinary up and down."""

from __future__ import annotations

from collections import deque
from statistics import median

LOSS_WINDOW = 32  # losses that are remembered
MIN_LOSSES = 8  # before that nothing is known about the ordinary
SPIKE_DEVIATIONS = 8.0  # times the median deviation: once in a great many steps
SPIKE_RATIO = 0.5  # and at least so much of the median: a flat curve has next to no distance


class LossSpikes:
    """The losses of the last steps. The median forgives those spikes that are among them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=LOSS_WINDOW)

    def see(self, loss: float) -> float | None:
        """Takes a step's loss, a finite one; returns the usual one if this is far above it."""
        spike = None
        if len(self._losses) >= MIN_LOSSES:
            usual = median(self._losses)
            distance = median(abs(each - usual) for each in self._losses)
            if loss - usual > max(SPIKE_DEVIATIONS * 1.4826 * distance, SPIKE_RATIO * abs(usual)):
                spike = usual
        self._losses.append(loss)
        return spike
