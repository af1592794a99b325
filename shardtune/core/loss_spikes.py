"""Tells a loss that is out of line from the ordinary up and down."""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 32  # losses that are remembered
ENOUGH = 8  # before that nothing is known about the ordinary
FAR = 8.0  # times the ordinary distance from the median; 8 is once in a great many steps
LEAST = 0.5  # and at least so much of the median: a flat curve has next to no distance


class Spikes:
    """The losses of the last steps. The median forgives those spikes that are among them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def see(self, loss: float) -> float | None:
        """Takes a step's loss, a finite one; returns the usual one if this is far above it."""
        spike = None
        if len(self._losses) >= ENOUGH:
            usual = median(self._losses)
            distance = median(abs(each - usual) for each in self._losses)
            if loss - usual > max(FAR * 1.4826 * distance, LEAST * abs(usual)):
                spike = usual
        self._losses.append(loss)
        return spike
