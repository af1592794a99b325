"""Dropout on LoRA's input, step by step as on a CPU: masks, and results against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardtune.kernels.lora_dropout import (
    add_dropout_lora_a_grad,
    dropout_lora_a,
    dropout_lora_a_weight_grad,
    dropout_seed,
    kept_mask,
    kept_scale,
)
from shardtune.models.fused.lora_autograd import LoRALinear, LoRAQKVRoPE, LoRASwiGLUMLP
from tests.models.exact import distance, some

P = 0.3
SEED = torch.tensor([-6_148_914_691_236_517_206])
NEXT = torch.tensor([1_234_567_890_123_456_789])


def frozen(outputs: int, inputs: int, seed: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
    layer.weight.data = some((outputs, inputs), seed) / inputs**0.5
    return layer


def dropped(x: Tensor, seed: Tensor, layer: int = 0) -> Tensor:
    return x * kept_mask(seed, P, *x.shape, layer=layer) * kept_scale(P)


def test_a_mask_drops_its_share_and_knows_nothing_of_others() -> None:
    masks = [kept_mask(seed, P, 300, 500, layer) for seed in (SEED, NEXT) for layer in range(3)]
    for mask in masks:
        assert float(mask.float().mean()) == pytest.approx(1 - P, abs=0.005)
        for part in (mask.float().mean(0), mask.float().mean(1)):  # no row or column is special
            assert float(part.std()) < 0.035
    seen = torch.corrcoef(torch.stack([mask.flatten().float() for mask in masks]))
    assert float((seen - torch.eye(6)).abs().max()) < 0.015
    beside = torch.corrcoef(
        torch.stack([masks[0][:, 1:].flatten(), masks[0][:, :-1].flatten()]).float()
    )
    assert abs(float(beside[0, 1])) < 0.015


def test_seeds_are_those_of_the_generator() -> None:
    x = torch.zeros(1)
    torch.manual_seed(3)
    first, second = dropout_seed(x, 0), dropout_seed(x, 1)
    torch.manual_seed(3)
    assert torch.equal(dropout_seed(x, 0), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_layer_as_float64(layers: int) -> None:
    rows, wide, rank, out = 23, 40, 4, 12
    stack = tuple(frozen(out, wide, n) for n in range(layers))
    x, a = some((rows, wide), 10), some((layers * rank, wide), 11) / wide**0.5
    b = torch.block_diag(*(some((out, rank), 20 + n) for n in range(layers)))
    own = [each.requires_grad_() for each in (x, a, b)]
    y = LoRALinear.apply(*own, None, stack, SEED, P)
    g = some((rows, layers * out), 12)
    found = torch.autograd.grad(y, own, g)
    right = [each.detach().double().requires_grad_() for each in own]
    hidden = [
        dropped(right[0], SEED, n) @ right[1][n * rank : (n + 1) * rank].t() for n in range(layers)
    ]
    expected = right[0] @ torch.cat([each.weight for each in stack]).double().t()
    expected = expected + torch.cat(hidden, dim=1) @ right[2].t()
    assert distance(y.detach(), expected.detach()) < 1e-6
    for ours, each in zip(found, torch.autograd.grad(expected, right, g.double()), strict=True):
        assert distance(ours, each) < 1e-6


def test_an_mlp_as_float64() -> None:
    rows, wide, inner, rank = 17, 24, 32, 4
    gate, up, down = frozen(inner, wide, 1), frozen(inner, wide, 2), frozen(wide, inner, 3)
    shapes = [(rows, wide), (2 * rank, wide), (2 * inner, rank), (rank, inner), (wide, rank)]
    own = [(some(s, n) / s[-1] ** 0.5).requires_grad_() for n, s in enumerate(shapes, 30)]
    y = LoRASwiGLUMLP.apply(*own, None, (gate, up), (down,), SEED, NEXT, P)
    g = some((rows, wide), 40)
    found = torch.autograd.grad(y, own, g)
    right = [each.detach().double().requires_grad_() for each in own]
    x, a, b, next_a, next_b = right
    gated, upward = (
        x @ layer.weight.double().t()
        + dropped(x, SEED, n)
        @ a[n * rank : (n + 1) * rank].t()
        @ b[n * inner : (n + 1) * inner].t()
        for n, layer in enumerate((gate, up))
    )
    active = torch.nn.functional.silu(gated) * upward
    expected = active @ down.weight.double().t() + dropped(active, NEXT) @ next_a.t() @ next_b.t()
    assert distance(y.detach(), expected.detach()) < 1e-6
    for ours, each in zip(found, torch.autograd.grad(expected, right, g.double()), strict=True):
        assert distance(ours, each) < 1e-6


def test_queries_keys_and_values_have_masks_of_their_own() -> None:
    """Angles of zero turn nothing."""
    rows, length, wide, dim, rank = 2, 5, 16, 8, 4
    layers = tuple(frozen(size, wide, n) for n, size in enumerate((16, 8, 8)))
    x, a = some((rows, length, wide), 50), some((3 * rank, wide), 51) / wide**0.5
    b = torch.block_diag(*(some((len(each.weight), rank), 52) for each in layers))
    own = [each.requires_grad_() for each in (x, a, b)]
    cos, sin = torch.ones(rows, length, dim), torch.zeros(rows, length, dim)
    parts = LoRAQKVRoPE.apply(*own, cos, sin, (2, 1, 1), layers, SEED, P)
    y = torch.cat([part.flatten(2) for part in parts], dim=-1).flatten(0, 1)
    expected = LoRALinear.apply(x.flatten(0, 1), a, b, None, layers, SEED, P)
    assert distance(y.detach(), expected.detach()) < 1e-6
    g = some(tuple(y.shape), 53)
    for ours, each in zip(
        torch.autograd.grad(y, own, g), torch.autograd.grad(expected, own, g), strict=True
    ):
        assert distance(ours, each) < 1e-6


def test_what_a_compiler_is_told_is_what_comes() -> None:
    tests = ("test_schema", "test_faketensor")
    x, a, h = some((9, 8), 1), some((6, 8), 2), some((9, 6), 3)
    torch.library.opcheck(dropout_lora_a, (x, a, SEED, P, 2), test_utils=tests)
    torch.library.opcheck(dropout_lora_a_weight_grad, (h, x, SEED, P, 2), test_utils=tests)
    torch.library.opcheck(add_dropout_lora_a_grad, (x, h, a, SEED, P, 2), test_utils=tests)
