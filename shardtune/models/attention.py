"""Attention that keeps packed documents apart by their boundaries, where a GPU can do so.

transformers calls `attend` in each layer in place of its own function for SDPA. Whoever tells the
model nothing of documents (generation, other tools) gets exactly what SDPA gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.documents import ATTENTION, is_told
from shardtune.core.setup import Precision
from shardtune.errors import ModelError, Problem
from shardtune.models.load import DTYPES

_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
_BENT = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some families ask of attention besides: none of it is known here."""


def _find_varlen() -> Callable[..., Any] | None:
    """torch's kernel for documents of different lengths, causal; before 2.11 there is none that
    can be given a scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"window_size", "scale"} <= known.keys():
        return None
    # Keys may have fewer heads than queries all along; since torch 2.12 that must be said.
    fewer: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
    return partial(varlen_attn, window_size=(-1, 0), **fewer)


_varlen = _find_varlen()


def use_boundaries(model: Any, device: str, compute: torch.dtype) -> None:
    """Lets `attend` compute the attention of `model`, if nothing speaks against it."""
    if why_not(model, device, compute) is not None:
        return
    register()
    model.set_attn_implementation(ATTENTION)


def how_kept_apart(model: Any, device: str, precision: Precision) -> str:
    """In words, for whoever wonders why attention is slow."""
    if is_told(model):
        return "attention: packed documents are kept apart by their boundaries"
    why = why_not(model, device, DTYPES[precision])
    why = why or "the strategy cuts the model into stages, or keeps its weights in main memory"
    return f"attention: packed documents are kept apart by a dense mask ({why})"


def register() -> None:
    """Makes `attend` known to transformers, with SDPA's masks for those who tell it nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def why_not(model: Any, device: str, compute: torch.dtype) -> str | None:
    """What speaks against boundaries in place of a mask; None if nothing does."""
    if torch.device(device).type != "cuda":
        return "only a GPU has a kernel for them"
    if _varlen is None:
        return f"torch {torch.__version__} has no attention for documents of different lengths"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than the kernel's first, of compute capability 8.0"
    if compute not in (torch.bfloat16, torch.float16):
        return "the kernel takes 16-bit numbers only"
    return unsuited(model)


def unsuited(model: Any) -> str | None:
    """What a family's attention does besides looking back over its document."""
    unwrap = getattr(model, "get_base_model", None)  # peft's wrapper
    inner: Any = unwrap() if unwrap else model
    whole = inner.config
    config = whole.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windowed = getattr(config, "sliding_window", None) is not None
    reasons = (
        (not inner._supports_attention_backend, "it takes no attention from outside"),
        (config is not whole or whole.is_encoder_decoder, "it is not a decoder of text alone"),
        (bool(kinds), f"it has layers of {', '.join(sorted(kinds))}"),
        (getattr(inner, "_is_stateful", False), "it carries a state from token to token"),
        (windowed and getattr(config, "use_sliding_window", True), "it looks back a part only"),
        (_set(config, "attn_logit_softcapping"), "it caps its scores"),
        (_set(config, "kv_lora_rank"), "its keys and values differ in width"),
        (not getattr(config, "is_causal", True), "it looks ahead"),
        (_set(config, "use_bidirectional_attention"), "it looks ahead"),
        (any(_set(config, name) for name in _DROPOUT), "it drops weights of attention"),
        (_has_sinks(inner), "it has sinks"),
        (_head(config) > 256, f"its heads are {_head(config)} wide, and 256 is the most"),
        (_head(config) % 8 > 0, f"its heads are {_head(config)} wide, not a multiple of 8"),
        (whole._attn_implementation not in ("sdpa", ATTENTION), "another was asked for"),
    )
    return next((f"{config.model_type}: {why}" for holds, why in reasons if holds), None)


def _set(config: Any, name: str) -> bool:
    return bool(getattr(config, name, None))


def _head(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    return int(getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads)


def _has_sinks(model: nn.Module) -> bool:
    return any(name.endswith("sinks") for name, _ in model.named_parameters())


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer: `[rows, heads, length, dim]` to `[rows, length, heads, dim]`.

    With `max_length_q` the mask doesn't count: `cu_seq_lens_q` has the boundaries of documents over
    all rows, or is None where each row is one document.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if max_length_q is None or cu_seq_lens_q is None:
        mask = attention_mask if max_length_q is None else None
        answer: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **others
        )
        return answer
    _require_plain(dropout, others)
    query, key, value = (each.transpose(1, 2) for each in _cast(query, key, value))
    if query.is_cuda:
        return _by_kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    return _by_mask(query, key, value, cu_seq_lens_q, scaling), None


def _require_plain(dropout: float, others: dict[str, Any]) -> None:
    """A family that slipped through `unsuited` is stopped here, before the first step."""
    asked = [name for name in _BENT if others.get(name) is not None]
    asked += ["dropout"] if dropout else []
    if others.get("is_causal") is False:
        asked.append("is_causal")
    if asked:
        fact = f"attention by boundaries knows nothing of {', '.join(asked)}"
        raise ModelError(Problem("model.attention", fact, "set model.attention: eager"))


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast does for SDPA: rotary embeddings may have made fp32 of a 16-bit product."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(each.to(dtype) for each in tensors)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None
) -> Tensor:
    assert _varlen is not None, "`why_not` has looked"
    flat = (each.flatten(0, 1) for each in (query, key, value))
    found: Tensor = _varlen(*flat, ends, ends, longest, longest, scale=scale)
    return found.view(query.shape)


def _by_mask(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None
) -> Tensor:
    """The same from the same boundaries, where there is no kernel: what tests can see on a CPU."""
    rows, length = query.shape[:2]
    token = torch.arange(rows * length, device=ends.device, dtype=ends.dtype)
    document = torch.searchsorted(ends, token, right=True).view(rows, length)
    position = torch.arange(length, device=ends.device)
    seen = (document[:, :, None] == document[:, None, :]) & (position[:, None] >= position)
    found = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return found.transpose(1, 2)
