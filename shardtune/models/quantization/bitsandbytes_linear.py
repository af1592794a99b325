"""Quantized linear layers: frozen weights in NF4 or int8, dequantized for each matmul (QLoRA).

The packed weights are an ordinary parameter of whole bytes, which FSDP2 and ZeRO-3 shard like any
other. bitsandbytes' own layers are not made for that: they keep a second, unsharded copy (int8),
hold on to the gathered weights until the backward pass, and in evaluation reorder them in place for
some CPUs (4 bits). So only its functions are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.quantized_size import require_whole_blocks
from shardtune.errors import ModelError, Problem

QUANTIZATION_KEY = "model.quantization"


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that dequantizes its weights to `compute_dtype` for each matmul."""

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype) -> None:
        has_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, has_bias, device="meta")
        self.requires_grad_(False)
        self.compute_dtype = compute_dtype

    def quantize(self, weight: Tensor) -> None:
        """Quantizes `weight`, on its device."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """The weights in `compute_dtype`."""
        raise NotImplementedError

    def dequantize_for_backward(self, gradient: Tensor) -> Tensor:
        """The same once more, for the backward pass.

        A compiler sees that both are one computation, and would keep the first result: the whole
        model in 16 bits. So it is shown stored weights that are there only when `gradient` is.
        """
        raise NotImplementedError

    @property
    def W_q(self) -> Tensor:
        """By this name peft knows a layer that it can ask to `dequantize` (DoRA does)."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _DequantizedMatmul.apply(input.to(self.compute_dtype), self)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias
        return output.to(input.dtype)


class NF4Linear(QuantizedLinear):
    """NF4 with double quantization: 4 bits a weight, one 8-bit scale for 64 of them, one fp32 scale
    for 256 of those.

    The scales, a thirtieth of the whole, are not sharded.
    """

    state: Any = None

    def quantize(self, weight: Tensor) -> None:
        packed, self.state = pack_nf4(weight.to(self.compute_dtype))
        self.weight = nn.Parameter(packed, requires_grad=False)

    def dequantize(self) -> Tensor:
        return restore_nf4(self.weight, self.state.absmax, self.state)

    def dequantize_for_backward(self, gradient: Tensor) -> Tensor:
        packed, scales = self.weight, self.state.absmax
        return restore_nf4(
            for_backward(packed, gradient), for_backward(scales, gradient), self.state
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NF4Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.state is not None:
            self.state.to(self.weight.device)
        return self


class Int8Linear(QuantizedLinear):
    """Int8 with row-wise absmax scaling: `s = max|w| / 127`, `q = round(w / s)`, one scale for each
    output."""

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype) -> None:
        super().__init__(linear, compute_dtype)
        scale = torch.empty(linear.out_features, 1, dtype=compute_dtype, device="meta")
        self.scale = nn.Parameter(scale, requires_grad=False)

    def quantize(self, weight: Tensor) -> None:
        exact = weight.to(self.compute_dtype).float()
        smallest = torch.finfo(self.compute_dtype).tiny  # a row of zeros is divided by it
        scale = (exact.abs().amax(1, keepdim=True) / 127).clamp_min(smallest).to(self.compute_dtype)
        # The scale is rounded before it is used, so its rounding costs nothing.
        rounded = (exact / scale.float()).round().clamp(-127, 127).to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def dequantize(self) -> Tensor:
        return self.weight.to(self.compute_dtype) * self.scale.to(self.compute_dtype)

    def dequantize_for_backward(self, gradient: Tensor) -> Tensor:
        return for_backward(self.weight, gradient).to(self.compute_dtype) * self.scale.to(
            self.compute_dtype
        )


def dequantized(layer: nn.Linear) -> Tensor:
    """The weights of a frozen layer in the compute dtype."""
    return layer.dequantize() if isinstance(layer, QuantizedLinear) else layer.weight


