"""Experts in NF4 that ranks divide: a rank's scales restore its experts to the same bits."""

from __future__ import annotations

import pytest
import torch

from shardtune.errors import ModelError
from shardtune.models.quantization.bitsandbytes_linear import pack_nf4, restore_nf4, rows_of_nf4

pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_some_experts_are_restored_to_the_same_bits(count: int) -> None:
    """96 scales an expert, quantized in blocks of 256: most experts begin inside a block."""
    weight = torch.randn(6, 96, 64, generator=torch.Generator().manual_seed(0))
    packed, state = pack_nf4(weight)
    whole = restore_nf4(packed, state.absmax, state)
    for first in range(0, 6, count):
        rows = packed.view(6, -1)[first : first + count]
        own, skipped = rows_of_nf4(state, first, count)
        found = restore_nf4(rows.reshape(-1, 1), own.absmax, own, skipped)
        assert torch.equal(found, whole[first : first + count])
        assert own.absmax.numel() == skipped + 96 * count
        assert skipped < 256


def test_experts_that_share_a_block_are_refused_with_the_numbers() -> None:
    _, state = pack_nf4(torch.randn(4, 3, 24))
    with pytest.raises(ModelError, match="64 weights together, and 72 of an expert"):
        rows_of_nf4(state, 0, 2)
