"""Operations in float64, as their descriptions say, to compare ours with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Op = Callable[..., Tensor]


def with_gradients(op: Op, given: Sequence[Tensor], outer: Tensor | None = None) -> list[Tensor]:
    """The result of `op`, and the gradients of what it was given, in float64 for comparison.

    `outer` is the gradient of the result; by default numbers that only depend on its size.
    """
    own = [each.detach().clone().requires_grad_() for each in given]
    found = op(*own)
    if outer is None:
        outer = some(found.shape, seed=99).to(found.device)
    gradients = torch.autograd.grad(found, own, outer.to(found.dtype))
    return [found.detach().double(), *(each.double() for each in gradients)]


def some(shape: Sequence[int], seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, of the whole."""
    return float((found.double() - expected).norm() / expected.norm())


def adapted(x: Tensor, down: Tensor, up: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x @ torch.cat(list(weights)).t() + x @ down.t() @ up.t()


def gated_mlp(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    last_down: Tensor,
    last_up: Tensor,
    past: Tensor,
    first: Sequence[Tensor],
    last: Tensor,
) -> Tensor:
    gate, other = adapted(x, down, torch.block_diag(*up.chunk(2)), first).chunk(2, dim=1)
    active = gate * torch.sigmoid(gate) * other
    return past + adapted(active, last_down, last_up, [last])


def gated(y: Tensor, narrow: Tensor, up: Tensor) -> Tensor:
    gate, other = (y + narrow @ torch.block_diag(*up.chunk(2)).t()).chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * other
