"""What the planner leaves free, and when it calls a job tight."""

from __future__ import annotations

from itertools import islice

import pytest

from shardtune.core.model.known_models import known_model
from shardtune.core.units import GIB
from shardtune.plan.auto_micro_batch import ABOUT_AS_FAST, SPARE, has_room
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.forecast import forecast
from shardtune.plan.search import rank
from tests.plan.test_search import LORA, job
from tests.plan.test_sentences import plans


@pytest.mark.parametrize(("seed", "count"), [(6, 6), pytest.param(7, 150, marks=pytest.mark.long)])
def test_the_best_leaves_the_reserve_and_is_the_roomiest_of_the_fast(seed: int, count: int) -> None:
    for ranking in islice(plans(seed), count):
        best = ranking.best.found if ranking.best else None
        fitting = [each.found for each in ranking.candidates if each.fits and each.found]
        if best is None:
            assert not fitting
            continue
        roomy = [each for each in fitting if has_room(each)]
        assert has_room(best) or not roomy
        if ranking.aim == "memory" or not roomy:
            continue
        fastest = min(each.speed.step.total for each in roomy)
        near = [each for each in roomy if each.speed.step.total <= (1 + ABOUT_AS_FAST) * fastest]
        assert best.speed.step.total <= (1 + ABOUT_AS_FAST) * fastest
        least = min(each.memory.required for each in near)
        assert best.memory.required <= least + SPARE * best.capacity


def test_no_layer_is_recomputed_where_all_may_keep_what_they_save() -> None:
    """Where recomputation costs a small model less than 2 % of a step, the level that takes least
    is filled up with layers that are exempt from it, to the last one."""
    name = "smollm2-135m"
    what = job(name, length=256, adapter=LORA, train={"global_batch": 8})
    for each in rank(what, known_model(name), parse_cluster("8xH100-80GB")).candidates:
        if each.found is not None and each.found.memory.required < 0.1 * each.found.capacity:
            assert each.found.checkpointing == "none", each.name


def test_a_job_near_the_limit_is_tight() -> None:
    """It fits by what is expected; the upper end of its band is above what the card has."""
    name = "llama-3.1-8b"
    what, shape = job(name, adapter=LORA), known_model(name)
    needed = forecast(what, shape, parse_cluster("1xH200")).memory.required / GIB
    verdicts = [
        forecast(what, shape, parse_cluster(f"1xH200:{needed * share:.2f}GiB")).verdict
        for share in (0.99, 1.01, 1.1)
    ]
    assert verdicts == ["does not fit", "tight", "fits"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("1xL4", "the share of its data sheet that runs on RTX4090 reached"),
        ("4xA40", "the share of its data sheet that runs on A5000 reached"),
        ("1xT4", "a guess"),
        ("1xH200", None),
        ("8xA100-40GB", None),
        ("1xRTX3090", None),
    ],
)
def test_times_on_a_card_that_nobody_measured_are_said_to_be_so(
    spec: str, told: str | None
) -> None:
    name = "qwen2.5-0.5b"
    what = job(name, adapter=LORA, train={"precision": "fp16"})
    reasons = forecast(what, known_model(name), parse_cluster(spec)).reasons
    assert [
        each.split("its times are ")[1].split(";")[0] for each in reasons if "times" in each
    ] == ([told] if told else [])


def test_engines_of_others_have_a_wider_band() -> None:
    name, cluster = "llama-3.1-8b", parse_cluster("8xH100-80GB")
    widths = {}
    for each in rank(job(name, adapter=LORA), known_model(name), cluster).candidates:
        assert each.found is not None
        band, needed = each.found.band, each.found.memory.required
        assert band.lower < needed < band.upper
        widths[each.name] = band.upper / needed
    assert widths["zero3"] > widths["fsdp"]


def test_rows_are_counted_once_where_ranks_share_them_unevenly() -> None:
    """Eight rows on three ranks are 3, 3 and 2: two micro-batches of up to two rows on each."""
    name = "llama-3.1-8b"
    what = job(name, adapter=LORA, train={"global_batch": 8, "micro_batch": 2})
    even, uneven = (
        forecast(what, known_model(name), parse_cluster(spec)).speed for spec in ("4xA40", "3xA40")
    )
    assert uneven.tokens == even.tokens == 8 * 2048
    assert uneven.flops == even.flops