def dequantized_for_backward(layer: nn.Linear, gradient: Tensor) -> Tensor:
    """The same once more, for the backward pass: see `QuantizedLinear.dequantize_for_backward`."""
    return (
        layer.dequantize_for_backward(gradient)
        if isinstance(layer, QuantizedLinear)
        else layer.weight
    )


class _DequantizedMatmul(torch.autograd.Function):
    """`x W^T` with dequantized weights. Saves neither them nor the packed ones for the backward
    pass: an engine that gathers them again puts them into the layer, and nothing else holds them
    longer."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return input @ layer.dequantize().t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        layer: QuantizedLinear = ctx.layer
        return gradient.to(layer.compute_dtype) @ layer.dequantize_for_backward(gradient), None


def pack_nf4(weight: Tensor) -> tuple[Tensor, Any]:
    """A weight in NF4 with double quantization, and what bitsandbytes needs to restore it."""
    packed, state = import_bitsandbytes().functional.quantize_4bit(
        weight.contiguous(), compress_statistics=True, quant_type="nf4"
    )
    return packed, state


def restore_nf4(packed: Tensor, scales: Tensor, state: Any, skipped: int = 0) -> Tensor:
    """The weight that was packed; `scales` are those of `state`, or a copy of them, of which the
    first `skipped` belong to nothing here (`rows_of_nf4`).

    bitsandbytes' kernel for CPUs with AVX512 begins a block with each row, which packing doesn't:
    where blocks go over the end of a row it takes other scales. So it is shown a block as a row."""
    functional = import_bitsandbytes().functional
    numbers, block = math.prod(state.shape), state.blocksize
    shape = (1, numbers) if numbers % block else (numbers // block, block)
    exact = functional.dequantize_blockwise(scales, state.state2) + state.offset
    exact = exact[skipped:] if skipped else exact
    plain = functional.QuantState(
        exact.float(),
        shape=torch.Size(shape),
        dtype=state.dtype,
        blocksize=block,
        quant_type=state.quant_type,
    )
    dequantized: Tensor = functional.dequantize_4bit(packed, plain)
    return dequantized.view(state.shape)


def rows_of_nf4(state: Any, first: int, count: int) -> tuple[Any, int]:
    """What restores `count` rows of a weight from the `first` on, to the same bits; and how many of
    its scales come before theirs. Scales are quantized themselves, in blocks that rows don't
    respect, so that the first block is kept from its beginning."""
    require_whole_blocks(state.shape[1:])
    blocks = math.prod(state.shape[1:]) // state.blocksize
    outer = state.state2
    begin, end = first * blocks, (first + count) * blocks
    kept = begin // outer.blocksize
    make = import_bitsandbytes().functional.QuantState
    inner = make(
        outer.absmax[kept : -(-end // outer.blocksize)].clone(),
        code=outer.code,
        blocksize=outer.blocksize,
        dtype=outer.dtype,
    )
    found = make(
        state.absmax[kept * outer.blocksize : end].clone(),
        shape=torch.Size((count, *state.shape[1:])),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
        offset=state.offset,
        state2=inner,
    )
    return found, begin - kept * outer.blocksize


def for_backward(stored: Tensor, gradient: Tensor) -> Tensor:
    """`stored` itself; where a compiler looks on, a copy that can't be had before `gradient`."""
    return _clone_for_backward(stored, gradient) if torch.compiler.is_compiling() else stored


@torch.library.custom_op("shardtune::clone_for_backward", mutates_args=())
def _clone_for_backward(stored: Tensor, gradient: Tensor) -> Tensor:
    return stored.clone()


@_clone_for_backward.register_fake
def _(stored: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(stored)


def import_bitsandbytes() -> Any:
    """The package; ModelError with the extra's name where it can't be imported."""
    try:
        import bitsandbytes
    except ImportError as error:
        fact = f"quantized weights need bitsandbytes, which can't be imported: {error}"
        raise ModelError(
            Problem(QUANTIZATION_KEY, fact, "pip install 'shardtune[quant]'")
        ) from error
    return bitsandbytes
