"""Every strategy with every adapter gives what one process gives, holds and sends what it says."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conformance.guarantees import examine
from tests.conformance.table import ROWS, Row

SAME = 1e-5  # relative, fp32: ten steps of rounding in another order
PADDING = 0.02  # of a state's bytes on a rank, or ...
PADDING_BYTES = 2048  # ... so many: shares are rounded up to whole rows and to alignments


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    if row.needs and importlib.util.find_spec(row.needs) is None:
        pytest.skip(f"{row.needs} is not installed")
    found = examine(row)
    assert not found.missing
    assert found.difference < SAME
    assert found.weights < SAME
    for state, (held, predicted) in found.held.items():
        slack = max(PADDING_BYTES, PADDING * predicted)
        assert predicted - 1 <= held <= predicted + slack, (state, held, predicted)
    for kind, (sent, declared) in found.sent.items():
        assert abs(sent - declared) <= max(4 * PADDING_BYTES, PADDING * declared), (
            kind,
            sent,
            declared,
        )
