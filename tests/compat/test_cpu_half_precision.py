"""Products in bf16 and fp16 where a CPU is slow in them: as in fp32, rounded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardtune.compat.cpu_half_precision import widen_products
from shardtune.kernels.measure_matmul import widen_slow_products

TYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def both_are_widened() -> Iterator[None]:
    """Whatever this CPU is fast in."""
    widen_products(TYPES)
    yield
    widen_slow_products()


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


PRODUCTS = {
    "mm": lambda a, b: a[0] @ b[0],
    "linear": lambda a, b: functional.linear(a, b[0]),
    "with bias": lambda a, b: functional.linear(a, b[0], b[0, 0]),
    "bmm": torch.bmm,
    "baddbmm": lambda a, b: torch.baddbmm(a, a, b),
    "attention": lambda a, b: functional.scaled_dot_product_attention(
        a[None], b[None], b[None], is_causal=True
    ),
    "masked": lambda a, b: functional.scaled_dot_product_attention(
        a[None], b[None], b[None], attn_mask=torch.ones(32, 32, dtype=torch.bool).tril()
    ),
}


@pytest.mark.parametrize("dtype", TYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_and_gradients_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    product, shape = PRODUCTS[name], (4, 32, 32)
    narrow = [drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype) / 4]
    narrow = [each.requires_grad_() for each in narrow]
    wide = [each.detach().float().requires_grad_() for each in narrow]
    found, right = product(*narrow), product(*wide)
    assert found.dtype == dtype
    assert torch.equal(found, right.to(dtype))
    incoming = drawn(*found.shape, dtype=dtype)
    found.backward(incoming)
    right.backward(incoming.float())
    for mine, exact in zip(narrow, wide, strict=True):
        assert mine.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(mine.grad.float(), exact.grad, rtol=0.02, atol=0.02)


def test_numbers_of_two_kinds_are_refused() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(drawn(8, 8), drawn(8, 8).float())


def test_other_numbers_take_the_old_way() -> None:
    a = torch.randn(8, 8)
    assert (a @ a).dtype == torch.float32
    assert (a.double() @ a.double()).dtype == torch.float64


def test_what_a_cpu_is_fast_in_is_left_to_it() -> None:
    a, b = (drawn(64, 512, dtype=torch.float16) for _ in range(2))
    widen_products({torch.bfloat16})
    native = a @ b.T
    widen_products(())
    assert torch.equal(a @ b.T, native)
    widen_products(TYPES)
    assert torch.equal(a @ b.T, (a.float() @ b.float().T).half())
