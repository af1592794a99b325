"""Asks the estimator about published measurements, and judges its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.cases import GIB, USABLE, Case, Unknown
from benchmarks.contradictions import LayerKind, kind_of
from benchmarks.peers import read_peers
from benchmarks.published import read_iterations, read_points
from shardtune.errors import ShardtuneError
from shardtune.plan.cluster import Cluster, Gpu, find_gpu
from shardtune.plan.estimate.constants import (
    CHIPS,
    MEMORY,
    TIME,
    Chip,
    MemoryConstants,
    TimeConstants,
    beginning_of,
)
from shardtune.plan.estimate.memory import estimate_memory
from shardtune.plan.estimate.memory_band import MemoryBand, memory_band
from shardtune.plan.estimate.step_time import estimate_speed

REFERENCE = Path(__file__).parents[2] / "shared" / "reference"
SINGLE = "a100_iteration_times_single_node"
SEVERAL = "a100_iteration_times_multi_node"
PEERS = "peers on one H200"

LIMITED = Gpu("H100-96GB-500W", 94.0, 989.4, 989.4, 2400, 450, "switch", 63.0, "torchtitan")
"""torchtitan's H100: HBM2e, limited to 500 W."""
NETWORK = {"A100": 1600.0, "H100": 3200.0, "H200": 3200.0}
"""Gbit/s between nodes where a source doesn't say: what DGX and its likes have."""
ITERATIONS_NETWORK = 1600.0
"""Of the iteration times on several nodes, which don't say: the eight adapters of 200 Gbit/s that a
DGX A100 has. vTrain simulates them with 800; then more than all of that bandwidth is fitted, and
the mean error is 11.4 instead of 9.0 %."""


@dataclass(frozen=True)
class Constants:
    """What may be fitted."""

    chips: dict[str, Chip] = field(default_factory=lambda: dict(CHIPS))
    time: TimeConstants = TIME
    memory: MemoryConstants = MEMORY


# Prediction --------------------------------------------------------------------------------------


