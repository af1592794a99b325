"""Rounds weights by what goes into them, as GPTQ does (Frantar et al., 2022).

Rounded each by itself, a row's weights are off independently of each other, and their errors add up
where inputs go together. Here columns are rounded one after the other, and what that does to the
outputs is made up for in the columns that are left. Numbers and scales are the same; only which of
its two neighbours a weight becomes is chosen otherwise, and now and then one further off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
DAMPING = (0.01, 0.1, 1.0)
"""Shares of the mean spread that each channel is given besides, so that none is without. More where
the least is too little for the arithmetic."""
OUTLIER_TOKEN = 10
"""Times the median size of a token."""
BLOCK_COLUMNS = 64
"""That are made up for one by one, before all that follow are at once."""
_BLOCK_ROWS = 16


class HessianAccumulator:
    """What inputs are: what they usually are, and how they differ from that.

    Tokens that are much larger than others have no part in the first: in most models the first of a
    text is, in a few channels, and would decide alone. In the second they have, because what is
    done to them reaches all others through attention.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.count = 0
        self.hessian = torch.zeros(width, width, device=device)
        """Sums of products of each channel with each other."""
        self._origin: Tensor | None = None
        self._sums = torch.zeros(2, width, device=device)
        self._usual = 0
        """Of how many the first is the sum: those that aren't too large."""

    def add(self, x: Tensor) -> None:
        if not len(x):  # an expert that no token was sent to
            return
        wide = x.float()
        sizes = wide.norm(dim=1)
        usual = ~(sizes > OUTLIER_TOKEN * sizes.median())  # what isn't a number stays, to be seen
        if self._origin is None:
            self._origin = wide[usual].mean(0)  # near to the mean, or digits would be lost
        wide = wide - self._origin
        self.count += len(wide)
        self._usual += int(usual.sum())
        self._sums += torch.stack([wide[usual].sum(0), wide.sum(0)])
        with torch.autocast(x.device.type, enabled=False):
            self.hessian.addmm_(wide.t(), wide)

    def mean(self) -> Tensor:
        """What inputs usually are; zero if there were none, or if one isn't finite: then nothing is
        spread, either. To be asked for once."""
        if self._origin is None or not self._sums.isfinite().all():
            self.hessian.zero_()
            return torch.zeros_like(self._sums[0])
        off, total = self._sums[0] / self._usual, self._sums[1]
        # From sums around the origin to sums around the mean.
        self.hessian.addr_(off, total, alpha=-1).addr_(total, off, alpha=-1)
        self.hessian.addr_(off, off, alpha=self.count)
        return self._origin + off

    def inverse_factor(self) -> Tensor | None:
        """How the error of a column is made up for in those behind it: the upper factor of the
        inverse of `hessian`, which is gone then. None if there is none."""
        hessian, self.hessian = self.hessian, self.hessian.new_empty(0)
        usual = hessian.diagonal().mean()
        added = 0.0
        for damping in DAMPING if usual > 0 else ():
            hessian.diagonal().add_((damping - added) * usual)
            added = damping
            lower, failed = torch.linalg.cholesky_ex(hessian)
            if failed:
                continue
            del hessian  # squares of a wide layer are gigabytes
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            del inverse
            # What isn't a number is the least and the largest. To ask each for itself takes room.
            if failed or not torch.stack(upper.aminmax()).isfinite().all():
                return None
            return upper.contiguous()  # cuSOLVER has it by columns
        return None


def gptq_quantize(weight: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    """8-bit numbers for weights in fp32, with the scales of their rows."""
    left, small = weight.clone(), torch.empty_like(weight, dtype=E4M3)
    width = weight.shape[1]
    block = _on_gpu if triton is not None and weight.is_cuda else _one_by_one
    for begin in range(0, width, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, width)
        errors = block(left, scale, factor, small, begin, end)
        left[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    return small


def _one_by_one(
    left: Tensor, scale: Tensor, factor: Tensor, small: Tensor, begin: int, end: int
) -> Tensor:
    errors = left.new_empty(len(left), end - begin)
    numbers = as_bytes(small)
    for column in range(begin, end):
        ratio = (left[:, column : column + 1] / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
        numbers[:, column : column + 1] = as_bytes(ratio)
        error = (left[:, column] - (ratio.float() * scale)[:, 0]) / factor[column, column]
        left[:, column:end].addr_(error, factor[column, column:end], alpha=-1)
        errors[:, column - begin] = error
    return errors


def _on_gpu(
    left: Tensor, scale: Tensor, factor: Tensor, small: Tensor, begin: int, end: int
) -> Tensor:
    """The same in one kernel: a row knows nothing of the others."""
    rows, width = left.shape
    errors = left.new_empty(rows, end - begin)
    grid = (triton.cdiv(rows, _BLOCK_ROWS),)
    _gptq_block[grid](
        left,
        scale,
        factor,
        small,
        errors,
        rows,
        width,
        begin,
        end - begin,
        _BLOCK_ROWS,
        BLOCK_COLUMNS,
    )
    return errors


def _gptq_block_kernel(  # type: ignore[no-untyped-def]
    left,
    scale,
    factor,
    small,
    errors,
    rows,
    width,
    begin,
    columns,
    some: tl.constexpr,
    block: tl.constexpr,
):
    r = tl.program_id(0) * some + tl.arange(0, some)
    c = tl.arange(0, block)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    place = r.to(tl.int64)[:, None] * width + begin + c[None, :]
    numbers = tl.load(left + place, mask=inside, other=0.0)
    scales = tl.load(scale + r, mask=r < rows, other=1.0)
    found = tl.zeros([some, block], tl.float32)
    off = tl.zeros([some, block], tl.float32)
    for column in range(columns):
        row = factor + (begin + column).to(tl.int64) * width + begin
        shares = tl.load(row + c, mask=(c >= column) & (c < columns), other=0.0)
        own = tl.sum(tl.where(c == column, shares, 0.0), 0)
        exact = tl.sum(tl.where((c == column)[None, :], numbers, 0.0), 1)
        ratio = tl.minimum(tl.maximum(exact / scales, -448.0), 448.0)
        rounded = ratio.to(tl.float8e4nv).to(tl.float32)
        error = (exact - rounded * scales) / own
        numbers -= error[:, None] * shares[None, :]
        found = tl.where((c == column)[None, :], rounded[:, None], found)
        off = tl.where((c == column)[None, :], error[:, None], off)
    tl.store(small + place, found.to(tl.float8e4nv), mask=inside)
    tl.store(errors + r.to(tl.int64)[:, None] * columns + c[None, :], off, mask=inside)


_gptq_block: Any = triton.jit(_gptq_block_kernel) if triton is not None else None


def as_bytes(small: Tensor) -> Tensor:
    """8-bit numbers as bytes, which can be moved about in more ways."""
    return small.detach().view(torch.uint8)
