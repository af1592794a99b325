"""AdamW with copies: torch's own numbers, gradients in 16 bits, copies that follow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardtune.engines.one_pass import OnePassAdamW
from shardtune.engines.optimizer import make_optimizer, take_step
from tests.engines.test_optimizer import LIMIT, RATE, RULES, give, weights

KINDS = [torch.bfloat16, torch.float32]


def follows_torch(device: str, kind: torch.dtype, *, near: float) -> None:
    """Four steps, one of them left out, beside torch's own on the same gradients in fp32."""
    ours, theirs = weights(device), weights(device)
    copies = {each: nn.Parameter(each.detach().to(torch.bfloat16)) for each in ours.values()}
    for each in ours.values():
        each.grad_dtype = None
    optimizer = OnePassAdamW(make_optimizer(ours, RULES["adamw"], RATE), copies)
    other = make_optimizer(theirs, RULES["adamw"], RATE)
    for step, length in enumerate([50.0, 0.3, float("nan"), 7.0]):
        norm = give(theirs, step, length)
        for name, weight in ours.items():
            given = theirs[name].grad
            assert given is not None
            weight.grad = given.to(kind, copy=True)
            theirs[name].grad = weight.grad.to(torch.float32, copy=True)
        norm = torch.as_tensor(length, device=norm.device)
        applied = [take_step(each, norm, LIMIT) for each in (optimizer, other)]
        assert [bool(each) for each in applied] == [length == length] * 2
        for name, weight in ours.items():
            torch.testing.assert_close(weight, theirs[name], rtol=near, atol=near)
            assert torch.equal(copies[weight], weight.to(torch.bfloat16))
            for key, value in other.state[theirs[name]].items():
                found = optimizer.state[weight][key]
                torch.testing.assert_close(found, value, rtol=10 * near, atol=near)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_follows_torch(kind: torch.dtype) -> None:
    follows_torch("cpu", kind, near=0.0)


def test_without_a_limit_gradients_are_taken_as_they_are() -> None:
    ours, theirs = weights("cpu"), weights("cpu")
    copies = {each: nn.Parameter(each.detach().clone()) for each in ours.values()}
    optimizer = OnePassAdamW(make_optimizer(ours, RULES["adamw"], RATE), copies)
    other = make_optimizer(theirs, RULES["adamw"], RATE)
    for each, made in ((ours, optimizer), (theirs, other)):
        assert take_step(made, give(each, 1, 50.0), None)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_a_weight_without_a_gradient_stays() -> None:
    ours = weights("cpu")
    copies = {each: nn.Parameter(each.detach().to(torch.bfloat16)) for each in ours.values()}
    optimizer = OnePassAdamW(make_optimizer(ours, RULES["adamw"], RATE), copies)
    norm = give(ours, 1, 1.0)
    ours["vector"].grad = None
    before = ours["vector"].detach().clone()
    take_step(optimizer, norm, LIMIT)
    assert torch.equal(ours["vector"], before)
    assert not optimizer.state.get(ours["vector"])
