"""AdamW on weights in two halves: torch's own numbers, to the bit on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardtune.engine.optim.adamw_split_bf16 import SplitAdamW
from shardtune.engine.optim.build_optimizer import make_optimizer, take_step
from shardtune.engine.optim.split_fp32 import joined, split
from tests.engine.test_build_optimizer import LIMIT, RATE, RULES

KINDS = [torch.bfloat16, torch.float32]
SIZES = {"one": (1,), "a block": (32, 32), "and one": (1025,), "several": (7, 801), "vector": (9,)}


def halves(number: Tensor) -> tuple[nn.Parameter, Tensor]:
    upper = nn.Parameter(torch.empty_like(number, dtype=torch.bfloat16))
    upper.grad_dtype = None
    lower = torch.empty_like(number, dtype=torch.int16)
    with torch.no_grad():
        split(number, upper, lower)
    return upper, lower


def numbers(device: str, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Tensors that are parts of one, so that some begin anywhere."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [torch.Size(size).numel() for size in SIZES.values()]
    flat = torch.randn(sum(sizes), generator=draw).mul_(scale).to(device)
    parts = torch.split(flat, sizes)
    return {name: part.view(SIZES[name]) for name, part in zip(SIZES, parts, strict=True)}


def follows_torch(device: str, kind: torch.dtype, limit: float | None, *, near: float) -> None:
    """Steps, one of them left out, beside torch's own on fp32 weights and the same gradients."""
    theirs = {name: nn.Parameter(each.clone()) for name, each in numbers(device, 0).items()}
    ours = {name: halves(each) for name, each in numbers(device, 0).items()}
    other = make_optimizer(theirs, RULES["adamw"], RATE)
    weights = {name: upper for name, (upper, _) in ours.items()}
    optimizer = SplitAdamW(make_optimizer(weights, RULES["adamw"], RATE), dict(ours.values()))
    for step, length in enumerate([50.0, 0.3, float("nan"), 7.0]):
        for name, gradient in numbers(device, step + 1, 1e-3).items():
            weights[name].grad = gradient.to(kind, copy=True)
            theirs[name].grad = gradient.to(kind).to(torch.float32, copy=True)
        norm = torch.as_tensor(length, device=device)
        applied = [bool(take_step(each, norm, limit)) for each in (optimizer, other)]
        assert applied == [length == length] * 2
        for name, (upper, lower) in ours.items():
            found = joined(upper.detach(), lower)
            torch.testing.assert_close(found, theirs[name].detach(), rtol=near, atol=near)
            assert (found - upper.float()).abs().le(found.abs() / 256).all()
            for key, value in other.state[theirs[name]].items():
                mine = optimizer.state[upper][key]
                torch.testing.assert_close(mine, value, rtol=10 * near, atol=near)


@pytest.mark.parametrize("limit", [LIMIT, None])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_follows_torch(kind: torch.dtype, limit: float | None) -> None:
    follows_torch("cpu", kind, limit, near=0.0)


def test_a_weight_without_a_gradient_stays() -> None:
    ours = {name: halves(each) for name, each in numbers("cpu", 0).items()}
    weights = {name: upper for name, (upper, _) in ours.items()}
    optimizer = SplitAdamW(make_optimizer(weights, RULES["adamw"], RATE), dict(ours.values()))
    for name, gradient in numbers("cpu", 1).items():
        weights[name].grad = None if name == "vector" else gradient
    before = weights["vector"].detach().clone()
    take_step(optimizer, torch.ones(()), LIMIT)
    assert torch.equal(weights["vector"], before)
    assert not optimizer.state.get(weights["vector"])


EDGES = [0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e-45, float("inf"), float("-inf")]


def test_halves_are_the_number() -> None:
    """All ways to round: the last 16 bits of many numbers, of either sign."""
    bits = torch.arange(1 << 17, dtype=torch.int32) + 0x3F7F0000
    some = torch.cat([bits.view(torch.float32), -bits.view(torch.float32), torch.tensor(EDGES)])
    upper, lower = halves(some)
    assert torch.equal(joined(upper.detach(), lower).view(torch.int32), some.view(torch.int32))
    right = some.to(torch.bfloat16)
    tie = (some.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(upper.detach()[~tie], right[~tie])
    assert tie.sum() == 4
    assert upper.detach()[tie].abs().ge(right[tie].abs()).all()


def test_many_numbers_are_split_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    some = torch.randn(7, 33)
    whole = halves(some)
    for most in (1, 40, 100, 231):
        monkeypatch.setattr("shardtune.engine.optim.split_fp32.AT_ONCE", most)
        assert all(map(torch.equal, halves(some), whole)), most
    upper, lower = halves(torch.tensor(1.5))
    assert joined(upper.detach(), lower) == 1.5


def test_no_number_stays_none() -> None:
    """Whichever of the many it is."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    upper, lower = halves(bits.view(torch.float32))
    assert upper.isnan().all()
    assert joined(upper.detach(), lower).isnan().all()
