"""Every strategy with every adapter gives what one process gives, holds and sends what it says."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.conformance.guarantees import examine, refusal
from tests.conformance.table import MIXTURES, ROWS, Row
from tests.models.encoder_decoder import FAMILIES

pytestmark = pytest.mark.early

SAME = 1e-5  # relative, fp32: ten steps of rounding in another order
ALIGNED = 2048  # bytes: shares are rounded up to whole rows, and to alignments
HELD = {"zero2": {"grads": 0.2}, "zero3-nvme-full": {"grads": 1.0}}
"""By how much more than its share a rank may hold. ZeRO-2 keeps a gradient that lies across the
border of two ranks' shares whole on both. Gradients of states in files go into files as well."""
SENT = {
    "zero3": {"all_gather": 0.2},
    "moe-fsdp2-expert4": {"all_to_all": 1.0, "all_gather": 0.05},
    "moe-": {"all_to_all": 1.0},
}
"""By how much more may be sent. ZeRO-3 gathers some weights a third time, where the backward pass
comes to them by another way than the forward pass did (tied ones, for instance). A rank whose
experts are chosen more often is sent more tokens than it sends. The four rows of LoRA's first
factor are rounded up to one for each of eight ranks."""

SLOWEST = ("tensor4", "fsdp2-pipeline2-tensor2", "pipeline2-tensor2-data2", "zero3-hpz")
VARIANTS = ("offload", "keep", "hpz", "allreduce", "interleaved", "zero-bubble")
"""Strategies that shard as another of the table does."""
SWAPPED = 0.01  # vectors are a group of their own, too small to be swapped
UNHEARD = {
    "moe-fsdp2-pipeline2-qlora": {"all_gather": 0.003},
    "fsdp2-pipeline2-tensor2": {"all_gather": 0.002, "reduce_scatter": 0.002, "all_reduce": 0.002},
    "fsdp2-pipeline": {"all_gather": 0.002, "reduce_scatter": 0.002},
    "moe-zero3-lora": {"all_gather": 0.1},
    "moe-zero3-qlora": {"all_gather": 0.2},
    "moe-zero3": {"all_gather": 0.01},
}
"""By how much less may be heard. The last stage gathers the final norm by itself, and slices add up
their shares of a layer's norms: of `tiny` those are messages too small to be told from one by which
ranks agree on something, and beside packed weights a larger part of all. ZeRO-3 gathers what
experts and routers read for themselves one by one, and doesn't gather an adapter of experts again
that no gradient needs."""


MIXED = ("moe-expert2-qlora", "moe-fsdp1-expert2-lora", "moe-pipeline2-1f1b-lora")
"""Rows of mixtures of experts that the gate has."""
PAIRED = ("flan_t5-fsdp-full",)
"""Rows of models with an encoder that the gate has."""


def slack(table: dict[str, dict[str, float]], row: Row, key: str) -> float:
    return next((each.get(key, 0.0) for name, each in table.items() if name in row.id), 0.0)


def marked(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, id=row.id, marks=marks(row)) for row in rows]


def marks(row: Row) -> list[pytest.MarkDecorator]:
    """What the gate leaves out: rows of four and eight ranks take longest, and LoRA has the most
    parts; each way to shard has its rows of other adapters without offload and extra schedules."""
    if row.build:
        return [pytest.mark.build]
    if row.refused and "nvme" in row.strategy:
        return [pytest.mark.process]  # libaio is looked for with a command of the system
    if row.model in FAMILIES and row.id not in PAIRED:
        return [pytest.mark.long]  # tests/numerics has each strategy in one group of ranks
    if row.model in MIXTURES:
        return [] if row.id in MIXED else [pytest.mark.long]
    large = row.ranks >= 4 or any(word in row.strategy for word in VARIANTS)
    slowest = row.strategy in SLOWEST or (large and row.adapter != "lora")
    other = row.adapter in ("ia3", "qlora") and row.strategy not in ("ddp", "fsdp", "zero2")
    return [pytest.mark.long] if slowest or other else []


@pytest.mark.parametrize("row", marked([row for row in ROWS if row.refused]))
def test_refused(row: Row) -> None:
    assert row.refused in refusal(row)


@pytest.mark.parametrize("row", marked([row for row in ROWS if not row.refused]))
def test_row(row: Row) -> None:
    if row.needs and importlib.util.find_spec(row.needs) is None:
        pytest.skip(f"{row.needs} is not installed")
    found = examine(row)
    assert not found.missing
    assert not found.left
    for state, (held, predicted) in found.swapped.items():
        assert abs(held - predicted) <= SWAPPED * predicted + ALIGNED, (state, held, predicted)
    assert found.difference < SAME
    assert found.weights < SAME
    for state, (held, predicted) in found.held.items():
        most = predicted * (1 + slack(HELD, row, state)) + ALIGNED
        assert predicted - 1 <= held <= most, (state, held, predicted)
    for kind, (sent, declared) in found.sent.items():
        most = declared * (1 + slack(SENT, row, kind)) + 6 * ALIGNED
        least = declared * (1 - slack(UNHEARD, row, kind)) - 1
        assert least <= sent <= most, (kind, sent, declared)
