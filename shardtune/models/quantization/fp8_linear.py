"""FP8 (e4m3) frozen weights with row-wise scaling, multiplied in 8 bits (`torch._scaled_mm`): on
Hopper a matmul in FP8 takes half the time that it takes in bf16.

Row-wise scaling: each row of activations, incoming gradients and weights has one fp32 scale,

    s = max|x| / 448        q = e4m3(x / s)        x @ W.T ~ (q_x @ q_W.T) * s_x * s_W.T

e4m3 has 3 mantissa bits: a number is off by up to 6 % of itself, one below a 28,000th of its row's
largest by more, and below a 450,000th it is zero. The backward pass multiplies with the transpose,
whose rows are others and need scales of their own: a layer holds its weights twice, one byte each,
as much as once in bf16. Adapters and everything that is trained stay in bf16 and fp32.

Calibration (`calibration.py`) keeps the loss near to that in bf16, in three ways:
- Bias correction. Some channels are large, and much the same, in every token. The mean activation
  is subtracted before quantization and added back through the exact weights:
  `y = fp8(x - mean) @ W.T + mean_output`, with `mean_output = W @ mean`.
- Weights are rounded by GPTQ (`gptq.py`), not each to its nearest.
- Outlier channels. Of those that matter most the rounding error of the input is multiplied too:
  `weight` has their columns a second time, behind all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.fp8_memory import outlier_columns
from shardtune.kernels.lora_residual import add_lora_residual
from shardtune.kernels.triton_import import jit, tl, triton
from shardtune.models.quantization.bitsandbytes_linear import QuantizedLinear
from shardtune.models.quantization.gptq import (
    E4M3,
    E4M3_MAX,
    HessianAccumulator,
    as_bytes,
    gptq_quantize,
)

_BLOCK = 32768
"""Numbers of a row that a streaming multiprocessor can hold."""
_PARAMETERS = (
    "scale", "backward_weight", "backward_scale", "input_mean", "mean_output", "outlier_channels",
)  # fmt: skip
_FEW_ROWS = 64
"""Rows for which cuBLAS may have no kernel with a bias."""
FP8_CAPABILITY = (8, 9)
"""The first compute capability whose tensor cores multiply FP8: Ada, then Hopper."""


class FP8Linear(QuantizedLinear):
    """A frozen FP8 layer. Layers that share an input may be stacked in one `StackedFP8Linear`; each
    then has its rows there (`holder`), and no weights of its own.

    `weight` and `scale` are for the forward pass, `backward_weight` (the transpose) and
    `backward_scale` for the backward pass. `input_mean` is the mean activation and `mean_output`
    what the exact weights make of it; both are zero before calibration. `outlier_channels` are the
    channels whose columns `weight` has twice.
    """

    scale: nn.Parameter
    backward_weight: nn.Parameter
    backward_scale: nn.Parameter
    input_mean: nn.Parameter
    mean_output: nn.Parameter
    outlier_channels: nn.Parameter

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype) -> None:
        super().__init__(linear, compute_dtype)
        for name in _PARAMETERS:
            self.register_parameter(name, None)
        self.stacked_in: tuple[StackedFP8Linear, ...] = ()
        self.first_row = 0
        self.observer: HessianAccumulator | None = None
        """Statistics of its inputs, during calibration."""
        self.inverse_factor: Tensor | None = None
        """GPTQ's U, between `finish_calibration` and `copy_outlier_columns`."""

    def quantize(self, weight: Tensor) -> None:
        if self.stacked_in:
            self.weight = None  # type: ignore[assignment]
            self.stacked_in[0].add_member(self, weight)
            return
        rows, columns = weight.shape
        outlier_channels = torch.arange(
            outlier_columns(columns), dtype=torch.int32, device=weight.device
        )
        small, scale = quantize_fp8_rowwise(weight)
        self.weight, self.scale = _frozen(_with_outlier_columns(small, outlier_channels), scale)
        self.backward_weight, self.backward_scale = _frozen(
            *quantize_fp8_rowwise(weight.t().contiguous())
        )
        zeros = (weight.new_zeros(size, dtype=self.compute_dtype) for size in (columns, rows))
        self.input_mean, self.mean_output, self.outlier_channels = _frozen(*zeros, outlier_channels)

    def dequantize(self) -> Tensor:
        weight, scale, _ = self.forward_weights()
        return (weight[:, : self.in_features].float() * scale).to(self.compute_dtype)

    @property
    def holder(self) -> FP8Linear:
        """The layer that holds the weights: itself, or the stacked one."""
        return self.stacked_in[0] if self.stacked_in else self

    @property
    def own_rows(self) -> slice:
        """Its rows in the holder's weights."""
        return slice(self.first_row, self.first_row + self.out_features)

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input less its mean, in FP8, with the scales of its rows."""
        whole = self.holder
        if whole.observer is not None:
            whole.observer.add(x)
        small, scale = quantize_fp8_rowwise(x, whole.input_mean, whole.outlier_channels)
        return small, scale

    def forward_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, scale and mean output, for the forward pass."""
        whole = self.holder
        if whole is self:
            return self.weight, self.scale, self.mean_output
        return (
            whole.weight[self.own_rows],
            whole.scale[self.own_rows],
            whole.mean_output[self.own_rows],
        )

    def backward_weights(self) -> tuple[Tensor, Tensor, None]:
        """The transposed weight and its scale, for the backward pass; nothing is added there."""
        whole = self.holder
        if whole is self:
            return self.backward_weight, self.backward_scale, None
        return whole.backward_weight[:, self.own_rows].contiguous(), whole.backward_scale, None

    def observe(self) -> None:
        """From here on it collects statistics of its inputs."""
        self.observer = HessianAccumulator(self.in_features, self.weight.device)

    def finish_calibration(self) -> None:
        """Sets the mean input and the outlier channels (largest |W|^2 * H_jj), computes GPTQ's
        factor, and observes no more."""
        assert self.observer is not None
        observer, self.observer = self.observer, None
        self.input_mean.data.copy_(observer.mean())
        sizes = self.dequantize().float().square().sum(0) * observer.hessian.diagonal()
        self.outlier_channels.data.copy_(
            sizes.topk(len(self.outlier_channels)).indices.sort().values
        )
        self.inverse_factor = observer.inverse_factor()

    def requantize(self, weight: Tensor) -> None:
        """Quantizes its exact weights once more, now with GPTQ, and computes the mean output with
        them."""
        whole, exact = self.holder, weight.float()
        whole.mean_output.data[self.own_rows] = (exact @ whole.input_mean.float()).to(
            self.compute_dtype
        )
        if whole.inverse_factor is not None:
            small = gptq_quantize(exact, whole.scale[self.own_rows], whole.inverse_factor)
            as_bytes(whole.weight)[self.own_rows, : self.in_features] = as_bytes(small)

    def copy_outlier_columns(self) -> None:
        """Once all its rows have been requantized."""
        self.inverse_factor = None
        found = as_bytes(self.weight)
        found[:, self.in_features :] = found.index_select(1, self.outlier_channels)

    def forward(self, input: Tensor) -> Tensor:
        flat = input.reshape(-1, input.shape[-1]).to(self.compute_dtype)
        y: Tensor = FP8Matmul.apply(flat, self)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            y = y + self.bias
        return y.view(*input.shape[:-1], y.shape[-1]).to(input.dtype)


