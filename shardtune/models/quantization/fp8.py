"""Frozen weights in 8-bit floating point, multiplied as such: Hopper's matrix unit does twice the
work a second that it does in bf16.

Each row of activations, of incoming gradients and of weights has a scale of its own (e4m3: three
bits behind the point, so a number is off by up to 6 % of itself, by chance in either direction;
one below a 28,000th of its row's largest by more, and below a 450,000th it is zero).
The backward pass multiplies with the transposed weights, whose rows are others: a layer holds its
weights twice, one byte each, as much as once in bf16. Adapters and everything that is trained stay
in bf16 and fp32.

Three things keep the loss near to that in bf16, all of them from what goes into a layer (`usual`):
- Inputs have much in common: some channels are large, and much the same, in every token. Rounding
  would do the same to each of them. So what inputs usually are is taken off before they are rounded
  and goes through exact weights, once and for all.
- Weights are rounded by the data (`by_data`), not each by itself.
- Of the channels that matter most, what rounding has left of an input is multiplied too: they have
  a second column, behind all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.fp8_memory import columns_twice
from shardtune.kernels.lora_residual import added
from shardtune.models.quantization.gptq import E4M3, LARGEST, Heard, by_data, bytes_of
from shardtune.models.quantization.linear import QuantisedLinear

try:
    import triton
    import triton.language as tl
except ImportError:  # on a machine without a GPU
    triton = None

BLOCK = 32768
"""Numbers of a row that a processor of the GPU can hold."""
FEW = 64
"""Rows for which cuBLAS may have no kernel that adds anything."""
NEEDED = (8, 9)
"""The first compute capability whose matrix unit multiplies 8-bit numbers: Ada, then Hopper."""


class FP8Linear(QuantisedLinear):
    """A frozen layer; or several that have one input, side by side, with one scale for what they
    share. Each of those then has its rows in the joint layer, and no weights of its own.

    `weight` is what the forward pass multiplies with, `back` its transpose with scales of its own.
    `usual` is what its inputs usually are, and `to_usual` what exact weights make of that; both are
    zero until somebody finds out. `twice` are the channels whose columns `weight` has twice.
    """

    scale: nn.Parameter
    back: nn.Parameter
    back_scale: nn.Parameter
    usual: nn.Parameter
    to_usual: nn.Parameter
    twice: nn.Parameter

    def __init__(self, linear: nn.Linear, compute: torch.dtype) -> None:
        super().__init__(linear, compute)
        for name in ("scale", "back", "back_scale", "usual", "to_usual", "twice"):
            self.register_parameter(name, None)
        self.home: tuple[JointFP8, ...] = ()
        self.begin = 0
        self.heard: Heard | None = None
        """Its inputs, while somebody listens."""
        self.factor: Tensor | None = None
        """By which its weights are rounded, while they are."""

    def quantise(self, weight: Tensor) -> None:
        if self.home:
            self.weight = None  # type: ignore[assignment]
            self.home[0].take(self, weight)
            return
        rows, columns = weight.shape
        twice = torch.arange(columns_twice(columns), dtype=torch.int32, device=weight.device)
        small, scale = by_row(weight)
        self.weight, self.scale = _frozen(_with_twice(small, twice), scale)
        self.back, self.back_scale = _frozen(*by_row(weight.t().contiguous()))
        zeros = (weight.new_zeros(size, dtype=self.compute) for size in (columns, rows))
        self.usual, self.to_usual, self.twice = _frozen(*zeros, twice)

    def dequantize(self) -> Tensor:
        weight, scale, _ = self.forwards()
        return (weight[:, : self.in_features].float() * scale).to(self.compute)

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
            whole.heard.add(x)
        small, scale = by_row(x, whole.usual, whole.twice)
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
        self.heard = Heard(self.in_features, self.weight.device)

    def conclude(self) -> None:
        """What inputs usually are, which channels matter most, and how weights are to be rounded;
        and listens no more."""
        assert self.heard is not None
        heard, self.heard = self.heard, None
        self.usual.data.copy_(heard.mean())
        sizes = self.dequantize().float().square().sum(0) * heard.spread.diagonal()
        self.twice.data.copy_(sizes.topk(len(self.twice)).indices.sort().values)
        self.factor = heard.factor()

    def take_exactly(self, weight: Tensor) -> None:
        """Rounds `weight`, which are its exact weights, once more, now by what was heard; and has
        what inputs usually are go through them."""
        whole, exact = self.whole, weight.float()
        whole.to_usual.data[self.rows] = (exact @ whole.usual.float()).to(self.compute)
        if whole.factor is not None:
            small = by_data(exact, whole.scale[self.rows], whole.factor)
            bytes_of(whole.weight)[self.rows, : self.in_features] = bytes_of(small)

    def finish(self) -> None:
        """Once all its rows have been taken."""
        self.factor = None
        found = bytes_of(self.weight)
        found[:, self.in_features :] = found.index_select(1, self.twice)

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


def _with_twice(small: Tensor, twice: Tensor) -> Tensor:
    found = bytes_of(small)
    return torch.cat([found, found.index_select(1, twice)], 1).view(E4M3)


@torch.library.custom_op("shardtune::by_row", mutates_args=())
def by_row(
    x: Tensor, usual: Tensor | None = None, twice: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """8-bit numbers, and the scale of each row, of what is left without the `usual`. The columns
    `twice` come once more, at the end, with what rounding has left of them. On a GPU a row of up to
    `BLOCK` is read once; a compiler would read it twice, and gains nothing from doing it where the
    numbers are made."""
    if triton is None or not multiplied_as_such(x.device):
        wide = x.float() if usual is None else x.float() - usual.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
        wide = (wide / scale).clamp(-LARGEST, LARGEST)
        small = wide.to(E4M3)
        if twice is not None:
            left = wide[:, twice] - small.float()[:, twice]
            small = torch.cat([bytes_of(small), bytes_of(left.to(E4M3))], 1).view(E4M3)
        return small.contiguous(), scale
    x = x if x.stride(1) == 1 else x.contiguous()
    columns, more = x.shape[1], 0 if twice is None else len(twice)
    small = x.new_empty(len(x), columns + more, dtype=E4M3)
    scale = x.new_empty(len(x), 1, dtype=torch.float32)
    block = min(triton.next_power_of_2(columns), BLOCK)
    given = (x, x if usual is None else usual, x if twice is None else twice, small, scale)
    sizes = (x.stride(0), columns, more, block, triton.next_power_of_2(max(more, 1)))
    _rows[(len(x),)](*given, *sizes, block >= columns, usual is not None, num_warps=8)
    return small, scale


@by_row.register_fake
def _(x: Tensor, usual: Tensor | None = None, twice: Tensor | None = None) -> tuple[Tensor, Tensor]:
    columns = x.shape[1] + (0 if twice is None else twice.shape[0])
    small = x.new_empty(x.shape[0], columns, dtype=E4M3)
    return small, x.new_empty(x.shape[0], 1, dtype=torch.float32)


def _row_kernel(  # type: ignore[no-untyped-def]
    x,
    usual,
    twice,
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
    if more > 0:
        m = tl.arange(0, more_block)
        c = tl.load(twice + m, mask=m < more, other=0)
        numbers = tl.load(x + c).to(tl.float32)
        if less:
            numbers -= tl.load(usual + c).to(tl.float32)
        numbers = numbers * (448.0 / largest)
        numbers -= numbers.to(tl.float8e4nv).to(tl.float32)
        tl.store(small + columns + m, numbers.to(tl.float8e4nv), mask=m < more)


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
        few = len(x) < FEW
        y = torch._scaled_mm(
            x.contiguous(),
            weight.t(),
            scale_a=x_scale,
            scale_b=scale.t(),
            bias=None if few else more,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return y.add_(more) if few and more is not None else y
    # The same numbers, multiplied as wider ones; many a CPU has no fast product in 16 bits.
    wide = dtype if x.is_cuda else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        product = (x.to(wide) @ weight.to(wide).t()).float() * x_scale * scale.t()
    return (product if more is None else product + more.float()).to(dtype)
