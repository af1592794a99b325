"""Steps with attention that is told of boundaries are the steps with a mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardtune.config.job import LoRA, ModelSection, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.model.document_boundaries import VARLEN
from shardtune.core.setup import EngineSetup, Loss, OptimizerSetup
from shardtune.core.step import MicroBatch
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.models.packed_attention import register
from shardtune.parallel.ddp.engine import native_engine
from tests.engine.test_native import batch


def packed(seed: int) -> MicroBatch:
    """Rows of 16 tokens: two documents, and one."""
    positions = torch.stack([torch.arange(16) % 9, torch.arange(16)])
    return replace(batch(seed), position_ids=positions)


def make(*, told: bool, loss: Loss) -> tuple[NativeEngine, list[bool]]:
    """And whether each forward pass was given boundaries."""
    section, train = ModelSection(name="tiny"), TrainSection(precision="fp32")
    model = PretrainedModelBuilder(ModelFiles(section), LoRA(rank=4), train).whole("cpu")
    if told:
        register()
        model.set_attn_implementation(VARLEN)
    seen: list[bool] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("cu_seq_lens_q") is not None),
        with_kwargs=True,
    )
    setup = EngineSetup(
        "fp32", OptimizerSetup("sgd"), Schedule("constant", 1e-2, 0, 9), 1.0, 0, loss=loss
    )
    return native_engine(model, setup, World()), seen


@pytest.mark.parametrize("loss", ["plain", "fused"])
def test_the_same_steps(loss: Loss) -> None:
    masked, never = make(told=False, loss=loss)
    told, seen = make(told=True, loss=loss)
    for n in range(3):
        microbatches = [packed(n), batch(n)]
        one, other = masked.step(microbatches), told.step(microbatches)
        assert other.loss == pytest.approx(one.loss, rel=1e-6)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    judged = told.evaluate("all", [packed(7)])
    assert judged.loss == pytest.approx(masked.evaluate("all", [packed(7)]).loss, rel=1e-6)
    assert seen == [True, False] * 3 + [True]
    assert not any(never)
