"""What the planner says of its candidates, taken apart and compared with their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.random_jobs import draw
from shardtune.core.units import GIB
from shardtune.errors import ShardtuneError
from shardtune.plan.estimate.step_time import estimate_speed
from shardtune.plan.explain import ALIKE, CLASS_WORDS, Aim
from shardtune.plan.forecast import Forecast
from shardtune.plan.on_cluster import resolve_on
from shardtune.plan.search import Ranking, rank

NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
OVER = re.compile(
    rf"{NUMBER} GiB over at micro-batch (\d+)(, with activation checkpointing)?; "
    rf"([a-z ]+) are {NUMBER} GiB"
)
HOST = re.compile(rf"a node needs {NUMBER} GiB of CPU memory and has {NUMBER}")
IF_HOST = re.compile(rf", if a node has {NUMBER} GiB of CPU memory$")
IF_LOAD = re.compile(rf", if the busiest rank's experts get {NUMBER} x the mean of tokens$")
PRAISE = re.compile(
    rf"(?:fits|tight) with {NUMBER} GiB to spare(?:; {NUMBER}% of the time goes to (.+))?"
)
ALIKE_TIME = re.compile(rf"(?:fits|tight), as fast, with {NUMBER} GiB (more|less)")
BY_MEMORY = re.compile(rf"(?:fits|tight), with {NUMBER} GiB (more|less), (.+)")
SLOWER = re.compile(r"(?:fits|tight), ([^:]+): (.+)")
TIMES = re.compile(rf"{NUMBER}(% slower|% less time| x as slow| x as fast)")
CAUSE = re.compile(rf"{NUMBER} (s|ms) more (?:for )?(.+)")
MOVES = {
    "gathers of weights": ("all_gather", {"params", "recalled", "trained"}),
    "reductions of gradients": (("reduce_scatter", "all_reduce"), {"grads", "unsliced", "tied"}),
    "reductions of activations": ("all_reduce", {"hidden", "embedded", "scores"}),
    "sending activations": ("send_recv", {"hidden"}),
    "sending tokens to experts and back": ("all_to_all", {"routed"}),
}


def figure(text: str) -> float:
    return float(text.replace(",", ""))


def plans(seed: int) -> Iterator[Ranking]:
    """Rankings of random jobs, by time and by memory."""
    aims: tuple[Aim, ...] = ("time", "cost", "memory")
    for number, drawn in enumerate(draw(seed)):
        with suppress(ShardtuneError):  # a job that can't be had on this cluster
            job = resolve_on(drawn.job, drawn.cluster).job
            yield rank(job, drawn.shape, drawn.cluster, aims[number % 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "plans_of"), [(1, 6), pytest.param(2, 200, marks=pytest.mark.long)]
)
def test_each_sentence_says_what_the_numbers_say(seed: int, plans_of: int) -> None:
    kinds = set()
    for ranking in islice(plans(seed), plans_of):
        best = ranking.best.found if ranking.best else None
        for each in ranking.candidates:
            if each.found is None:
                assert each.why.startswith("can't be had: ")
                continue
            assert not re.search(r"-\d|\d{3,}%|nobody", each.why), each.why
            kinds.add(checked(each.why, each.found, best, ranking.aim))
    assert {"over", "praise", "slower", "by memory"} <= kinds


def checked(why: str, found: Forecast, best: Forecast | None, aim: Aim) -> str:
    """The kind of sentence that it is; every word of it was compared with the forecast."""
    sentence, load = IF_LOAD.sub("", why), IF_LOAD.search(why)
    assert bool(load) == (found.fits and found.mesh.size_of("expert") > 1)
    if load:
        assert figure(load[1]) == pytest.approx(found.imbalance, abs=0.0051)
    sentence, provided = IF_HOST.sub("", sentence), IF_HOST.search(sentence)
    states = found.fits and found.memory.host > 0 and found.cluster.host_gib is None
    assert bool(provided) == states
    if provided:
        assert figure(provided[1]) == pytest.approx(found.host / GIB, rel=0.05, abs=0.01)
    if over := OVER.fullmatch(sentence):
        assert figure(over[1]) == pytest.approx(found.over / GIB, abs=0.051)
        assert int(over[2]) == found.work.micro_batch
        assert bool(over[3]) == (found.work.checkpointing != "none")
        sizes = {CLASS_WORDS[name]: size for name, size in found.memory.gpu.items()}
        assert sizes[over[4]] == max(sizes.values())
        assert figure(over[5]) == pytest.approx(sizes[over[4]] / GIB, abs=0.051)
        return "over"
    if host := HOST.fullmatch(sentence):
        assert found.over <= 0 < found.host_over
        assert figure(host[1]) == pytest.approx(found.host / GIB, abs=0.51)
        return "host"
    assert sentence.startswith(found.verdict)
    assert best is not None
    if praise := PRAISE.fullmatch(sentence):
        assert found is best
        assert figure(praise[1]) == pytest.approx(-found.over / GIB, abs=0.051)
        check_wait(praise[2], praise[3], found)
        return "praise"
    more = (found.memory.required - best.memory.required) / GIB
    ours, theirs = found.speed.step.total, best.speed.step.total
    if alike := ALIKE_TIME.fullmatch(sentence):
        assert abs(ours / theirs - 1) < ALIKE
        check_more(alike[1], alike[2], more)
        return "alike"
    if by_memory := BY_MEMORY.fullmatch(sentence):
        assert aim == "memory" or ours < theirs
        check_more(by_memory[1], by_memory[2], more)
        check_times(by_memory[3], ours / theirs)
        return "by memory"
    slower = SLOWER.fullmatch(sentence)
    assert slower is not None, sentence
    check_times(slower[1], ours / theirs)
    check_causes(slower[2], found, best)
    return "slower"


def check_more(said: str, which: str, more: float) -> None:
    assert figure(said) == pytest.approx(abs(more), abs=0.051)
    assert which == ("more" if more >= 0 else "less")


def check_times(said: str, ratio: float) -> None:
    found = TIMES.fullmatch(said)
    assert found is not None, said
    value = figure(found[1])
    expected = {
        "% slower": 100 * (ratio - 1),
        "% less time": 100 * (1 - ratio),
        " x as slow": ratio,
        " x as fast": 1 / ratio,
    }[found[2]]
    assert value == pytest.approx(expected, abs=0.051 if value < 10 and " x" in found[2] else 0.51)
    assert (value >= 2) if " x" in found[2] else (value < 100)


def check_wait(percent: str | None, part: str | None, found: Forecast) -> None:
    """The largest of what isn't computing, with its share."""
    step = found.speed.step
    waits = {"communication": step.communication, "offload": step.offload, "the": step.bubble}
    largest = max(waits.values())
    if part is None or percent is None:
        assert largest / step.total <= 0.02
        return
    assert waits[re.split(r"\W", part)[0]] == largest
    assert float(percent) == pytest.approx(100 * largest / step.total, abs=0.51)
    check_move(part, found)


