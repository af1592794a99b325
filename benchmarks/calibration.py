"""Fits the constants of the estimator on measurements, those of one GPU type after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.cases import Case
from benchmarks.fit import fit
from benchmarks.judging import SINGLE, Constants, cluster_of, errors
from benchmarks.sources import LENGTHS
from shardtune.plan.estimate.constants import beginning_of

SHARED = (
    *("launch", "start", "sharpness", "joint_sharpness", "straggling", "unaligned"),
    *("fused_passes", "eager_passes", "compiled_passes"),
)
"""Of the host and the operations: fitted with the A100, of which there is most."""
FITTED: dict[str, tuple[str, ...]] = {
    "A100": ("matmul", "attention", "memory", "link", "clash"),
    "H100": ("matmul", "attention", "memory", "fp8", "clash", "link"),
    "H100-96GB-500W": ("matmul", "attention", "memory", "fp8", "clash", "link"),
    "H200": ("matmul", "sdpa", "memory"),
    "RTX3": ("matmul", "attention", "link", "clash"),
    "RTX4": ("matmul", "attention", "link", "clash"),
}
MOST = {
    **{"matmul": 1.0, "attention": 0.8, "memory": 0.9, "link": 1.0, "network": 1.0, "clash": 1.0},
    **{"stale": 1.0, "mismatch": 1.0, "fp8": 2.0},
}
"""No share is more than all; flash attention and memory have never been seen above these."""
FITTED_MEMORY = (
    "plain_logit",
    "shifted_logit",
    "chunked_logit",
    "fragmentation",
    "mismatch",
    "stale",
)
ITERATIONS_SAMPLE = 5
"""Of the single-node times one in so many is enough to fit, and quicker."""


def fitting_cases(cases: Sequence[Case]) -> list[Case]:
    """Those that constants are fitted on."""
    known = [case for case in cases if case.measured and not case.apart]
    single = [case for case in known if case.source == SINGLE][::ITERATIONS_SAMPLE]
    return [case for case in known if case.source != SINGLE] + single


def fit_all(cases: Sequence[Case], start: Constants) -> Constants:
    """Fits on these cases; the constants of one GPU type after the other."""
    known = fitting_cases(cases)
    constants = _fit_memory([c for c in known if c.metric == "memory"], start)
    varying = [c for c in cases if c.measured and c.apart == LENGTHS and c.metric == "memory"]
    constants = _fit_memory(varying, constants, ("variable",))
    timed = [case for case in known if case.metric != "memory"]
    for chip, names in FITTED.items():
        mine = [c for c in timed if beginning_of(cluster_of(c).gpu.name) == chip]
        constants = fit_chip(mine, constants, chip, names, SHARED if chip == "A100" else ())
    return constants


def _logarithms(cases: Sequence[Case], constants: Constants) -> np.ndarray:
    return np.log1p(errors(cases, constants))


def _fit_memory(
    cases: Sequence[Case], start: Constants, names: Sequence[str] = FITTED_MEMORY
) -> Constants:
    def made(values: dict[str, float]) -> Constants:
        return replace(start, memory=replace(start.memory, **values))

    found = fit(
        lambda values: _logarithms(cases, made(values)),
        {name: getattr(start.memory, name) for name in names},
        MOST,
        stiffness=0.005,
    )
    return made(found)


def fit_chip(
    cases: Sequence[Case], start: Constants, chip: str, own: Sequence[str], shared: Sequence[str]
) -> Constants:
    def made(values: dict[str, float]) -> Constants:
        new = replace(start.chips[chip], **{name: values[name] for name in own})
        time = replace(start.time, **{name: values[name] for name in shared})
        return replace(start, chips=start.chips | {chip: new}, time=time)

    begin = {name: getattr(start.chips[chip], name) for name in own}
    begin |= {name: getattr(start.time, name) for name in shared}
    found = fit(lambda values: _logarithms(cases, made(values)), begin, MOST, stiffness=0.01)
    return made(found)
