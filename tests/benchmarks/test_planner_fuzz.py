"""A slice of the planner's random jobs, and that the checks can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner_fuzz import RELATIONS, Findings, fuzz, largest, too_slow
from shardtune.core.model.known_models import known_model
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.forecast import Forecast, forecast
from tests.plan.test_search import LORA, job


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "jobs"), [(8, 15), pytest.param(9, 400, marks=pytest.mark.long)])
def test_the_planner_stands_random_jobs(seed: int, jobs: int, tmp_path: Path) -> None:
    told: list[str] = []
    found = fuzz(seed, jobs, tmp_path, report=told.append)
    assert not found.faults
    assert found.jobs == len(found.seconds["estimate"]) == jobs
    assert sum(found.refused.values()) < jobs / 2
    assert found.compared


def grown(found: Forecast, factor: float) -> Forecast:
    sizes = {name: factor * size for name, size in found.memory.gpu.items()}
    return replace(found, memory=replace(found.memory, gpu=sizes))


def test_every_relation_can_be_broken() -> None:
    """Each holds for a true forecast, and not for one in which memory grows or shrinks."""
    whole = forecast(job("llama-3.2-1b"), known_model("llama-3.2-1b"), parse_cluster("2xA40"))
    part = forecast(
        job("llama-3.2-1b", adapter=LORA), known_model("llama-3.2-1b"), parse_cluster("2xA40")
    )
    for relation in RELATIONS:
        before = whole if relation.changed(whole) is not None else part
        after = relation.changed(before)
        assert after is not None
        assert not relation.broken(before, after), relation.name
        wrong = grown(after, 0.01) if "no less" in relation.name else grown(after, 100.0)
        broken = relation.broken(before, wrong)
        assert broken or "buffers" in relation.name, relation.name


def test_more_gradients_are_no_communication_buffers() -> None:
    found = forecast(job("llama-3.2-1b"), known_model("llama-3.2-1b"), parse_cluster("2xA40"))
    relation = next(each for each in RELATIONS if "buffers" in each.name)
    sizes = found.memory.gpu | {"gradients": 2 * found.memory.gpu["gradients"]}
    wrong = replace(found, memory=replace(found.memory, gpu=sizes))
    assert relation.broken(found, wrong)


@pytest.mark.slow
def test_a_slow_command_is_told(tmp_path: Path) -> None:
    found = Findings(seconds={"estimate": [0.01] * 99 + [9.0], "plan": [2.0] * 100})
    (told,) = too_slow(found, 1.0)
    assert told.startswith("plan takes 2.00 s at p99")
    assert largest(tmp_path) < 2.5
