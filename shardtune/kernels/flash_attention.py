"""FlashAttention 4 as a custom op, where it is installed and the GPU is one that it is written for.

Attention is computed tile by tile with online softmax (see `cross_entropy.py`), so the scores never
reach memory; what is saved is the output and one log-sum-exp (`lse`) for each row and head. On an
H200 its kernels take less time than cuDNN's on long rows of one document, a little more on short
ones, and two thirds of torch's varlen kernel where a row has several; and they have a deterministic
backward. What is called here is what the package's own functions call: those can't be compiled
(graph breaks).
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardtune.compat.quiet import quiet_flash_attention
from shardtune.errors import ModelError, Problem
from shardtune.kernels.probe_cache import has_passed, probe_key, remember

PACKAGE = "flash_attn.cute.interface"
VERSIONED = ("flash-attn-4", "nvidia-cutlass-dsl", "torch")
"""Packages whose versions decide over its kernels."""
COMPUTE_CAPABILITIES = (9, 10)
"""Major compute capabilities with forward and backward kernels."""
_PROBE_TOKENS = 1024
"""Tokens of the probe: several blocks."""
PROBE_DOCUMENTS = 512
"""Documents from which on its scheduler uses other kernels, and some more."""
PROBE_WINDOW = 200
"""Tokens of its sliding window: neither a block nor a document."""
PROBE_TOLERANCE = 0.02
"""Relative error (norm) that 16-bit results may have beside fp32."""

_probed: dict[tuple[object, ...], str | None] = {}
_kernels: Any = None


def why_unavailable(
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    windowed: bool = False,
) -> str | None:
    """Why the package can't be used; None if it can. It is young: a probe with these heads goes
    through it, forward and backward, before a model does; with a sliding window, too, where the
    model has one. Once on a machine: what passed is remembered (`probe_cache.py`)."""
    key = (device, dtype, heads, kv_heads, head_dim, windowed)
    if key not in _probed:
        _probed[key] = _probe(device, dtype, heads // kv_heads, head_dim, windowed=windowed)
    return _probed[key]


def _probe(
    device: str, dtype: torch.dtype, heads: int, head_dim: int, *, windowed: bool
) -> str | None:
    global _kernels
    if torch.device(device).type != "cuda":
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in COMPUTE_CAPABILITIES:
        return f"it has no kernels for compute capability {major}.{minor}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _kernels = importlib.import_module(PACKAGE)
            key = probe_key(
                VERSIONED,
                gpu=torch.cuda.get_device_name(device),
                cuda=torch.version.cuda,
                shape=(heads, head_dim, dtype, windowed),
            )
            distance = (
                0.0 if has_passed(key) else _farthest(device, dtype, heads, head_dim, windowed)
            )
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it, there are other ways
        lines = str(error).strip().splitlines() or [""]
        fact = f"{type(error).__name__}: {lines[0][:200]}"
        _require_gpu(device, fact)
        return f"it fails: {fact}"
    if not distance < PROBE_TOLERANCE:
        return f"its results are wrong by {distance:.2g} of their norm"
    remember(key)
    quiet_flash_attention()
    return None


def _farthest(device: str, dtype: torch.dtype, heads: int, head_dim: int, windowed: bool) -> float:
    """How far its results are off, with a sliding window too where there is one."""
    windows = (None, PROBE_WINDOW) if windowed else (None,)
    return max(_probe_error(device, dtype, heads, head_dim, window) for window in windows)


def _require_gpu(device: str, fact: str) -> None:
    """A kernel that reads where it may not takes the GPU away from its process for good."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        problem = f"FlashAttention 4 failed in its trial and took the GPU with it: {fact}"
        raise ModelError(Problem("", problem, "pip uninstall flash-attn-4")) from error


