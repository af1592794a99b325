"""AdamW on fp32 weights in two halves (`split_fp32`), with gradients in 16 bits, in one pass.

torch's own wants gradients in the precision of the weights, and a model that computes in 16 bits
would have to be given copies afterwards: two passes more over all weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardtune.engine.optim.host_mapped import host_mapped_zeros
from shardtune.engine.optim.split_fp32 import NAN, joined, split
from shardtune.errors import JobError, Problem
from shardtune.kernels.triton_import import jit, tl, triton

UPDATE_BLOCK = 1024
MOMENTS = ("exp_avg", "exp_avg_sq")


class SplitAdamW(torch.optim.AdamW):
    """Keeps the same state as torch's, under the same names."""

    def __init__(
        self,
        usual: torch.optim.Optimizer,
        lower: Mapping[nn.Parameter, Tensor],
        *,
        host_mapped: bool = False,
    ) -> None:
        """As `usual` is told, on weights of bf16 whose lower halves are given. Moments that are
        `host_mapped` lie in CPU memory, at `places` that are asked for at once, so that too little
        of it shows early."""
        super().__init__(usual.param_groups, fused=True)
        self._lower = dict(lower)
        self.places: dict[nn.Parameter, list[Tensor]] = {}
        if host_mapped:
            if triton is None and any(weight.is_cuda for weight in lower):
                fact = "Triton is missing, and only its kernel reads CPU memory"
                raise JobError(Problem("train.optimizer.paged", fact, "pip install triton"))
            self.places = {
                weight: [host_mapped_zeros(weight, torch.float32) for _ in MOMENTS]
                for weight in lower
            }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        one = torch.ones((), device=next(iter(self._lower)).device)
        divisor = getattr(self, "grad_scale", None)
        veto = getattr(self, "found_inf", None)
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            if not weights:
                continue
            states = [self._state_of(weight) for weight in weights]
            counts = [state["step"] for state in states]
            taken = one if veto is None else one - veto
            torch._foreach_add_(counts, [taken] * len(counts))  # not the one: torch would read it
            write(
                weights,
                [weight.grad for weight in weights],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [self._lower[weight] for weight in weights],
                counts,
                one if divisor is None else divisor,
                one * 0 if veto is None else veto,
                *(group["lr"], *group["betas"], group["eps"], group["weight_decay"]),
            )

    def _state_of(self, weight: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            made = self.places.get(weight) or [
                torch.zeros_like(weight, dtype=torch.float32) for _ in MOMENTS
            ]
            state.update(zip(MOMENTS, made, strict=True))
        return state

    def take_over(self, weight: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """A state from elsewhere; host-mapped moments stay where they are."""
        if not self.places:
            self.state[weight] = dict(state)
            return
        mine = self._state_of(weight)
        for key, value in state.items():
            mine[key].copy_(value)


@torch.library.custom_op("shardtune::adamw", mutates_args=("weights", "firsts", "seconds", "lower"))
def write(
    weights: list[Tensor],
    gradients: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    lower: list[Tensor],
    counts: list[Tensor],
    divisor: Tensor,
    veto: Tensor,
    rate: float,
    beta: float,
    beta_squares: float,
    eps: float,
    decay: float,
) -> None:
    """`counts` are the steps of each weight, this one included. Gradients are divided by `divisor`;
    a `veto` of one leaves all as it is."""
    every = list(zip(weights, gradients, firsts, seconds, lower, counts, strict=True))
    if triton is None or not weights[0].is_cuda:
        for weight, gradient, first, second, low, count in every:
            number = joined(weight, low)
            own = gradient.to(torch.float32, copy=True)  # torch divides it in place
            torch._fused_adamw_(
                [number], [own], [first], [second], [], [count],
                lr=rate, beta1=beta, beta2=beta_squares, weight_decay=decay, eps=eps,
                amsgrad=False, maximize=False, grad_scale=divisor, found_inf=veto,
            )  # fmt: skip
            split(number, weight, low)
        return
    # In float64, as are the differences from one below: in fp32 they would lose their digits.
    steps = torch.stack(counts).double()
    bias = torch.stack([1 - beta**steps, (1 - beta_squares**steps).sqrt()], dim=1).float()
    numbers = (rate, 1 - beta, beta_squares, 1 - beta_squares, eps, rate * decay)
    for row, (weight, *others, _) in enumerate(every):
        assert all(each.is_contiguous() for each in (weight, *others))
        size = weight.numel()
        _update[(triton.cdiv(size, UPDATE_BLOCK),)](
            weight.view(torch.int16), *others, bias[row], divisor, veto, size, *numbers,
            NAN, UPDATE_BLOCK, num_warps=4,
        )  # fmt: skip


def _update_kernel(  # type: ignore[no-untyped-def]
    upper, gradient, first, second, lower, bias, divisor, veto,
    size, rate, new, old_square, new_square, eps, decay,
    nan: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(veto) == 0.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) / tl.load(divisor)
        m = tl.load(first + place, mask=inside, other=0.0)
        v = tl.load(second + place, mask=inside, other=0.0)
        high = tl.load(upper + place, mask=inside, other=0).to(tl.int32) << 16
        low = tl.load(lower + place, mask=inside, other=0).to(tl.int32)
        w = (high + low).to(tl.float32, bitcast=True)
        m += new * (g - m)
        v = old_square * v + new_square * g * g
        w -= decay * w
        w -= rate / tl.load(bias) * m / (tl.sqrt(v) / tl.load(bias + 1) + eps)
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), nan)
        low = (bits << 16) >> 16
        tl.store(first + place, m, mask=inside)
        tl.store(second + place, v, mask=inside)
        tl.store(lower + place, low.to(tl.int16), mask=inside)
        tl.store(upper + place, ((bits - low) >> 16).to(tl.int16), mask=inside)


_update = jit(_update_kernel)
