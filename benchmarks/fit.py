"""Fits a few positive constants to measurements: damped least squares on logarithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Constants = dict[str, float]
Residuals = Callable[[Constants], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


def fit(
    residuals: Residuals,
    start: Mapping[str, float],
    most: Mapping[str, float],
    *,
    rounds: int = 8,
    stiffness: float = 0.02,
) -> Constants:
    """The constants that make the residuals (logarithms of predicted over measured) small.

    Large residuals count by their size and not by its square, so that a few odd rows don't decide.
    `stiffness` holds each constant near its start unless the rows say otherwise; `most` is what one
    can be at most.
    """
    names = list(start)
    origin = np.log([start[name] for name in names])
    limit = np.log([most.get(name, np.inf) for name in names])

    def at(point: np.ndarray) -> np.ndarray:
        return residuals(dict(zip(names, np.exp(point).tolist(), strict=True)))

    def cost(values: np.ndarray, point: np.ndarray) -> float:
        held = stiffness * len(values) * float(np.square(point - origin).sum())
        return float(np.abs(values).sum()) + held

    point, damping = origin.copy(), 1e-2
    now = at(point)
    for _ in range(rounds):
        weight = 1 / np.maximum(np.abs(now), 0.03)
        step = 0.02
        slopes = np.stack([(at(point + step * unit) - now) / step for unit in np.eye(len(names))])
        normal = (slopes * weight) @ slopes.T
        held = 2 * stiffness * len(now) * np.eye(len(names))
        pull = (slopes * weight) @ now + held @ (point - origin)
        for _ in range(6):
            scaled = normal + held + damping * np.diag(np.diag(normal) + 1e-9)
            tried = point - np.clip(np.linalg.solve(scaled, pull), -0.5, 0.5)
            tried = np.minimum(tried, limit)
            then = at(tried)
            if cost(then, tried) < cost(now, point):
                point, now, damping = tried, then, damping / 3
                break
            damping *= 4
        else:
            break
    return dict(zip(names, np.exp(point).tolist(), strict=True))
