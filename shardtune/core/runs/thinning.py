"""Thinning of a curve that has more points than a screen, without losing a spike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SMOOTHED_PART = 40  # a smoothed loss is the mean over this part of what is drawn, to either side


def thin_indices(values: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.int64]:
    """Which of the points to draw, in their order: both ends, and of each stretch between them the
    least and the greatest that are finite. At most `most`, and 4 at least."""
    if len(values) <= max(most, 4):
        return np.arange(len(values))
    stretches = (max(most, 4) - 2) // 2
    begins = 1 + (len(values) - 2) * np.arange(stretches) // stretches
    inner, finite = values[1:-1], np.isfinite(values[1:-1])
    number = np.repeat(np.arange(stretches), np.diff(np.append(begins, len(values) - 1)))
    kept = [0, len(values) - 1]
    for sign in (1.0, -1.0):
        order = np.lexsort((np.where(finite, sign * inner, np.inf), number))
        first = order[begins - 1]  # of each stretch: the orders of stretches stand one by one
        kept += (1 + first[finite[first]]).tolist()
    return np.unique(kept)
