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
from shardtune.core.model.family_support import FAMILY_SUPPORT
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.step import MicroBatch
from shardtune.core.world import World
from shardtune.data.collate import Collator
from shardtune.data.dataset import PreparedSet, SourceReport
from shardtune.data.sampler import DocumentRef
from shardtune.engine.native import NativeEngine
from shardtune.errors import ModelError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.document_isolation import is_recurrent
from shardtune.models.layer_sample import layer_sample
from shardtune.models.model_files import ModelFiles
from shardtune.models.packing_check import require_document_isolation, require_isolating_layers
from tests.models.families import CONFIGS, config
from tests.models.family_runs import write_family

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


# Every family -----------------------------------------------------------------------------------

ISOLATED = sorted(name for name in CONFIGS if not FAMILY_SUPPORT[name].mixes_documents)
MIXING = sorted(CONFIGS.keys() - set(ISOLATED))
STATEFUL = (
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
)  # fmt: skip
QUICK = ("gpt_oss", "lfm2", "llama", "nemotron_h", "qwen3_next")


def some(families: list[str]) -> list[Any]:
    slow = [pytest.mark.long]
    return [pytest.param(name, marks=() if name in QUICK else slow) for name in families]


def documents() -> tuple[MicroBatch, list[MicroBatch]]:
    """Two rows of several documents, of 1 to 17 tokens, and the same ones alone."""
    draw = torch.Generator().manual_seed(5)
    lengths = ((7, 1, 12, 4), (17, 5, 2))
    singles = []
    for length in (each for row in lengths for each in row):
        ids = torch.randint(3, 67, (1, length), generator=draw)
        targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
        positions = torch.arange(length)[None]
        singles.append(MicroBatch(ids, positions, targets, (), length, length - 1))
    cuts = (singles[: len(lengths[0])], singles[len(lengths[0]) :])
    ids, positions, targets = (
        torch.cat([torch.cat([getattr(each, name) for each in cut], dim=1) for cut in cuts])
        for name in ("input_ids", "position_ids", "targets")
    )
    tokens, labels = (sum(getattr(each, name) for each in singles) for name in ("tokens", "labels"))
    return MicroBatch(ids, positions, targets, (), tokens, labels), singles


def test_at_least_sixteen_families_are_isolated() -> None:
    assert len(ISOLATED) >= 16
    assert set(STATEFUL) <= set(ISOLATED)


@pytest.mark.slow
@pytest.mark.parametrize("family", some(ISOLATED))
def test_packed_is_the_sum_of_singles(family: str, tmp_path: Path) -> None:
    """Losses and gradients, and the guard agrees."""
    write_family(tmp_path, family)
    packed, singles = documents()
    attention = FAMILY_SUPPORT[family].best_attention
    engine = engine_for(str(tmp_path / family), attention)
    require_document_isolation(engine.module(), rows=2)
    together = engine.evaluate("packed", [packed])
    apart = [engine.evaluate("single", [single]) for single in singles if single.labels]
    assert together.loss_sum == pytest.approx(sum(each.loss_sum for each in apart), rel=1e-5)
    norms = [
        engine_for(str(tmp_path / family), attention).step(given).grad_norm
        for given in ([packed], singles)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("family", some(ISOLATED))
def test_the_guard_passes_families_that_isolate(family: str) -> None:
    require_isolating_layers(config(family), FAMILY_SUPPORT[family].best_attention)


@pytest.mark.parametrize("family", MIXING)
def test_the_guard_refuses_families_that_mix(family: str) -> None:
    with pytest.raises(ModelError, match="doesn't keep packed documents apart"):
        require_isolating_layers(config(family), FAMILY_SUPPORT[family].best_attention)


@pytest.mark.parametrize("family", [*STATEFUL, "gpt_oss"])
def test_the_guard_refuses_layers_whose_state_goes_on(family: str) -> None:
    """As transformers computes them, without what we add."""
    model = layer_sample(config(family), FAMILY_SUPPORT[family].best_attention)
    assert any(map(is_recurrent, model.modules())) == (family in STATEFUL)
    with pytest.raises(ModelError, match="doesn't keep packed documents apart"):
        require_document_isolation(model, rows=2)


@pytest.mark.parametrize("share", [1e-4, 1e-2])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_the_guard_refuses_a_model_that_was_made_to_leak(family: str, share: float) -> None:
    """Each token takes a ten-thousandth of what its row was like so far, as a state would."""
    model = layer_sample(config(family), None)
    require_document_isolation(model, rows=2)

    def leak(module: Any, given: Any, found: Any) -> Any:
        hidden = found[0] if isinstance(found, tuple) else found
        counted = torch.arange(1, hidden.shape[1] + 1)[:, None]
        leaking = hidden + share * hidden.cumsum(1) / counted
        return (leaking, *found[1:]) if isinstance(found, tuple) else leaking

    layers = model.transformer.h if family == "gpt2" else model.model.layers
    layers[0].register_forward_hook(leak)
    with pytest.raises(ModelError, match="doesn't keep packed documents apart"):
        require_document_isolation(model, rows=2)