def cluster_of(case: Case) -> Cluster:
    """The machines of a measurement."""
    name = case.gpu.split(" (")[0]
    gpu = LIMITED if name.startswith("H100-96GB") else find_gpu(name)
    link = case.link or NETWORK.get(gpu.name[:4], 400.0)
    if case.metric == "iteration":
        link = ITERATIONS_NETWORK
    per_node = max(1, case.mesh.size // case.nodes)
    inside = "nvlink" if gpu.nvlink == "switch" else "pcie"
    return Cluster(case.gpu, gpu, case.nodes, per_node, inside, link)


def capacity_of(case: Case) -> float:
    """GiB of the device; where only a size is named, what such a card has for use."""
    try:
        return find_gpu(case.gpu.split(" (")[0]).memory_gib
    except ShardtuneError:
        if case.gpu.startswith("H100-96GB"):
            return LIMITED.memory_gib
        size = "".join(c for c in case.gpu.split("GB")[0].split(" ")[-1] if c.isdigit())
        return USABLE * float(size)


def predict(case: Case, constants: Constants) -> float:
    """In the unit of the measurement."""
    if case.metric == "memory":
        memory = estimate_memory(case.layout, case.shape, case.mesh, case.work, constants.memory)
        # When memory is short, torch gives back blocks that it has cached.
        short = min(memory.cached, max(0.0, memory.peak - capacity_of(case) * GIB))
        counted = {
            "allocated": memory.allocated,
            "reserved": memory.reserved - short,
            "device": memory.peak - short,
            "required": memory.required,
        }
        return counted[case.counts] / GIB
    cluster = cluster_of(case)
    speed = estimate_speed(
        case.layout,
        case.shape,
        case.mesh,
        cluster,
        case.work,
        chip=constants.chips[beginning_of(cluster.gpu.name)],
        time=constants.time,
    )
    return speed.step.total if case.metric == "iteration" else speed.tokens_per_second_per_gpu


def required(case: Case, constants: Constants) -> float:
    """GiB that must fit."""
    memory = estimate_memory(case.layout, case.shape, case.mesh, case.work, constants.memory)
    return memory.required / GIB


def errors(cases: Sequence[Case], constants: Constants) -> np.ndarray:
    """Predicted over measured, less one."""
    return np.array([predict(c, constants) / c.measured - 1 for c in cases if c.measured])


def halves(cases: Iterable[Case]) -> tuple[list[Case], list[Case]]:
    """Every second measurement of a source for fitting, the others for judging."""
    seen: Counter[tuple[str, str]] = Counter()
    parts: tuple[list[Case], list[Case]] = ([], [])
    for case in cases:
        key = (case.source, case.metric)
        parts[seen[key] % 2].append(case)
        seen[key] += 1
    return parts


# Judging -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """One line of the table."""

    name: str
    count: int
    median: float
    high: float
    mean: float


def score(name: str, cases: Sequence[Case], constants: Constants) -> Score:
    found = np.abs(errors(cases, constants))
    return Score(
        name,
        len(found),
        float(np.median(found)),
        float(np.quantile(found, 0.9)),
        float(found.mean()),
    )


LEEWAY = 0.1
"""A row that says how long a context just fits says that a tenth less fits and a tenth more not."""


def fits(
    cases: Sequence[Case], constants: Constants, *, upper: bool = False
) -> list[tuple[Case, bool, bool]]:
    """Each statement that a run fitted or didn't, and whether the estimate agrees: by what it
    expects, or by the upper end of the band around that."""

    def fit(case: Case) -> bool:
        needed = required(case, constants)
        return (band_of(case, needed).upper if upper else needed) <= capacity_of(case)

    found = []
    for case in cases:
        if case.metric != "memory":
            continue
        if case.source == "unsloth.ai":
            for factor, fitting in ((1 - LEEWAY, True), (1 + LEEWAY, False)):
                length = round(case.work.sequence * factor)
                other = replace(case, work=replace(case.work, sequence=length))
                found.append((case, fitting, fit(other) == fitting))
        else:
            ran = case.measured is not None
            found.append((case, ran, fit(case) == ran))
    return found


def band_of(case: Case, size: float) -> MemoryBand:
    """The band around a forecast of `size` GiB, in GiB."""
    in_parts = max(case.mesh.size_of("tensor"), case.mesh.size_of("pipeline")) > 1
    band = memory_band(size * GIB, case.work, in_parts=in_parts)
    return MemoryBand(band.lower / GIB, band.upper / GIB)


def _is_inside(case: Case, constants: Constants) -> bool:
    assert case.measured is not None
    band = band_of(case, predict(case, constants))
    return band.lower <= case.measured <= band.upper


@dataclass(frozen=True)
class SlicedError:
    """Mean error of the iteration times with one degree of tensor parallelism."""

    count: int
    mean: float
    agreeing: int
    """How many are of layers whose measured times don't contradict those of others."""
    mean_agreeing: float


@dataclass(frozen=True)
class Judgement:
    """All that is printed."""

    memory: list[Score]
    throughput: list[Score]
    iterations: list[Score]
    fitting: tuple[int, int]
    did_not: int
    """Of the statements about fitting, how many say that it didn't."""
    missed: int
    """Of those, how many the estimate says fit."""
    missed_by_band: int
    """Of those, how many it says fit with the upper end of their band, so not even tightly."""
    inside: tuple[int, int]
    """Measurements of memory in the band of their forecast, and how many there are."""
    apart: list[Score]
    tensor: dict[int, SlicedError]
    """Iteration times of one node by the degree of tensor parallelism."""
    far: list[tuple[Case, float]]
    misjudged: list[Case]


def judge(
    cases: Sequence[Case], constants: Constants, contradictory: Collection[LayerKind] = ()
) -> Judgement:
    """The errors of these cases: by source, then all together, which stands last."""
    plain = [case for case in cases if not case.apart and case.source != PEERS]
    groups = {
        reason: [case for case in cases if case.apart == reason]
        for reason in dict.fromkeys(case.apart for case in cases if case.apart)
    }
    groups[PEERS] = [case for case in cases if case.source == PEERS]

    def scores(metric: str) -> list[Score]:
        mine = [case for case in plain if case.metric == metric and case.measured]
        sources = dict.fromkeys(case.source for case in mine)
        each = [score(s, [c for c in mine if c.source == s], constants) for s in sources]
        return [*each, score("all", mine, constants)]

    agreed = fits(plain, constants)
    apart = [
        score(f"{name}: {metric}", chosen, constants)
        for name, group in groups.items()
        for metric in ("memory", "throughput")
        if (chosen := [case for case in group if case.metric == metric and case.measured])
    ]
    measured = [case for case in plain if case.measured]
    weighed = [case for case in measured if case.metric == "memory"]
    limits = {"memory": 0.12, "throughput": 0.3, "iteration": 0.3}
    far = [
        (case, error)
        for case, error in zip(measured, errors(measured, constants).tolist(), strict=True)
        if abs(error) > limits[case.metric]
    ]
    return Judgement(
        scores("memory"),
        scores("throughput"),
        scores("iteration"),
        (sum(right for _, _, right in agreed), len(agreed)),
        sum(not fitting for _, fitting, _ in agreed),
        sum(not fitting and not right for _, fitting, right in agreed),
        sum(not ran and not right for _, ran, right in fits(plain, constants, upper=True)),
        (sum(_is_inside(case, constants) for case in weighed), len(weighed)),
        apart,
        _by_degree([c for c in measured if c.source == SINGLE], constants, contradictory),
        far,
        [case for case, _, right in agreed if not right],
    )


def _by_degree(
    cases: Sequence[Case], constants: Constants, contradictory: Collection[LayerKind]
) -> dict[int, SlicedError]:
    def mean(chosen: Sequence[Case]) -> float:
        return float(np.abs(errors(chosen, constants)).mean())

    found = {}
    for degree in (1, 2, 4, 8):
        mine = [case for case in cases if case.mesh.size_of("tensor") == degree]
        agreeing = [case for case in mine if kind_of(case) not in contradictory]
        if agreeing:
            found[degree] = SlicedError(len(mine), mean(mine), len(agreeing), mean(agreeing))
    return found


def read_all(reference: Path) -> tuple[list[Case], list[Unknown]]:
    """Every measurement of the reference, and what can't be used of it."""
    rows = list(read_points(reference / "published_points.csv"))
    cases = [row for row in rows if isinstance(row, Case)]
    cases += read_iterations(reference / f"{SINGLE}.csv", nodes=False)
    cases += read_iterations(reference / f"{SEVERAL}.csv", nodes=True)
    cases += read_peers(reference / "gpu.md")
    return cases, [row for row in rows if isinstance(row, Unknown)]