class StackedFP8Linear(FP8Linear):
    """FP8 layers that share an input, stacked into one: one row of scales for the backward pass."""

    def __init__(self, members: Sequence[FP8Linear]) -> None:
        assert all(member.weight.is_meta for member in members)  # they are filled here
        first = members[0]
        width = sum(member.out_features for member in members)
        together = nn.Linear(first.in_features, width, bias=False, device="meta")
        super().__init__(together, first.compute_dtype)
        self._waiting: dict[int, Tensor] = {}
        self._count = len(members)
        begin = 0
        for member in members:
            member.stacked_in, member.first_row = (self,), begin
            begin += member.out_features

    def add_member(self, member: FP8Linear, weight: Tensor) -> None:
        """Waits for the weights of all members: columns have one scale in the backward pass."""
        self._waiting[member.first_row] = weight
        if len(self._waiting) == self._count:
            self.quantize(torch.cat([self._waiting[begin] for begin in sorted(self._waiting)]))
            self._waiting.clear()


class FP8Matmul(torch.autograd.Function):
    """`x W^T` with FP8 operands; backward `g W` with the transposed FP8 weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FP8Linear) -> Tensor:
        ctx.layer = layer
        y: Tensor = fp8_linear(
            None, None, *layer.quantize_input(x), *layer.forward_weights(), x.dtype
        )
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        weights = ctx.layer.backward_weights()
        return fp8_linear(
            None, None, *quantize_fp8_rowwise(gradient), *weights, gradient.dtype
        ), None


def has_fp8_matmul(device: str | torch.device) -> bool:
    """Whether the device's tensor cores multiply FP8."""
    if torch.device(device).type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def describe_fp8_matmul(device: str) -> str:
    """In words, for whoever wonders why FP8 is no faster."""
    if has_fp8_matmul(device):
        return "frozen weights: stored and multiplied in fp8"
    why = "there is no GPU"
    if torch.device(device).type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        needed = ".".join(map(str, FP8_CAPABILITY))
        why = f"the GPU has compute capability {major}.{minor}, of {needed}"
    return (
        f"frozen weights: stored in fp8, multiplied in bf16, which saves memory but no time ({why})"
    )


