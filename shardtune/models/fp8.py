"""Frozen weights in 8-bit floating point, multiplied as such: Hopper's matrix unit does twice the
work a second that it does in bf16.

Each row of activations, of incoming gradients and of weights has a scale of its own (e4m3: three
bits behind the point, so a number is off by up to 6 % of itself, by chance in either direction;
one below a 28,000th of its row's largest by more, and below a 450,000th it is zero).
The backward pass multiplies with the transposed weights, whose rows are others: a layer holds its
weights twice, one byte each, as much as once in bf16. Adapters and everything that is trained stay
in bf16 and fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.models.added import added
from shardtune.models.quantise import QuantisedLinear

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 32768
"""Numbers of a row that a processor of the GPU can hold."""
NEEDED = (8, 9)
"""The first compute capability whose matrix unit multiplies 8-bit numbers: Ada, then Hopper."""


class FP8Linear(QuantisedLinear):
    """A frozen layer; or several that have one input, side by side, with one scale for what they
    share. Each of those then has its rows in the joint layer, and no weights of its own.

    `weight` is what the forward pass multiplies with, `back` its transpose with scales of its own.
    """

    scale: nn.Parameter
    back: nn.Parameter
    back_scale: nn.Parameter

    def __init__(self, linear: nn.Linear, compute: torch.dtype) -> None:
        super().__init__(linear, compute)
        for name in ("scale", "back", "back_scale"):
            self.register_parameter(name, None)
        self.home: tuple[JointFP8, ...] = ()
        self.begin = 0

    def quantise(self, weight: Tensor) -> None:
        if self.home:
            self.weight = None  # type: ignore[assignment]
            self.home[0].take(self, weight)
            return
        forward, backward = by_row(weight), by_row(weight.t().contiguous())
        for name, value in zip(
            ("weight", "scale", "back", "back_scale"), (*forward, *backward), strict=True
        ):
            setattr(self, name, nn.Parameter(value, requires_grad=False))

    def dequantize(self) -> Tensor:
        weight, scale = self.forwards()
        return (weight.float() * scale).to(self.compute)

    def forwards(self) -> tuple[Tensor, Tensor]:
        """What the forward pass multiplies with."""
        if not self.home:
            return self.weight, self.scale
        rows = slice(self.begin, self.begin + self.out_features)
        return self.home[0].weight[rows], self.home[0].scale[rows]

    def backwards(self) -> tuple[Tensor, Tensor]:
        """What the backward pass multiplies with."""
        if not self.home:
            return self.back, self.back_scale
        columns = slice(self.begin, self.begin + self.out_features)
        return self.home[0].back[:, columns].contiguous(), self.home[0].back_scale

    def forward(self, input: Tensor) -> Tensor:
        flat = input.reshape(-1, input.shape[-1]).to(self.compute)
        y: Tensor = Product8.apply(flat, self)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            y = y + self.bias
        return y.view(*input.shape[:-1], y.shape[-1]).to(input.dtype)


class JointFP8(FP8Linear):
    """Layers that have one input, as one."""

    def __init__(self, members: Sequence[FP8Linear]) -> None:
        assert all(member.weight.is_meta for member in members)  # they are filled here
        first = members[0]
        width = sum(member.out_features for member in members)
        together = nn.Linear(first.in_features, width, bias=False, device="meta")
        super().__init__(together, first.compute)
        self._waiting: dict[int, Tensor] = {}
        self._count = len(members)
        begin = 0
        for member in members:
            member.home, member.begin = (self,), begin
            begin += member.out_features

    def take(self, member: FP8Linear, weight: Tensor) -> None:
        """Waits for the weights of all members: what they share has one scale."""
        self._waiting[member.begin] = weight
        if len(self._waiting) == self._count:
            self.quantise(torch.cat([self._waiting[begin] for begin in sorted(self._waiting)]))
            self._waiting.clear()


class Product8(torch.autograd.Function):
    """Input times 8-bit weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FP8Linear) -> Tensor:
        ctx.layer = layer
        y: Tensor = scaled(None, None, *by_row(x), *layer.forwards(), x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        weights = ctx.layer.backwards()
        return scaled(None, None, *by_row(gradient), *weights, gradient.dtype), None


def multiplied_as_such(device: str | torch.device) -> bool:
    """Whether the device's matrix unit takes 8-bit numbers."""
    if torch.device(device).type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= NEEDED


def how_multiplied(device: str) -> str:
    """In words, for whoever wonders why 8 bits are no faster."""
    if multiplied_as_such(device):
        return "frozen weights: held in 8 bits and multiplied as such"
    why = "there is no GPU"
    if torch.device(device).type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        why = f"the GPU has compute capability {major}.{minor}, of {NEEDED[0]}.{NEEDED[1]}"
    return (
        f"frozen weights: held in 8 bits, multiplied as wider numbers, which saves no time ({why})"
    )


@torch.library.custom_op("shardtune::by_row", mutates_args=())
def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit numbers, and the scale of each row. On a GPU a row of up to `BLOCK` is read once; a
    compiler would read it twice, and gains nothing from doing it where the numbers are made."""
    if triton is None or not multiplied_as_such(x.device):
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
        small = (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3)
        return small.contiguous(), scale
    x = x if x.stride(1) == 1 else x.contiguous()
    small = torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    scale = x.new_empty(len(x), 1, dtype=torch.float32)
    block = min(triton.next_power_of_2(x.shape[1]), BLOCK)
    sizes = (x.stride(0), x.shape[1], block, block >= x.shape[1])
    _rows[(len(x),)](x, small, scale, *sizes, num_warps=8)
    return small, scale


@by_row.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    small = torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    return small, x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _row_kernel(  # type: ignore[no-untyped-def]
    x, small, scale, x_row, columns, block: tl.constexpr, whole: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    small += row * columns
    c = tl.arange(0, block)
    largest = 1e-12
    if whole:
        inside = c < columns
        numbers = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(numbers), 0))
        tl.store(small + c, (numbers * (448.0 / largest)).to(tl.float8e4nv), mask=inside)
    else:
        for begin in range(0, columns, block):
            inside = begin + c < columns
            numbers = tl.load(x + begin + c, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(numbers), 0))
        for begin in range(0, columns, block):
            inside = begin + c < columns
            numbers = tl.load(x + begin + c, mask=inside, other=0.0).to(tl.float32)
            numbers = (numbers * (448.0 / largest)).to(tl.float8e4nv)
            tl.store(small + begin + c, numbers, mask=inside)
    tl.store(scale + row, largest / 448.0)


_rows: Any = triton.jit(_row_kernel) if triton is not None else None


@torch.library.custom_op("shardtune::scaled", mutates_args=())
def scaled(
    narrow: Tensor | None,
    matrix: Tensor | None,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    past: Tensor | None = None,
) -> Tensor:
    """`narrow @ matrix` (if there is any) plus the 8-bit product `x @ weight.T`. Where there is, it
    may be added to what went `past` it, and has its shape then."""
    y = _multiply(x, x_scale, weight, scale, dtype)
    if narrow is None or matrix is None:
        return y
    if past is None:
        return y.addmm_(narrow, matrix)
    return added(y, narrow, matrix.t(), past)


@scaled.register_fake
def _(
    narrow: Tensor | None,
    matrix: Tensor | None,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    past: Tensor | None = None,
) -> Tensor:
    if past is not None:
        return past.new_empty(past.shape)
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def _multiply(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """`x @ weight.T`, both with a scale for each row."""
    if multiplied_as_such(x.device) and not any(size % 16 for size in weight.shape):
        return torch._scaled_mm(
            x.contiguous(),
            weight.t(),
            scale_a=x_scale,
            scale_b=scale.t(),
            out_dtype=dtype,
            use_fast_accum=True,
        )
    # The same numbers, multiplied as wider ones.
    product = (x.to(dtype) @ weight.to(dtype).t()).float()
    return (product * x_scale * scale.t()).to(dtype)