def check_move(part: str, found: Forecast) -> None:
    """Which message is waited for longest, and over which link it goes."""
    named = re.fullmatch(r"communication, most of it (.+) on (.+)", part)
    if named is None:
        return
    longest = max(found.speed.waits, key=lambda each: each.seconds)
    ops, cargo = MOVES[named[1]]
    assert longest.op in ops
    assert longest.what in cargo
    assert ("network" in named[2]) == (longest.where == "inter_node")
    together = sum(each.seconds for each in found.speed.waits)
    assert together == pytest.approx(found.speed.step.communication)


def check_causes(said: str, found: Forecast, best: Forecast) -> None:
    """Each cause is as long as it is said to be, the first the longest of all."""
    causes = losses(found, best)
    told = []
    for text in said.split("; "):
        cause = CAUSE.fullmatch(text)
        assert cause is not None, text
        name = next(name for name in causes if cause[3].startswith(name))
        value = figure(cause[1]) / (1 if cause[2] == "s" else 1000)
        assert value == pytest.approx(causes[name], abs=0.0051 if cause[2] == "s" else 0.000051)
        if name == "communication":
            check_move(cause[3], found)
        told.append(name)
    assert told == sorted(causes, key=lambda name: -causes[name])[: len(told)]


def losses(found: Forecast, best: Forecast) -> dict[str, float]:
    """Seconds that a candidate loses, by the words that its sentence begins with."""
    ours, theirs = found.speed.step, best.speed.step
    lost = {
        "communication": ours.communication - theirs.communication,
        "offload": ours.offload - theirs.offload,
        "the pipeline bubble": ours.bubble - theirs.bubble,
        "the optimizer's update": ours.optimizer - theirs.optimizer,
    }
    matmuls = ours.compute - theirs.compute

    def spared(**change: object) -> float:
        work = replace(found.work, **change)  # type: ignore[arg-type]
        other = estimate_speed(found.layout, found.shape, found.mesh, found.cluster, work)
        return ours.compute - other.step.compute

    if found.work.checkpointing not in ("none", best.work.checkpointing):
        level, kept = best.work.checkpointing, best.work.kept_layers
        lost["recomputation"] = spared(checkpointing=level, kept_layers=kept)
        matmuls -= lost["recomputation"]
    if (found.work.kernels, best.work.kernels) == ("eager", "compiled"):
        lost["because its layers"] = spared(kernels="compiled")
        matmuls -= lost["because its layers"]
    return lost | {"matmuls": matmuls}
