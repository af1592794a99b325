"""What the kind of a model forbids a job; planner and trainer say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.api import forecast, rank_strategies
from shardtune.cli.starter_facts import look_at_model
from shardtune.config.auto import resolve
from shardtune.config.model_rules import check_model
from shardtune.core.host.machine import Machine
from shardtune.core.model.kind import require_trained_family
from shardtune.core.model.known_models import known_model
from shardtune.errors import JobError, ModelError, Problem
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.on_cluster import resolve_on
from shardtune.plan.search import rank
from shardtune.training.inputs import open_inputs
from tests.jobs import make_job

FLAN = {"name": "google/flan-t5-xl"}


def told(kind: Any, **sections: Any) -> list[Problem]:
    try:
        check_model(make_job(**sections), kind)
    except JobError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("sections", "place"),
    [
        ({"strategy": {"type": "tensor", "degree": 2}}, "strategy.type"),
        ({"strategy": {"type": "pipeline", "stages": 2}}, "strategy.type"),
        ({"strategy": {"type": "layers", "stages": 2}}, "strategy.type"),
        ({"strategy": {"type": "fsdp", "tensor": 2}}, "strategy.type"),
        ({"data": {"packing": True}}, "data.packing"),
        ({"train": {"kernels": "compiled"}}, "train.kernels"),
        ({"train": {"loss": "fused"}}, "train.loss"),
        ({"train": {"gradient_checkpointing": "mlp"}}, "train.gradient_checkpointing"),
        ({"model": {"name": "tiny", "quantization": "fp8"}}, "model.quantization"),
        ({"model": {"name": "tiny", "quantization": "nf4"}}, "model.quantization"),
    ],
)
def test_both_halves_are_refused_what_is_made_for_one(sections: dict[str, Any], place: str) -> None:
    (problem,) = told("encoder_decoder", **sections)
    assert problem.place == place
    assert problem.fix
    assert not told("decoder", **sections)


@pytest.mark.parametrize(
    "strategy",
    [
        {"type": "ddp"},
        {"type": "fsdp"},
        {"type": "fsdp", "sharding": "hybrid", "replicas": 2},
        {"type": "tensor", "degree": 1},
        *({"type": "deepspeed", "zero_optimization": {"stage": stage}} for stage in range(4)),
    ],
    ids=str,
)
def test_what_takes_both_halves(strategy: dict[str, Any]) -> None:
    assert not told("encoder_decoder", strategy=strategy)


def test_a_fix_names_strategies_that_take_both() -> None:
    (problem,) = told("encoder_decoder", strategy={"type": "pipeline", "stages": 2})
    for name in ("ddp", "fsdp", "deepspeed"):
        assert name in problem.fix
    assert "encoder's output" in problem.fact


def test_a_target_of_its_own_needs_an_encoder() -> None:
    data = {"target_length": 64}
    assert not told("encoder_decoder", data=data)
    (problem,) = told("decoder", data=data)
    assert problem.place == "data.target_length"


def test_on_a_gpu_both_halves_run_as_written() -> None:
    job = make_job(model=FLAN)
    found = resolve(job, Machine(cores=8, gpus=1)).job
    assert (found.train.kernels, found.train.loss) == ("eager", "plain")
    assert found.data.packing is False
    found = resolve_on(job, parse_cluster("8xA100-80GB")).job
    assert (found.train.kernels, found.train.loss) == ("eager", "plain")


def test_the_planner_ranks_what_can_be_trained() -> None:
    shape, cluster = known_model("google/flan-t5-xl"), parse_cluster("8xA100-80GB")
    ranking = rank(resolve_on(make_job(model=FLAN), cluster).job, shape, cluster)
    possible = {each.name.partition("(")[0] for each in ranking.candidates if each.found}
    assert {"ddp", "fsdp", "zero3"} <= possible
    assert not any("tensor" in name or "pipeline" in name for name in possible)
    refused = next(each for each in ranking.candidates if each.name == "tensor or pipeline")
    assert "encoder" in refused.refused


@pytest.mark.parametrize("family", ["m2m_100", "mbart", "pegasus", "umt5"])
def test_families_whose_targets_nobody_has_tried_are_refused_by_all(
    family: str, tmp_path: Path
) -> None:
    """NLLB (`m2m_100`) and mBART put the language before a target, in a mode of the tokenizer."""
    (problem,) = said_by_all(tmp_path, {"model_type": family, "is_encoder_decoder": True})
    assert f"'{family}'" in problem.fact
    assert problem.fix.endswith("bart, mt5, t5")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert"},
        {"model_type": "xlm-roberta", "is_decoder": False},
        {"model_type": "xlm", "causal": False},
    ],
)
def test_models_that_see_what_they_predict_are_refused_by_all(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """transformers has a class for BERT as a language model, and warns at most."""
    (problem,) = said_by_all(tmp_path, config)
    assert "sees a whole text at once" in problem.fact
    causal = {key: True for key in config if key != "model_type"} or {"is_decoder": True}
    require_trained_family(config | causal, "NAME")


def said_by_all(folder: Path, config: dict[str, Any]) -> set[Problem]:
    """What whoever asks for a model of this config.json is told."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    job = make_job(model={"name": str(folder)})
    asked = (
        lambda: forecast(job, "8xA100-80GB"),
        lambda: rank_strategies(job, "8xA100-80GB"),
        lambda: look_at_model(str(folder)),
        lambda: open_inputs(resolve(job, Machine(cores=2, gpus=0)).job, quiet=True),
    )
    told = set()
    for ask in asked:
        with pytest.raises(ModelError) as caught:
            ask()
        told.update(caught.value.problems)
    return told
