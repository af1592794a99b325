"""The plan form: a model, a cluster and a strategy give the planner's table, a picture and a job.

Only models of the catalogue, and clusters that are written out: what is asked over HTTP must not
name files of this machine, nor make it ask the hub.
"""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from pathlib import Path
from typing import get_args

from pydantic import Field, ValidationError

from shardtune.config.job import IA3, Job, LoRA, NoAdapter
from shardtune.config.model_config import SHAPED_LIKE, shape_of
from shardtune.core.model.known_models import catalogue, is_known
from shardtune.core.record import Record
from shardtune.core.setup import Quantization
from shardtune.errors import JobError, ModelError, Problem
from shardtune.parallel import STRATEGIES
from shardtune.plan.cluster import OPTION, known_gpus, parse_cluster
from shardtune.plan.forecast import Forecast
from shardtune.plan.forecast_summary import ForecastSummary, PlanResult
from shardtune.plan.on_cluster import chosen_precision, resolve_as_asked, resolve_on
from shardtune.plan.ranking_summary import job_text, summarise
from shardtune.plan.search import Ranking, rank
from shardtune.plan.this_machine import offer
from shardtune.report.strategy_picture import StrategyPicture

ADAPTERS = (LoRA().type, NoAdapter().type, IA3().type)
LARGEST_CLUSTER = 4096  # GPUs; a search over more takes long
_ANY = "auto"


class PlanOptions(Record):
    """What the form offers."""

    models: tuple[str, ...]
    gpus: tuple[str, ...]
    strategies: tuple[str, ...]
    """`auto`, which takes the best, and each by its type."""
    adapters: tuple[str, ...]
    quantizations: tuple[str, ...]


class PlanRequest(Record):
    """What the form asks."""

    model: str = Field(max_length=200)
    cluster: str = Field(max_length=100)
    strategy: str = _ANY
    """A strategy's type, or the name of a candidate in the table."""
    adapter: str = ADAPTERS[0]
    quantization: str = "none"
    global_batch: int = 16
    sequence_length: int = 1024
    steps: int = 1000


class PlanAnswer(Record):
    """The planner's table, and the candidate that was chosen."""

    plan: PlanResult
    chosen: str | None
    """The name of a candidate; null where none of the kind can be had."""
    forecast: ForecastSummary | None
    picture: str | None
    """SVG."""
    job: str | None
    """YAML, to be trained as it is but for the path of the data."""


def plan_options() -> PlanOptions:
    return PlanOptions(
        models=tuple(sorted({*SHAPED_LIKE, *(model.name for model in catalogue())}, key=str.lower)),
        gpus=tuple(known_gpus()),
        strategies=(_ANY, *(name for name, kind in STRATEGIES.items() if not kind.planned)),
        adapters=ADAPTERS,
        quantizations=get_args(Quantization),
    )


_one_at_a_time = threading.Lock()


def make_plan_answer(asked: PlanRequest) -> PlanAnswer:
    """JobError or ModelError says what is wrong with what was asked."""
    with _one_at_a_time:
        ranking, result = _ranked(asked.model_copy(update={"strategy": _ANY}))
    found = _chosen(ranking, asked.strategy)
    if found is None:
        return PlanAnswer(plan=result, chosen=None, forecast=None, picture=None, job=None)
    name, forecast = found
    picture = StrategyPicture(name, forecast.job.strategy, forecast.mesh.size)
    return PlanAnswer(
        plan=result,
        chosen=name,
        forecast=ForecastSummary(**dict(forecast.summary())),
        picture=picture.svg(),
        job=job_text(forecast),
    )


@lru_cache(maxsize=16)
def _ranked(asked: PlanRequest) -> tuple[Ranking, PlanResult]:
    text = asked.cluster.strip()
    if text.endswith((".yaml", ".yml", ".json")) or Path(text).exists():
        fact = f"{text!r} is a file, which this page doesn't read"
        raise JobError(Problem(OPTION, fact, "write it out, such as 2x8xH100-80GB@400Gbps"))
    cluster = parse_cluster(text)
    if cluster.gpus > LARGEST_CLUSTER:
        fact = f"{cluster.gpus:,} GPUs are more than {LARGEST_CLUSTER:,}"
        raise JobError(Problem(OPTION, fact, "ask `shardtune plan`, which has the time"))
    job = _job(asked)
    shape = shape_of(job.model)
    resolved = resolve_on(job, cluster)
    ranking = rank(resolved.job, shape, cluster)
    fix = ""
    if ranking.best is None:
        as_asked = resolve_as_asked(job, shape, cluster).job
        fix = offer(as_asked, shape, cluster, written=job)
    return ranking, summarise(ranking, fix, chosen_precision(resolved))


def _job(asked: PlanRequest) -> Job:
    if not is_known(asked.model) and asked.model not in SHAPED_LIKE:
        fact = f"{asked.model!r} is not in the catalogue"
        raise ModelError(Problem("model", fact, "ask `shardtune plan`, which reads folders"))
    sections = {
        "model": {"name": asked.model, "quantization": asked.quantization},
        "adapter": {"type": asked.adapter},
        "data": {
            "train": [{"path": "data/train.jsonl", "format": "chat"}],
            "sequence_length": asked.sequence_length,
        },
        "train": {"steps": asked.steps, "global_batch": asked.global_batch},
    }
    try:
        return Job.model_validate_json(json.dumps(sections))
    except ValidationError as error:
        raise JobError([_told(each["loc"], each["msg"]) for each in error.errors()]) from None


def _told(place: tuple[int | str, ...], fact: str) -> Problem:
    return Problem(".".join(map(str, place)), fact)


def _chosen(ranking: Ranking, strategy: str) -> tuple[str, Forecast] | None:
    """The candidate of this name, or the best of the kind, whether it fits or not."""
    found = [(each.name, each.found) for each in ranking.candidates if each.found is not None]
    named = (each for each in found if each[0] == strategy)
    kind = (each for each in found if strategy in (_ANY, each[1].job.strategy.type))
    return next(named, None) or next(kind, None)
