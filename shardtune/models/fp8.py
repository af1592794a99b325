"""Frozen weights in 8-bit floating point, multiplied as such: Hopper's matrix unit does twice the
work a second that it does in bf16.

Each row of activations, of incoming gradients and of weights has a scale of its own (e4m3: three
bits behind the point, so a number is off by up to 6 % of itself, by chance in either direction;
one below a 28,000th of its row's largest by more, and below a 450,000th it is zero).
The backward pass multiplies with the transposed weights, whose rows are others: a layer holds its
weights twice, one byte each, as much as once in bf16. Adapters and everything that is trained stay
in bf16 and fp32.

Inputs of a layer have much in common: some channels are large, and much the same, in every token.
Whatever rounding does to them it does to each token, and the loss shows it. So what inputs usually
are is taken off before they are rounded, and goes through exact weights, once and for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    `usual` is what its inputs usually are, and `to_usual` what exact weights make of that; both are
    zero until somebody finds out.
    """

    scale: nn.Parameter
    back: nn.Parameter
    back_scale: nn.Parameter
    usual: nn.Parameter
    to_usual: nn.Parameter

    def __init__(self, linear: nn.Linear, compute: torch.dtype) -> None:
        super().__init__(linear, compute)
        for name in ("scale", "back", "back_scale", "usual", "to_usual"):
            self.register_parameter(name, None)
        self.home: tuple[JointFP8, ...] = ()
        self.begin = 0
        self.heard: list[tuple[Tensor, int]] | None = None
        """Sums of inputs, and of how many each is, while somebody listens."""

    def quantise(self, weight: Tensor) -> None:
        if self.home:
            self.weight = None  # type: ignore[assignment]
            self.home[0].take(self, weight)
            return
        self.weight, self.scale = _frozen(*by_row(weight))
        self.back, self.back_scale = _frozen(*by_row(weight.t().contiguous()))
        rows, columns = weight.shape
        zeros = (weight.new_zeros(size, dtype=self.compute) for size in (columns, rows))
        self.usual, self.to_usual = _frozen(*zeros)

    def dequantize(self) -> Tensor:
        weight, scale, _ = self.forwards()
        return (weight.float() * scale).to(self.compute)

    @property
    def whole(self) -> FP8Linear:
        """The layer that holds the weights."""
        return self.home[0] if self.home else self

    @property
    def rows(self) -> slice:
        """Where its own are."""
        return slice(self.begin, self.begin + self.out_features)

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """An input, less what it usually is, as the forward pass multiplies it."""
        whole = self.whole
        if whole.heard is not None:
            whole.heard.append((x.float().sum(0), len(x)))
        small, scale = by_row(x, whole.usual)
        return small, scale

    def forwards(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the forward pass multiplies with, and adds."""
        whole = self.whole
        if whole is self:
            return self.weight, self.scale, self.to_usual
        return whole.weight[self.rows], whole.scale[self.rows], whole.to_usual[self.rows]

    def backwards(self) -> tuple[Tensor, Tensor, None]:
        """What the backward pass multiplies with; it has nothing to add."""
        whole = self.whole
        if whole is self:
            return self.back, self.back_scale, None
        return whole.back[:, self.rows].contiguous(), whole.back_scale, None

    def listen(self) -> None:
        """From here on it hears what its inputs are."""
        self.heard = []

    def conclude(self) -> None:
        """That they are usually so, and listens no more."""
        if self.heard:
            count = sum(number for _, number in self.heard)
            total = torch.stack([each for each, _ in self.heard]).sum(0)
            self.usual.data.copy_(total / count)
        self.heard = None

    def take_exactly(self, weight: Tensor) -> None:
        """Has what inputs usually are go through `weight`, which are its exact weights."""
        self.whole.to_usual.data[self.rows] = (weight.float() @ self.whole.usual.float()).to(
            self.compute
        )

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
        y: Tensor = scaled(None, None, *layer.rounded(x), *layer.forwards(), x.dtype)
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


def _frozen(*values: Tensor) -> Iterator[nn.Parameter]:
    return (nn.Parameter(value, requires_grad=False) for value in values)


@torch.library.custom_op("shardtune::by_row", mutates_args=())
def by_row(x: Tensor, usual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """8-bit numbers, and the scale of each row, of what is left without the `usual`. On a GPU a row
    of up to `BLOCK` is read once; a compiler would read it twice, and gains nothing from doing it
    where the numbers are made."""
    if triton is None or not multiplied_as_such(x.device):
        wide = x.float() if usual is None else x.float() - usual.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
        small = (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3)
        return small.contiguous(), scale
    x = x if x.stride(1) == 1 else x.contiguous()
    small = torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    scale = x.new_empty(len(x), 1, dtype=torch.float32)
    block = min(triton.next_power_of_2(x.shape[1]), BLOCK)
    sizes = (x.stride(0), x.shape[1], block, block >= x.shape[1])
    less = x if usual is None else usual
    _rows[(len(x),)](x, less, small, scale, *sizes, usual is not None, num_warps=8)
    return small, scale


@by_row.register_fake
def _(x: Tensor, usual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    small = torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    return small, x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _row_kernel(  # type: ignore[no-untyped-def]
    x,
    usual,
    small,
    scale,
    x_row,
    columns,
    block: tl.constexpr,
    whole: tl.constexpr,
    less: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    small += row * columns
    c = tl.arange(0, block)
    largest = 1e-12
    if whole:
        inside = c < columns
        numbers = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
        if less:
            numbers -= tl.load(usual + c, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(numbers), 0))
        tl.store(small + c, (numbers * (448.0 / largest)).to(tl.float8e4nv), mask=inside)
    else:
        for begin in range(0, columns, block):
            inside = begin + c < columns
            numbers = tl.load(x + begin + c, mask=inside, other=0.0).to(tl.float32)
            if less:
                numbers -= tl.load(usual + begin + c, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(numbers), 0))
        for begin in range(0, columns, block):
            inside = begin + c < columns
            numbers = tl.load(x + begin + c, mask=inside, other=0.0).to(tl.float32)
            if less:
                numbers -= tl.load(usual + begin + c, mask=inside, other=0.0).to(tl.float32)
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
    more: Tensor | None,
    dtype: torch.dtype,
    past: Tensor | None = None,
) -> Tensor:
    """`narrow @ matrix` (if there is any) plus the 8-bit product `x @ weight.T`, and `more` in each
    row. Where there is, it may be added to what went `past` it, and has its shape then."""
    y = _multiply(x, x_scale, weight, scale, more, dtype)
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
    more: Tensor | None,
    dtype: torch.dtype,
    past: Tensor | None = None,
) -> Tensor:
    if past is not None:
        return past.new_empty(past.shape)
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def _multiply(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    more: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`x @ weight.T`, both with a scale for each row, and `more`."""
    if multiplied_as_such(x.device) and not any(size % 16 for size in weight.shape):
        return torch._scaled_mm(
            x.contiguous(),
            weight.t(),
            scale_a=x_scale,
            scale_b=scale.t(),
            bias=more,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    # The same numbers, multiplied as wider ones.
    product = (x.to(dtype) @ weight.to(dtype).t()).float() * x_scale * scale.t()
    return (product if more is None else product + more.float()).to(dtype)
