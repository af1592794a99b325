"""Packed documents don't see each other, and the packed loss is the sum of the single ones.

The documents repeat each other word for word, so a model that could look back over the border would
know what comes next. A control shows that the test would notice: with positions that run on over
the borders, the loss does change.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from shardtune.config.job import ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.step import MicroBatch
from shardtune.core.world import World
from shardtune.data.collate import Collator
from shardtune.data.dataset import PreparedSet, SourceReport
from shardtune.data.sampler import DocumentRef
from shardtune.engine.native import NativeEngine
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
MODELS = ["tiny", pytest.param(str(STORIES), id="stories260K")]
TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "Once upon a time, there was a little girl named Lily. She loved to play outside.",
    "She loved to play outside.",
    "Once upon a time, there was a little girl named Lily.",
]


def engine_for(model: str, attention: str) -> NativeEngine:
    section = ModelSection(name=model, attention=attention)
    loaded = PretrainedModelBuilder(
        ModelFiles(section), NoAdapter(), TrainSection(precision="fp32")
    ).whole("cpu")
    setup = EngineSetup("fp32", OptimizerSetup("sgd"), Schedule("constant", 0.1, 0, 9), None, 0)
    return NativeEngine(loaded, setup, World())


def rows(model: str) -> tuple[PreparedSet, Any]:
    tokenizer = ModelFiles(ModelSection(name=model)).tokenizer
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    trained = [[False] + [True] * (len(each) - 1) for each in ids]
    dataset = Dataset.from_dict({"input_ids": ids, "trained": trained})
    lengths = np.array([len(each) for each in ids], dtype=np.int32)
    report = SourceReport("d", "d", "completion", 4, 4, *([0] * 9))
    return PreparedSet("d", 1.0, dataset, lengths, lengths - 1, report), tokenizer


def batches(model: str) -> tuple[MicroBatch, list[MicroBatch]]:
    prepared, _ = rows(model)
    collate = Collator((prepared,), capacity=1024, pad_id=0)
    documents = [DocumentRef(0, n, int(length)) for n, length in enumerate(prepared.lengths)]
    return collate([tuple(documents)]), [collate([(document,)]) for document in documents]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_packed_loss_is_the_sum_of_the_single_losses(model: str, attention: str) -> None:
    if model != "tiny" and not STORIES.is_dir():
        pytest.skip("stories260K is not at hand")
    packed, singles = batches(model)
    engine = engine_for(model, attention)
    together = engine.evaluate("packed", [packed])
    apart = [engine.evaluate("single", [single]) for single in singles]
    assert together.labels == sum(result.labels for result in apart)
    assert together.correct == sum(result.correct for result in apart)
    expected = sum(result.loss_sum for result in apart)
    assert together.loss_sum == pytest.approx(expected, rel=1e-5)

    run_on = torch.arange(packed.input_ids.shape[1]).unsqueeze(0)
    leaking = engine.evaluate("leak", [replace(packed, position_ids=run_on)])
    assert abs(leaking.loss_sum / expected - 1) > 1e-3, "the control must notice a leak"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_too(attention: str) -> None:
    packed, singles = batches("tiny")
    norms = [engine_for("tiny", attention).step(given).grad_norm for given in ([packed], singles)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_no_document_predicts_the_first_token_of_the_next() -> None:
    packed, _ = batches("tiny")
    starts = (packed.position_ids[0] == 0).nonzero().flatten().tolist()
    assert len(starts) == len(TEXTS)
    assert all(packed.targets[0, start - 1] == -100 for start in starts[1:])
