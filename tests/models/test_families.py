"""Every family of the table trains by default: the losses are those of plain transformers and peft,
on one process, under DDP and under FSDP."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from shardtune import forecast, rank_strategies
from shardtune.config.job import Job, LoRA
from shardtune.core.model.architectures import SHAPE_READERS
from shardtune.core.model.parallel_plan import SHARDABLE_FAMILIES
from shardtune.core.world import World
from shardtune.errors import ShardtuneError
from shardtune.models.load import check_weights
from shardtune.models.materialize import decoder_layers, without_memory
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization.swap import quantizable
from shardtune.parallel import Strategy
from shardtune.training.inputs import require_cuttable
from tests.models.families import CONFIGS, MULTIMODAL, UNLISTED, config
from tests.models.family_runs import (
    ADAPTERS,
    Outcome,
    family_job,
    plain_losses,
    run,
    run_all,
    write_family,
)
from tests.ranks import on_ranks

SAME = 1e-5
ALL_FAMILIES_S = 1200  # seconds that two ranks may take for all of them, on a busy machine
QUICK = ("bloom", "gemma2", "gptj", "mixtral")
"""As unlike as families get; the others take minutes together."""
STRATEGIES = ("ddp", "fsdp")
MIXTURES = {name for name, family in SHARDABLE_FAMILIES.items() if not family.slices}
"""Mixtures of experts that can be cut into stages."""

Case = tuple[str, str, str]
pytestmark = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not"  # plain peft's, of experts
)


def rows(families: Collection[str] = CONFIGS) -> list[Any]:
    slow = [pytest.mark.long]
    return [pytest.param(name, marks=() if name in QUICK else slow) for name in sorted(families)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, chosen: set[str]) -> Path:
    """The tiny models of all families that are tested."""
    path = tmp_path_factory.mktemp("families")
    for family in sorted(chosen):
        write_family(path, family)
    return path


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> set[str]:
    """The families of those tests that run."""
    here = [item for item in request.session.items if item.path == request.path]
    calls = (getattr(item, "callspec", None) for item in here)
    return {call.params["family"] for call in calls if call and "family" in call.params}


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path, chosen: set[str]) -> dict[Case, Outcome]:
    """All families under all strategies, one after the other on the same two ranks."""
    cases = [(f, adapter, s) for f in sorted(chosen) for adapter in ADAPTERS for s in STRATEGIES]
    found: dict[Case, Outcome] = on_ranks(2, run_all, folder, cases, timeout=ALL_FAMILIES_S)[0]
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    known: dict[tuple[str, str], list[float]] = {}

    def losses(family: str, adapter: str) -> list[float]:
        if (family, adapter) not in known:
            job = family_job(folder, family, adapter, "ddp", 1)
            known[family, adapter] = plain_losses(job)
        return known[family, adapter]

    return losses


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", rows())
def test_one_process(family: str, adapter: str, folder: Path, plain: Any) -> None:
    found = run(World(), family_job(folder, family, adapter, "ddp", 1))
    assert not found.refused
    assert found.losses == pytest.approx(plain(family, adapter), rel=SAME)


@pytest.mark.timeout(ALL_FAMILIES_S)  # the first of them waits for all families
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", rows())
def test_two_ranks(
    family: str, adapter: str, strategy: str, on_two_ranks: dict[Case, Outcome], plain: Any
) -> None:
    found = on_two_ranks[family, adapter, strategy]
    assert not found.refused
    assert found.losses == pytest.approx(plain(family, adapter), rel=SAME)


@pytest.mark.timeout(ALL_FAMILIES_S)  # the first of them waits for all families
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", [*MULTIMODAL, *UNLISTED])
def test_two_ranks_train_what_has_weights_without_a_gradient(
    family: str, adapter: str, strategy: str, on_two_ranks: dict[Case, Outcome], plain: Any
) -> None:
    """Encoders of pictures, which text never reaches, and what only chooses experts or tokens."""
    found = on_two_ranks[family, adapter, strategy]
    assert not found.refused
    assert found.losses == pytest.approx(plain(family, adapter), rel=SAME)


@pytest.mark.long
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_stages_of_mixtures(family: str, adapter: str, folder: Path, plain: Any) -> None:
    """A pipeline's ranks share their rows, so both see what one process sees."""
    (first, _) = on_ranks(2, run_stages, folder, family, adapter)
    assert not first.refused
    assert first.losses == pytest.approx(plain(family, adapter), rel=SAME)


