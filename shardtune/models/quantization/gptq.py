"""GPTQ (Frantar et al., 2022): weights are rounded so that the layer's outputs change least.

Rounded each to its nearest, a row's weights are off independently of each other, and the errors add
up where inputs are correlated. GPTQ rounds column by column, and makes up for each error in the
columns that are left. With the Hessian H = sum (x - mean)(x - mean)^T over calibration tokens and U
the upper Cholesky factor of its inverse (H^-1 = U^T U):

    q_j = round(w_j)        e_j = (w_j - q_j) / U_jj        w_k -= e_j U_jk   for k > j

Scales stay those of nearest rounding; only which of its neighbours a weight becomes is chosen
otherwise. Columns go in blocks: inside a block one kernel does the above, row by row of W in
parallel; the columns behind it get all its errors as one GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardtune.kernels.triton_import import jit, tl, triton

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
DAMPING = (0.01, 0.1, 1.0)
"""Shares of the mean diagonal that are added to the Hessian's, so that it can be inverted. The next
one where Cholesky fails."""
OUTLIER_TOKEN = 10
"""Times the median norm of a token: one that is larger has no part in the mean."""
BLOCK_COLUMNS = 64
"""Columns of a block."""
_BLOCK_ROWS = 16


class HessianAccumulator:
    """Calibration statistics of a layer's inputs: their mean, and the Hessian around it.

    Tokens that are much larger than others have no part in the mean: in most models the first of a
    text is (an attention sink), in a few channels, and would decide alone. In the Hessian they
    have, because what is done to them reaches all others through attention.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.count = 0
        self.hessian = torch.zeros(width, width, device=device)
        """sum (x - origin)(x - origin)^T; around the mean once `mean` was asked for."""
        self._origin: Tensor | None = None
        self._sums = torch.zeros(2, width, device=device)
        self._ordinary_count = 0
        """Tokens in the first sum: those that aren't outliers."""

    def add(self, x: Tensor) -> None:
        if not len(x):  # an expert that no token was sent to
            return
        x32 = x.float()
        sizes = x32.norm(dim=1)
        # Not `<=`: what isn't a number stays, to be seen.
        ordinary = ~(sizes > OUTLIER_TOKEN * sizes.median())
        if self._origin is None:
            self._origin = x32[ordinary].mean(0)  # near to the mean, or digits would be lost
        x32 = x32 - self._origin
        self.count += len(x32)
        self._ordinary_count += int(ordinary.sum())
        self._sums += torch.stack([x32[ordinary].sum(0), x32.sum(0)])
        with torch.autocast(x.device.type, enabled=False):
            self.hessian.addmm_(x32.t(), x32)

    def mean(self) -> Tensor:
        """The mean input; zero, and so is the Hessian, if there were no inputs or one isn't finite.
        To be asked for once."""
        if self._origin is None or not self._sums.isfinite().all():
            self.hessian.zero_()
            return torch.zeros_like(self._sums[0])
        offset, total = self._sums[0] / self._ordinary_count, self._sums[1]
        # From sums around the origin to sums around the mean.
        self.hessian.addr_(offset, total, alpha=-1).addr_(total, offset, alpha=-1)
        self.hessian.addr_(offset, offset, alpha=self.count)
        return self._origin + offset

    def inverse_factor(self) -> Tensor | None:
        """U, the upper Cholesky factor of the inverse Hessian, which is freed. None if there is
        none."""
        hessian, self.hessian = self.hessian, self.hessian.new_empty(0)
        mean_diagonal = hessian.diagonal().mean()
        damped = 0.0
        for damping in DAMPING if mean_diagonal > 0 else ():
            hessian.diagonal().add_((damping - damped) * mean_diagonal)
            damped = damping
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


def gptq_quantize(weight: Tensor, scale: Tensor, inverse_factor: Tensor) -> Tensor:
    """GPTQ: fp32 weights as e4m3, with the given scales of their rows."""
    remaining, quantized = weight.clone(), torch.empty_like(weight, dtype=E4M3)
    width = weight.shape[1]
    block = _block_on_gpu if triton is not None and weight.is_cuda else _block_step_by_step
    for begin in range(0, width, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, width)
        errors = block(remaining, scale, inverse_factor, quantized, begin, end)
        remaining[:, end:].addmm_(errors, inverse_factor[begin:end, end:], alpha=-1)
    return quantized


def _block_step_by_step(
    remaining: Tensor,
    scale: Tensor,
    inverse_factor: Tensor,
    quantized: Tensor,
    begin: int,
    end: int,
) -> Tensor:
    errors = remaining.new_empty(len(remaining), end - begin)
    numbers = as_bytes(quantized)
    for column in range(begin, end):
        ratio = (remaining[:, column : column + 1] / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
        numbers[:, column : column + 1] = as_bytes(ratio)
        error = (remaining[:, column] - (ratio.float() * scale)[:, 0]) / inverse_factor[
            column, column
        ]
        remaining[:, column:end].addr_(error, inverse_factor[column, column:end], alpha=-1)
        errors[:, column - begin] = error
    return errors


def _block_on_gpu(
    remaining: Tensor,
    scale: Tensor,
    inverse_factor: Tensor,
    quantized: Tensor,
    begin: int,
    end: int,
) -> Tensor:
    """A block in one kernel: rows are independent."""
    rows, width = remaining.shape
    errors = remaining.new_empty(rows, end - begin)
    grid = (triton.cdiv(rows, _BLOCK_ROWS),)
    _gptq_block[grid](
        remaining,
        scale,
        inverse_factor,
        quantized,
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
    remaining,
    scale,
    inverse_factor,
    quantized,
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
    numbers = tl.load(remaining + place, mask=inside, other=0.0)
    scales = tl.load(scale + r, mask=r < rows, other=1.0)
    rounded_block = tl.zeros([some, block], tl.float32)
    error_block = tl.zeros([some, block], tl.float32)
    for column in range(columns):
        row = inverse_factor + (begin + column).to(tl.int64) * width + begin
        factor_row = tl.load(row + c, mask=(c >= column) & (c < columns), other=0.0)
        pivot = tl.sum(tl.where(c == column, factor_row, 0.0), 0)
        exact = tl.sum(tl.where((c == column)[None, :], numbers, 0.0), 1)
        ratio = tl.minimum(tl.maximum(exact / scales, -448.0), 448.0)
        rounded = ratio.to(tl.float8e4nv).to(tl.float32)
        error = (exact - rounded * scales) / pivot
        numbers -= error[:, None] * factor_row[None, :]
        rounded_block = tl.where((c == column)[None, :], rounded[:, None], rounded_block)
        error_block = tl.where((c == column)[None, :], error[:, None], error_block)
    tl.store(quantized + place, rounded_block.to(tl.float8e4nv), mask=inside)
    tl.store(errors + r.to(tl.int64)[:, None] * columns + c[None, :], error_block, mask=inside)


_gptq_block = jit(_gptq_block_kernel)


def as_bytes(quantized: Tensor) -> Tensor:
    """e4m3 as uint8, for which torch has more ops."""
    return quantized.detach().view(torch.uint8)
