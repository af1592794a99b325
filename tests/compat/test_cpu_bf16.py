"""Products in bf16 where a CPU has no instructions for them: as in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardtune.compat.cpu_bf16 import is_slow

pytestmark = pytest.mark.skipif(not is_slow(), reason="this CPU multiplies in bf16")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


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


@pytest.mark.parametrize("name", PRODUCTS)
def test_results_and_gradients_are_rounded_once(name: str) -> None:
    product = PRODUCTS[name]
    narrow = [drawn(4, 32, 32).requires_grad_(), (drawn(4, 32, 32) / 4).requires_grad_()]
    wide = [each.detach().float().requires_grad_() for each in narrow]
    found, right = product(*narrow), product(*wide)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, right.bfloat16())
    incoming = drawn(*found.shape)
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
