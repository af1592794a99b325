"""Whose experts ranks can divide, of all families of transformers: those of the others are refused
before a rank starts, never kept whole without a word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from shardtune.core.model.architectures import SHAPE_READERS
from shardtune.core.model.divisible_experts import (
    has_divisible_experts,
    require_divisible_experts,
)
from shardtune.core.model.parallel_plan import expert_count
from shardtune.core.world import World
from shardtune.engine.dtensor import local
from shardtune.errors import ModelError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel import Strategy
from shardtune.training.engine_setup import make_plan
from shardtune.training.inputs import require_cuttable
from tests.models.families import CONFIGS
from tests.models.family_runs import (
    STEPS,
    Outcome,
    family_job,
    loader,
    plain_outcome,
    run,
    write_family,
)
from tests.ranks import on_ranks

WHOLE = {
    "dbrx",
    "doge",
    "jetmoe",
    "llama4",
    "llama4_text",
    "longcat_flash",
    "muse_spark",
    "step3p7",
}
"""Families with code of their own for experts, which ranks can't divide."""
NO_DEFAULTS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 128},
    "lfm2_moe": CONFIGS["lfm2_moe"],
}
"""What some families need to be built, or to have experts."""
DIVIDED = ("aria_text", "mixtral")
MANY = ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoehybrid", "lfm2_moe",
        "olmoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next")  # fmt: skip
SAME = 1e-5
TWO = {"type": "expert", "degree": 2}


def mixtures() -> dict[str, Any]:
    """Models without memory of all families that predict text and have experts."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    kinds = {
        **dict.fromkeys(
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, AutoModelForImageTextToText
        ),
        **dict.fromkeys(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
    }
    found = {}
    for kind, made_by in kinds.items():
        try:
            config = AutoConfig.for_model(kind, **NO_DEFAULTS.get(kind, {}))
            if not expert_count(config):
                continue
            with torch.device("meta"):
                found[kind] = made_by.from_config(config)
        except Exception:  # what defaults alone can't build says so in many ways
            continue
    return found


def of_experts(name: str) -> bool:
    """Whether a weight is one of routed experts, by its name alone."""
    return bool(re.search(r"(?<!shared_)experts\.", name))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_every_family_is_divided_or_refused() -> None:
    models, refused = mixtures(), set()
    for kind, model in models.items():
        try:
            require_divisible_experts(model, kind, expert_count(model.config), 2)
        except ModelError:
            refused.add(kind)
            continue
        for name, module in model.named_modules():
            if has_divisible_experts(module):
                weights = dict(module.named_parameters(prefix=name))
                assert {each.shape[0] for each in weights.values()} == {module.num_experts}, kind
        taken = {
            id(weight)
            for module in model.modules()
            if has_divisible_experts(module)
            for weight in module.parameters()
        }
        left = [n for n, w in model.named_parameters() if of_experts(n) and id(w) not in taken]
        assert taken, kind
        assert not left, kind
    assert len(models) > 50
    assert refused == WHOLE & models.keys()
    assert models.keys() >= {"dbrx", "llama4_text", "jetmoe"}
    assert not refused & SHAPE_READERS.keys(), "the planner would offer what train refuses"


def job_of(folder: Path, family: str, adapter: str, strategy: dict[str, Any], ranks: int) -> Any:
    job = family_job(folder, family, adapter, "ddp", ranks)
    chosen = TypeAdapter(Strategy).validate_python(strategy)
    return job.model_copy(update={"strategy": chosen})


@pytest.mark.parametrize("strategy", [TWO, {"type": "fsdp", "expert": 2}])
@pytest.mark.parametrize("family", ["jetmoe", "llama4_text"])
def test_what_stays_whole_is_refused_before_a_rank_starts(
    family: str, strategy: dict[str, Any], tmp_path: Path
) -> None:
    write_family(tmp_path, family)
    job = job_of(tmp_path, family, "full", strategy, 2)
    with pytest.raises(ModelError) as refused:
        require_cuttable(job, ModelFiles(job.model).config)
    (problem,) = refused.value.problems
    assert problem.fact.startswith(f"expert(2) can't divide the 4 experts of a layer of {family!r}")
    assert "0 of " in problem.fact
    assert "shards all weights alike" in problem.fix


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("family", ["jetmoe", "llama4_text"])
def test_fsdp_trains_what_stays_whole(family: str, tmp_path: Path) -> None:
    """What the refusal says to use instead."""
    write_family(tmp_path, family)
    one = plain_outcome(job_of(tmp_path, family, "full", {"type": "ddp"}, 1))
    for outcome in on_ranks(2, sharded, tmp_path, family):
        assert outcome.losses == pytest.approx(one.losses, rel=SAME)
        assert outcome.norms == pytest.approx(one.norms, rel=SAME)


def sharded(world: World, folder: Path, family: str) -> Outcome:
    return run(world, job_of(folder, family, "full", {"type": "fsdp"}, 2))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize(
    "family", [*DIVIDED, *(pytest.param(each, marks=pytest.mark.long) for each in MANY)]
)
def test_two_ranks_hold_half_of_the_experts_and_train_as_one(
    family: str, adapter: str, tmp_path: Path
) -> None:
    write_family(tmp_path, family)
    require_cuttable(job := job_of(tmp_path, family, adapter, TWO, 2), ModelFiles(job.model).config)
    one = run(World(), job_of(tmp_path, family, adapter, {"type": "ddp"}, 1))
    assert not one.refused
    whole = held(World(), tmp_path, family, adapter, {"type": "ddp"})
    for outcome, experts, others in on_ranks(2, both, tmp_path, family, adapter):
        assert outcome.losses == pytest.approx(one.losses, rel=SAME)
        assert outcome.norms == pytest.approx(one.norms, rel=SAME)
        assert (2 * experts, others) == whole


def both(world: World, folder: Path, family: str, adapter: str) -> tuple[Outcome, int, int]:
    outcome = run(world, job_of(folder, family, adapter, TWO, 2))
    return outcome, *held(world, folder, family, adapter, TWO)


def held(
    world: World, folder: Path, family: str, adapter: str, strategy: dict[str, Any]
) -> tuple[int, int]:
    """Bytes of the experts' weights, and of all others, on this rank after a step."""
    job = job_of(folder, family, adapter, strategy, world.size)
    plan = make_plan(job, world.size, STEPS)
    builder = PretrainedModelBuilder(ModelFiles(job.model), job.adapter, job.train)
    with plan.strategy.build(builder, plan.setup, world) as engine:
        engine.step(next(iter(loader(job, world.rank, world.size).steps(0, 1))))
        sizes = {name: local(each).nbytes for name, each in engine.module().named_parameters()}
    experts = sum(size for name, size in sizes.items() if of_experts(name))
    return experts, sum(sizes.values()) - experts