def run_stages(world: World, folder: Path, family: str, adapter: str) -> Outcome:
    job = family_job(folder, family, adapter, "ddp", 1)
    stages = TypeAdapter(Strategy).validate_python({"type": "pipeline", "stages": 2})
    launch = job.launch.model_copy(update={"processes": 2})
    return run(world, job.model_copy(update={"strategy": stages, "launch": launch}), rows=1)


ASKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "ddp": ("ddp", {}, "none"),
    "fsdp": ("fsdp", {}, "none"),
    "tensor": ("tensor", {"degree": 2}, "none"),
    "pipeline": ("pipeline", {"stages": 2}, "none"),
    "nf4": ("ddp", {}, "nf4"),
}
"""Strategies, their fields and a quantization that some families can't have."""


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("family", rows(CONFIGS.keys() & SHAPE_READERS.keys()))
def test_estimate_refuses_what_train_refuses(family: str, asked: str, tmp_path: Path) -> None:
    strategy, fields, quantization = ASKED[asked]
    config(family).save_pretrained(tmp_path / family)
    job = family_job(tmp_path, family, "lora", "ddp", 2, quantization=quantization)
    chosen = TypeAdapter(Strategy).validate_python({"type": strategy, **fields})
    job = job.model_copy(update={"strategy": chosen})
    refused = refusal(lambda: forecast(job, "2xA100-80GB"))
    assert refused == refusal(lambda: look_before_training(job))
    if asked in ("ddp", "fsdp"):
        assert refused == ""


def look_before_training(job: Job) -> None:
    """What `train` does with a model before it reads a weight."""
    found: Any = ModelFiles(job.model).config
    require_cuttable(job, found)
    model = without_memory(found, job.model, torch.float32)
    if job.model.quantization != "none":
        quantizable(decoder_layers(model), ())


def refusal(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except ShardtuneError as error:
        return error.problems[0].fact
    return ""


def test_plan_ranks_what_train_runs(tmp_path: Path) -> None:
    """Families with and without rules for slices and stages: `plan` offers what is possible."""
    offered: dict[str, set[str]] = {}
    for family in ("llama", "mixtral"):
        config(family).save_pretrained(tmp_path / family)
        job = family_job(tmp_path, family, "lora", "ddp", 2)
        ranking = rank_strategies(job, "2xA100-80GB")
        fitting = [each for each in ranking.candidates if each.found is not None]
        offered[family] = {each.found.job.strategy.type for each in fitting if each.found}
    assert {"ddp", "fsdp", "tensor", "pipeline"} <= offered["llama"]
    assert offered["mixtral"] == offered["llama"] - {"tensor"} | {"expert"}


@pytest.mark.parametrize("setting", [{"dropout": 0.1}, {"variant": "dora"}, {"variant": "pissa"}])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_what_experts_cannot_have(family: str, setting: dict[str, Any], tmp_path: Path) -> None:
    write_family(tmp_path, family)
    job = family_job(tmp_path, family, "lora", "ddp", 1)
    job = job.model_copy(update={"adapter": LoRA(rank=4, **setting)})
    refused = refusal(lambda: check_weights(ModelFiles(job.model), job.adapter))
    assert refused == refusal(lambda: forecast(job, "1xA100-80GB"))
    assert ("experts are adapted as whole tensors" in refused) == (family != "llama")
