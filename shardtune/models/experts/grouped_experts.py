"""Grouped matmuls of frozen experts: rows sorted by expert, one product for all experts of a layer.

transformers keeps the experts of a layer in tensors of three dimensions. Here they are multiplied
as they are stored, in 16 bits or packed, and a LoRA correction is two small products beside them:
`y = x W^T + s (x A^T) B^T`. peft would add `s B A` to the weights of all experts first, and
autograd would keep the sum of every layer until the backward pass.

Nothing here saves a weight for the backward pass. An engine that gathers weights again puts them
into the module, and nothing else holds them longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.model.adapter_size import RANK_MULTIPLE
from shardtune.engine.dtensor import local
from shardtune.errors import ModelError, Problem
from shardtune.kernels.contiguous_copy import contiguous_copy
from shardtune.models.experts.routed_rows import (
    Routed,
    route,
    to_row_order,
    to_rows,
    to_tokens,
)


class LoraFactors(NamedTuple):
    """The correction `scale * B A` of every expert's matrix."""

    lora_a: Tensor
    """(experts, rank, inputs)"""
    lora_b: Tensor
    """(experts, outputs, rank)"""
    scale: float


Factors = dict[str, LoraFactors]
"""By the weight's name."""
ROW_BYTES = 16
"""torch's grouped product takes matrices whose rows are a multiple of so many bytes."""


