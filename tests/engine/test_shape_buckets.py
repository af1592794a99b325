"""Rows are padded to few shapes, and nothing that is added is trained."""

from __future__ import annotations

import pytest
import torch

from shardtune.config.job import LoRA
from shardtune.core.setup import CAPTURED_TOKENS
from shardtune.core.step import IGNORED
from shardtune.engine.host_to_device import Staging
from shardtune.engine.loss import kept_positions
from shardtune.engine.shape_buckets import ShapeBuckets
from tests.engine.test_native import batch, make


@pytest.mark.parametrize(
    ("width", "wider"), [(8, 8), (9, 16), (130, 144), (248, 256), (600, 640), (1000, 1024)]
)
def test_widths_are_rounded_up_by_an_eighth_at_most(width: int, wider: int) -> None:
    given = batch(1, rows=2, length=width)
    padded = ShapeBuckets(CAPTURED_TOKENS).padded(given)
    assert padded.input_ids.shape == padded.targets.shape == padded.position_ids.shape == (2, wider)
    assert torch.equal(padded.input_ids[:, :width], given.input_ids)
    assert torch.equal(padded.position_ids, torch.arange(wider).expand(2, wider))
    assert bool((padded.targets[:, width:] == IGNORED).all())
    assert (padded.tokens, padded.labels) == (given.tokens, given.labels)


def test_there_are_few_widths() -> None:
    rows = [
        ShapeBuckets(CAPTURED_TOKENS).padded(batch(1, rows=1, length=width))
        for width in range(256, 1024)
    ]
    assert len({each.input_ids.shape[1] for each in rows}) == 17


def test_the_models_positions_are_not_exceeded() -> None:
    assert (
        ShapeBuckets(CAPTURED_TOKENS, longest=600).padded(batch(1, length=590)).input_ids.shape[1]
        == 600
    )


def test_long_micro_batches_stay_as_they_are() -> None:
    given = batch(1, rows=1, length=CAPTURED_TOKENS + 8)
    assert ShapeBuckets(CAPTURED_TOKENS).padded(given) is given
    kept = kept_positions(given)
    assert ShapeBuckets(CAPTURED_TOKENS).kept(kept, given) is kept


@pytest.mark.parametrize(("first", "count"), [(0, 64), (30, 48), (50, 16), (63, 16)])
def test_positions_of_the_head_come_in_quarters(first: int, count: int) -> None:
    given = batch(1, length=64)
    given.targets[:, :first] = IGNORED
    kept = kept_positions(given)
    found = ShapeBuckets(CAPTURED_TOKENS).kept(kept, given)
    assert len(found) == count
    assert len(found.unique()) == count
    assert set(kept.tolist()) <= set(found.tolist())


def test_the_loss_and_its_gradient_are_the_same() -> None:
    found = []
    for buckets in (None, ShapeBuckets(CAPTURED_TOKENS)):
        engine = make(adapter=LoRA(rank=4))
        engine.forward_pass.staging.buckets = buckets
        given = batch(3, length=37)
        given.targets[:, :20] = IGNORED
        result = engine.step([given])
        found.append((result.loss, result.grad_norm))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert isinstance(engine.forward_pass.staging, Staging)