def _frozen(*values: Tensor) -> Iterator[nn.Parameter]:
    return (nn.Parameter(value, requires_grad=False) for value in values)


def _with_outlier_columns(small: Tensor, outlier_channels: Tensor) -> Tensor:
    found = as_bytes(small)
    return torch.cat([found, found.index_select(1, outlier_channels)], 1).view(E4M3)


@torch.library.custom_op("shardtune::quantize_fp8_rowwise", mutates_args=())
def quantize_fp8_rowwise(
    x: Tensor, input_mean: Tensor | None = None, outlier_channels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """FP8 quantization with one scale for each row: `s = max|x - mean| / 448`,
    `q = e4m3((x - mean) / s)`. The columns `outlier_channels` come once more, at the end, with the
    rounding error of the first: `e4m3((x - mean) / s - q)`.

    The kernel reads a row of up to `_BLOCK` numbers once and writes a byte for each; a compiler
    would read it twice, for the maximum and for the quotient."""
    if triton is None or not has_fp8_matmul(x.device):
        wide = x.float() if input_mean is None else x.float() - input_mean.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / E4M3_MAX
        wide = (wide / scale).clamp(-E4M3_MAX, E4M3_MAX)
        small = wide.to(E4M3)
        if outlier_channels is not None:
            left = wide[:, outlier_channels] - small.float()[:, outlier_channels]
            small = torch.cat([as_bytes(small), as_bytes(left.to(E4M3))], 1).view(E4M3)
        return small.contiguous(), scale
    x = x if x.stride(1) == 1 else x.contiguous()
    columns, more = x.shape[1], 0 if outlier_channels is None else len(outlier_channels)
    small = x.new_empty(len(x), columns + more, dtype=E4M3)
    scale = x.new_empty(len(x), 1, dtype=torch.float32)
    block = min(triton.next_power_of_2(columns), _BLOCK)
    given = (
        x,
        x if input_mean is None else input_mean,
        x if outlier_channels is None else outlier_channels,
        small,
        scale,
    )
    sizes = (x.stride(0), columns, more, block, triton.next_power_of_2(max(more, 1)))
    _quantize_fp8_rowwise[(len(x),)](
        *given, *sizes, block >= columns, input_mean is not None, num_warps=8
    )
    return small, scale


@quantize_fp8_rowwise.register_fake
def _(
    x: Tensor, input_mean: Tensor | None = None, outlier_channels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    columns = x.shape[1] + (0 if outlier_channels is None else outlier_channels.shape[0])
    small = x.new_empty(x.shape[0], columns, dtype=E4M3)
    return small, x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _quantize_fp8_rowwise_kernel(  # type: ignore[no-untyped-def]
    x,
    input_mean,
    outlier_channels,
    small,
    scale,
    x_row,
    columns,
    more: tl.constexpr,
    block: tl.constexpr,
    more_block: tl.constexpr,
    whole: tl.constexpr,
    less: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    small += row * (columns + more)
    c = tl.arange(0, block)
    largest = 1e-12
    if whole:
        inside = c < columns
        numbers = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
        if less:
            numbers -= tl.load(input_mean + c, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(numbers), 0))
        tl.store(small + c, (numbers * (448.0 / largest)).to(tl.float8e4nv), mask=inside)
    else:
        for begin in range(0, columns, block):
            inside = begin + c < columns
            numbers = tl.load(x + begin + c, mask=inside, other=0.0).to(tl.float32)
            if less:
                numbers -= tl.load(input_mean + begin + c, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(numbers), 0))
        for begin in range(0, columns, block):
            inside = begin + c < columns
            numbers = tl.load(x + begin + c, mask=inside, other=0.0).to(tl.float32)
            if less:
                numbers -= tl.load(input_mean + begin + c, mask=inside, other=0.0).to(tl.float32)
            numbers = (numbers * (448.0 / largest)).to(tl.float8e4nv)
            tl.store(small + begin + c, numbers, mask=inside)
    tl.store(scale + row, largest / 448.0)
    if more > 0:
        m = tl.arange(0, more_block)
        c = tl.load(outlier_channels + m, mask=m < more, other=0)
        numbers = tl.load(x + c).to(tl.float32)
        if less:
            numbers -= tl.load(input_mean + c).to(tl.float32)
        numbers = numbers * (448.0 / largest)
        numbers -= numbers.to(tl.float8e4nv).to(tl.float32)
        tl.store(small + columns + m, numbers.to(tl.float8e4nv), mask=m < more)


_quantize_fp8_rowwise = jit(_quantize_fp8_rowwise_kernel)


@torch.library.custom_op("shardtune::fp8_linear", mutates_args=())
def fp8_linear(
    lora_hidden: Tensor | None,
    lora: Tensor | None,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:
    """`(x @ weight.T) * x_scale * scale.T + bias + lora_hidden @ lora (+ residual)`, x and weight
    in FP8 (`torch._scaled_mm` with row-wise scales). With a residual the result has its shape."""
    y = _fp8_matmul(x, x_scale, weight, scale, bias, dtype)
    if lora_hidden is None or lora is None:
        return y
    if residual is None:
        return y.addmm_(lora_hidden, lora)
    return add_lora_residual(y, lora_hidden, lora.t(), residual)


@fp8_linear.register_fake
def _(
    lora_hidden: Tensor | None,
    lora: Tensor | None,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:
    if residual is not None:
        return residual.new_empty(residual.shape)
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def _fp8_matmul(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`(x @ weight.T) * x_scale * scale.T + bias`."""
    if has_fp8_matmul(x.device) and not any(size % 16 for size in weight.shape):
        few = len(x) < _FEW_ROWS
        y = torch._scaled_mm(
            x.contiguous(),
            weight.t(),
            scale_a=x_scale,
            scale_b=scale.t(),
            bias=None if few else bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return y.add_(bias) if few and bias is not None else y
    # The same numbers in a wider dtype; many a CPU has no fast matmul in 16 bits.
    wide = dtype if x.is_cuda else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        product = (x.to(wide) @ weight.to(wide).t()).float() * x_scale * scale.t()
    return (product if bias is None else product + bias.float()).to(dtype)