class GroupedExperts(nn.Module):
    """What becomes of a module of experts of transformers (`use_experts_implementation`); it keeps
    its own gate, activation and biases."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    has_post_expert_norm: bool = False
    """Older versions of transformers don't have it."""
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: nn.Module
    _apply_gate: Callable[[Tensor], Tensor]
    plain_class: type[nn.Module]
    """What it was."""
    compute_dtype: torch.dtype
    compute_fused: Callable[..., Tensor | None] | None = None
    """What is asked first where layers are fused: `swiglu_experts.py`."""

    def matrix(self, name: str) -> Tensor:
        """All experts' matrices, (experts, outputs, inputs), in the dtype of the computation."""
        stored = local(getattr(self, name)).to(self.compute_dtype)  # of experts in shards: its own
        return stored.transpose(-2, -1) if self.is_transposed else stored

    def matrix_for_backward(self, name: str, gradient: Tensor) -> Tensor:
        """The same once more, for the backward pass."""
        return self.matrix(name)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        factors: Factors | None = None,
    ) -> Tensor:
        """`factors` come from the adapters' wrappers around the module."""
        factors = factors or {}
        routed = route(top_k_index, self.num_experts)
        hidden = hidden_states.to(self.compute_dtype)
        if self.compute_fused is not None:
            done = self.compute_fused(self, hidden, top_k_index, top_k_weights, routed, factors)
            if done is not None:
                return done.to(hidden_states.dtype)
        rows = to_rows(hidden, routed)
        inner = self._project("gate_up_proj" if self.has_gate else "up_proj", rows, routed, factors)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        weights = to_row_order(top_k_weights.reshape(-1), routed).unsqueeze(1)
        if self.has_post_expert_norm:
            found = self._project("down_proj", inner.to(self.compute_dtype), routed, factors)
            weighted = self.post_expert_norm(found) * weights
        else:
            # W (w a) is w (W a): in this order no backward pass asks for a result of W.
            inner = (inner * weights).to(self.compute_dtype)
            weighted = self._project("down_proj", inner, routed, factors, weights)
        return to_tokens(weighted, routed).to(hidden_states.dtype)

    def _project(
        self,
        name: str,
        rows: Tensor,
        routed: Routed,
        factors: Factors,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Each row through its expert's matrix; where rows are weighted already, their biases are
        weighted here."""
        found: Tensor = _FrozenGroupedMatmul.apply(rows, routed.ends, self, name)  # type: ignore[no-untyped-call]
        if self.has_bias:
            bias = getattr(self, f"{name}_bias").to(found.dtype)[routed.experts]
            found = found + (bias if weights is None else (bias * weights).to(found.dtype))
        if name in factors:
            found = found + correction(factors[name], rows, routed)
        return found


def correction(factors: LoraFactors, rows: Tensor, routed: Routed) -> Tensor:
    """`s (x A^T) B^T` of each row with its expert's factors."""
    lora_a, lora_b = (each.to(rows.dtype) for each in factors[:2])
    missing = -lora_a.shape[1] % RANK_MULTIPLE
    lora_a = contiguous_copy(functional.pad(lora_a, (0, 0, 0, missing)))
    lora_b = contiguous_copy(functional.pad(factors.scale * lora_b, (0, missing)))
    hidden = grouped_matmul(rows, lora_a, routed.ends)
    return grouped_matmul(hidden, lora_b, routed.ends)


def grouped_matmul(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """`x W^T` of each row with its expert's matrix."""
    return grouped_product(rows, matrices.transpose(-2, -1), ends)


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped product: each expert's rows with its matrix; or a matrix for each expert,
    where both are of two dimensions and the one between them is grouped. transformers knows which
    GPUs and versions lack it, and has another way there: an expert after the other, which is for
    widths that torch doesn't take, too."""
    if not _takes(rows, matrices):
        from transformers.integrations import moe

        apart: Tensor = torch.ops.transformers.grouped_mm_fallback(
            rows.to(matrices.dtype), matrices, ends
        )
        return apart
    if rows.is_cuda and rows.dtype == torch.bfloat16 and _gpu_has_grouped_mm():
        return functional.grouped_mm(rows, matrices, offs=ends)
    from transformers.integrations import moe

    found: Tensor = moe._grouped_mm(rows, matrices, offs=ends)
    return found


def _takes(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch's grouped product takes them, and the gradient of the result."""
    strides = (*rows.stride(), *matrices.stride(), matrices.shape[-1])
    numbers = ROW_BYTES // rows.element_size()
    return all(stride == 1 or stride % numbers == 0 for stride in strides)


def rows_align(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product takes such matrices, and their transposes, in `dtype`."""
    return not any(size * dtype.itemsize % ROW_BYTES for size in matrix.shape[-2:])


def multiply_odd_experts_apart(model: nn.Module) -> None:
    """Lets transformers multiply experts one by one whose widths its grouped products don't take;
    left to itself it fails in the first forward pass."""
    for module in model.modules():
        matrices = [getattr(module, name) for name in expert_matrices(module)]
        if not all(rows_align(matrix, matrix.dtype) for matrix in matrices):
            config: Any = module.config
            config._experts_implementation = "eager"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gpu_has_grouped_mm() -> bool:
    """Whether torch's own product runs on this GPU; a compiler needn't look into the question."""
    return hasattr(functional, "grouped_mm") and torch.cuda.get_device_capability() >= (8, 0)


class _FrozenGroupedMatmul(torch.autograd.Function):
    """The product with frozen matrices, which are asked for again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, holder: GroupedExperts, name: str) -> Tensor:
        ctx.ends, ctx.holder, ctx.name = ends, holder, name
        return grouped_matmul(rows, holder.matrix(name), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0].contiguous()
        matrices = ctx.holder.matrix_for_backward(ctx.name, gradient)
        return grouped_product(gradient, matrices, ctx.ends), None, None, None


def expert_matrices(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's weights if it is all experts of a layer, as transformers marks them;
    else none."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return names if all(name in module._parameters for name in names) else ()


def require_known_experts(parts: Iterable[nn.Module]) -> None:
    """Refuses to pack a model whose experts are multiplied in a way of their own: they would stay
    in 16 bits, and they are most of it."""
    for module in (each for part in parts for each in part.modules()):
        fused = any(each.ndim == 3 for each in module.parameters(recurse=False))
        counted = isinstance(getattr(module, "num_experts", None), int)
        if fused and counted and not expert_matrices(module):
            fact = f"{type(module).__name__} keeps experts in a way that can't be quantized yet"
            raise ModelError(Problem("model.quantization", fact, "set model.quantization: none"))


def become(module: Any, kind: type[GroupedExperts], compute_dtype: torch.dtype) -> None:
    """Lets a module of experts multiply as `kind` does; all else of it stays as it is."""
    way: type = kind
    own: type = type(module)
    module.__class__ = _class_of(way, own)
    module.compute_dtype = compute_dtype


@cache
def _class_of(kind: type, own: type) -> type:
    """One for all layers: torch.compile compiles a class once."""
    return type(f"{kind.__name__}Of{own.__name__}", (kind, own), {"plain_class": own})
