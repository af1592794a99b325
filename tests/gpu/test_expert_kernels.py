"""Kernels of experts, and attention with sinks, against float64 on a GPU. Memory that is handed out
is full of NaN meanwhile, so a number that nobody writes shows."""

from __future__ import annotations

import pytest
import torch

from shardtune.kernels.contiguous_copy import contiguous_copy
from shardtune.kernels.sink_attention import sink_attention
from tests.kernels.test_expert_kernels import SHAPES, TOKENS, assert_gated, assert_summed
from tests.models.exact import distance, some, with_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch tells what isn't deterministic
    pytest.mark.usefixtures("poisoned_memory"),
]
HALVES = [torch.bfloat16, torch.float16]
REAL_MLP = (4099, 768, 8, 8)
"""Rows and half of the columns of Qwen3-30B-A3B's experts."""


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [*SHAPES, REAL_MLP], ids=str)
def test_gated_as_float64(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    assert_gated(shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", TOKENS, ids=str)
def test_summed_as_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert_summed(shape, dtype, "cuda")


@pytest.mark.parametrize("window", [None, 5, 128])
def test_attention_with_sinks(window: int | None) -> None:
    """FlashAttention corrected by the sinks, beside the same op step by step on a CPU."""
    heads, groups, size, ends = 8, 2, 64, [0, 9, 200, 333]
    shapes = [(ends[-1], each, size) for each in (heads, groups, groups)]
    given = [some(shape, seed) for seed, shape in enumerate([*shapes, (heads,)])]

    def attend(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        borders = torch.tensor(ends, dtype=torch.int32, device=device)

        def op(*each: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = sink_attention(*each, borders, 191, size**-0.5, window)[0]
            return found

        return with_gradients(op, [each.to(device, dtype) for each in given])

    found, right = attend("cuda", torch.bfloat16), attend("cpu", torch.float32)
    for one, other in zip(found, right, strict=True):
        assert distance(one.cpu(), other) < 0.02


def test_a_copy_is_in_memory_order_also_when_compiled() -> None:
    @torch.compile
    def turned(given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = contiguous_copy((2 * given).transpose(-2, -1))
        return found

    given = torch.randn(4, 24, 40, device="cuda", dtype=torch.bfloat16)
    found = turned(given)
    assert found.is_contiguous()
    assert torch.equal(found, (2 * given).transpose(-2, -1))