@torch.enable_grad()
def _probe_error(
    device: str, dtype: torch.dtype, heads: int, head_dim: int, window: int | None = None
) -> float:
    """Output and gradients beside those in fp32: rows of one document, of two, and of a list with
    room for many. Gradients that differ the second time are as far off as can be."""
    draw = torch.Generator(device).manual_seed(0)
    shapes = [(1, _PROBE_TOKENS, count, head_dim) for count in (heads, 1, 1, heads)]
    *given, grad_output = (
        torch.randn(s, generator=draw, device=device, dtype=dtype) for s in shapes
    )
    place = torch.arange(_PROBE_TOKENS, device=device)
    farthest = 0.0
    for slots in (None, 2, PROBE_DOCUMENTS):
        seen = place[:, None] >= place
        if window is not None:
            seen = seen & (place[:, None] - place < window)
        ends = None
        if slots is not None:
            middle = _PROBE_TOKENS // 3
            seen = seen & ((place[:, None] < middle) == (place < middle))
            ends = torch.full((slots + 1,), _PROBE_TOKENS, device=device, dtype=torch.int32)
            ends[:2] = torch.tensor([0, middle])
        ours = [each.clone().requires_grad_() for each in given]
        right = [each.float().requires_grad_() for each in given]
        output, _ = flash_attention(*ours, ends, _PROBE_TOKENS, None, window)
        gradients, again = (
            torch.autograd.grad(output, ours, grad_output, retain_graph=True) for _ in range(2)
        )
        query, key, value = (each.transpose(1, 2) for each in right)
        expected = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, enable_gqa=True
        ).transpose(1, 2)
        pairs = zip(
            (output.detach(), *gradients),
            (expected.detach(), *torch.autograd.grad(expected, right, grad_output.float())),
            strict=True,
        )
        apart = [float((a.float() - b).norm() / b.norm()) for a, b in pairs]
        if not (all(each == each for each in apart) and all(map(torch.equal, gradients, again))):
            return float("inf")
        farthest = max(farthest, *apart)
    return farthest


@torch.library.custom_op("shardtune::flash_attention", mutates_args=())
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor | None,
    longest: int,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention, `[rows, length, heads, dim]` in and out, and the log-sum-exp. `ends` are
    the boundaries of documents over all rows (`cu_seqlens`); without them a row is one document.
    With a `window` a token sees the last so many, itself among them."""
    output, lse = _empty_outputs(query, ends)
    _kernels._flash_attn_fwd(
        *(_flat(each, ends) for each in (query, key, value)),
        out=_flat(output, ends),
        lse=lse,
        **_kernel_arguments(ends, longest, scale, window),
    )
    return output, lse


@flash_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, ends: Tensor | None, *_: Any) -> Any:
    return _empty_outputs(query, ends)


@torch.library.custom_op("shardtune::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    ends: Tensor | None,
    longest: int,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, deterministic: a resumed run has to be the same to
    the bit. On an H200 atomics in any order would take 10 to 15 % less."""
    gradients = _empty_gradients(query, key, value)
    _kernels._flash_attn_bwd(
        *(_flat(each, ends) for each in (query, key, value, output, grad_output)),
        lse,
        **dict(zip(("dq", "dk", "dv"), (_flat(each, ends) for each in gradients), strict=True)),
        deterministic=True,
        **_kernel_arguments(ends, longest, scale, window),
    )
    return gradients


@flash_attention_backward.register_fake
def _(grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return _empty_gradients(query, key, value)


def _empty_gradients(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of queries, keys and values."""
    query, key, value = (each.new_empty(each.shape) for each in given)
    return query, key, value


def _empty_outputs(query: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty output and log-sum-exp."""
    rows, length, heads, _ = query.shape
    shape = (rows, heads, length) if ends is None else (heads, rows * length)
    return query.new_empty(query.shape), query.new_empty(shape, dtype=torch.float32)


def _flat(each: Tensor, ends: Tensor | None) -> Tensor:
    return each if ends is None else each.flatten(0, 1)


def _kernel_arguments(
    ends: Tensor | None, longest: int, scale: float | None, window: int | None
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"softmax_scale": scale, "causal": True}
    if window is not None:
        arguments |= {"window_size_left": window - 1, "window_size_right": 0}
    if ends is not None:
        arguments |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        arguments |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return arguments


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ends, ctx.longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, ends)


def _backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, output, lse, ends = ctx.saved_tensors
    gradients = flash_attention_backward(
        grad_output, query, key, value, output, lse, ends, ctx.longest, ctx.scale, ctx.window
    )
    return (*gradients, None, None, None, None)


flash_attention.register_autograd(_backward, setup_context=_setup_context)
