"""Linear layers whose frozen weights are stored in 4 or 8 bits.

A layer's numbers are an ordinary parameter of whole bytes, which FSDP2 and ZeRO-3 divide among the
ranks like any other. bitsandbytes' own layers are not made for that: they keep a second, undivided
copy (8 bits), hold on to the gathered weights until the backward pass, and in evaluation reorder
them in place for some processors (4 bits). So only its functions are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardtune.errors import ModelError, Problem

PLACE = "model.quantization"
Quantised = Literal["nf4", "int8", "fp8"]


def quantisable(parts: Iterable[nn.Module], kept: Iterable[str]) -> set[nn.Module]:
    """The linear layers in `parts`, without those that lie in a module called as one of `kept`.

    The output head lies in no part, so it is never among them.
    """
    names = frozenset(name.rsplit(".", 1)[-1] for name in kept)
    found: set[nn.Module] = {
        module
        for part in parts
        for name, module in part.named_modules()
        if isinstance(module, nn.Linear) and names.isdisjoint(name.split("."))
    }
    if not found:
        fact = "the model's layers have no ordinary linear layers that could be quantised"
        raise ModelError(Problem(PLACE, fact, "set model.quantization: none"))
    return found


def swap(model: nn.Module, chosen: set[nn.Module], kind: Quantised, compute: torch.dtype) -> None:
    """Puts an empty quantised layer in the place of each one that was chosen."""
    from shardtune.models.quantization.fp8 import FP8Linear  # it builds on this file

    make = {"nf4": NF4Linear, "int8": Int8Linear, "fp8": FP8Linear}[kind]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in chosen:
                assert isinstance(child, nn.Linear)
                setattr(parent, name, make(child, compute))


class QuantisedLinear(nn.Linear):
    """A frozen linear layer that multiplies in `compute` precision with weights restored for it."""

    def __init__(self, linear: nn.Linear, compute: torch.dtype) -> None:
        has_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, has_bias, device="meta")
        self.requires_grad_(False)
        self.compute = compute

    def quantise(self, weight: Tensor) -> None:
        """Takes over `weight`, on the device where it lies."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """The weights in `compute` precision."""
        raise NotImplementedError

    def dequantize_after(self, gradient: Tensor) -> Tensor:
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
        output: Tensor = _Product.apply(input.to(self.compute), self)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias
        return output.to(input.dtype)


class NF4Linear(QuantisedLinear):
    """4 bits a weight, one 8-bit scale for 64 of them, one fp32 scale for 256 of those.

    The scales, a thirtieth of the whole, are not divided among ranks.
    """

    state: Any = None

    def quantise(self, weight: Tensor) -> None:
        packed, self.state = _bitsandbytes().functional.quantize_4bit(
            weight.to(self.compute).contiguous(), compress_statistics=True, quant_type="nf4"
        )
        self.weight = nn.Parameter(packed, requires_grad=False)

    def dequantize(self) -> Tensor:
        return self._restored(self.weight, self.state.absmax)

    def dequantize_after(self, gradient: Tensor) -> Tensor:
        return self._restored(_after(self.weight, gradient), _after(self.state.absmax, gradient))

    def _restored(self, packed: Tensor, scales: Tensor) -> Tensor:
        functional, state = _bitsandbytes().functional, self.state
        exact = functional.dequantize_blockwise(scales, state.state2) + state.offset
        plain = functional.QuantState(
            exact.float(),
            shape=state.shape,
            dtype=state.dtype,
            blocksize=state.blocksize,
            quant_type=state.quant_type,
        )
        restored: Tensor = functional.dequantize_4bit(packed, plain)
        return restored

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NF4Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.state is not None:
            self.state.to(self.weight.device)
        return self


class Int8Linear(QuantisedLinear):
    """8 bits a weight: whole numbers from -127 to 127, and one scale for each output."""

    def __init__(self, linear: nn.Linear, compute: torch.dtype) -> None:
        super().__init__(linear, compute)
        scale = torch.empty(linear.out_features, 1, dtype=compute, device="meta")
        self.scale = nn.Parameter(scale, requires_grad=False)

    def quantise(self, weight: Tensor) -> None:
        exact = weight.to(self.compute).float()
        smallest = torch.finfo(self.compute).tiny  # a row of zeros is divided by it
        scale = (exact.abs().amax(1, keepdim=True) / 127).clamp_min(smallest).to(self.compute)
        # The scale is rounded before it is used, so its rounding costs nothing.
        rounded = (exact / scale.float()).round().clamp(-127, 127).to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def dequantize(self) -> Tensor:
        return self.weight.to(self.compute) * self.scale.to(self.compute)

    def dequantize_after(self, gradient: Tensor) -> Tensor:
        return _after(self.weight, gradient).to(self.compute) * self.scale.to(self.compute)


def restored(layer: nn.Linear) -> Tensor:
    """The weights of a frozen layer as they are multiplied."""
    return layer.dequantize() if isinstance(layer, QuantisedLinear) else layer.weight


def restored_after(layer: nn.Linear, gradient: Tensor) -> Tensor:
    """The same once more, for the backward pass: see `QuantisedLinear.dequantize_after`."""
    return layer.dequantize_after(gradient) if isinstance(layer, QuantisedLinear) else layer.weight


class _Product(torch.autograd.Function):
    """Input times weights. Keeps neither the weights nor a copy of them for the backward pass: an
    engine that gathers them again puts them into the layer, and nothing else holds them longer."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return input @ layer.dequantize().t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        layer: QuantisedLinear = ctx.layer
        return gradient.to(layer.compute) @ layer.dequantize_after(gradient), None


def _after(stored: Tensor, gradient: Tensor) -> Tensor:
    """`stored` itself; where a compiler looks on, a copy that can't be had before `gradient`."""
    return _copy_after(stored, gradient) if torch.compiler.is_compiling() else stored


@torch.library.custom_op("shardtune::copy_after", mutates_args=())
def _copy_after(stored: Tensor, gradient: Tensor) -> Tensor:
    return stored.clone()


@_copy_after.register_fake
def _(stored: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(stored)


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        fact = f"4-bit weights need bitsandbytes, which can't be imported: {error}"
        raise ModelError(Problem(PLACE, fact, "pip install 'shardtune[quant]'")) from error
    return bitsandbytes
