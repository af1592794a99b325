"""Attention that keeps packed documents apart by their boundaries, where a GPU can do so.

transformers calls `varlen_attention` in each layer in place of its own function for SDPA. Whoever
tells the model nothing of documents (generation, other tools) gets exactly what SDPA gives.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.model.document_boundaries import (
    VARLEN,
    VARLEN_DETERMINISTIC,
    VARLEN_SINKS,
    takes_boundaries,
    varlen_inputs,
)
from shardtune.core.model.family_support import SINK_FAMILIES
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.kernels import flash_attention as flash
from shardtune.kernels.sink_attention import sink_attention

_PROBE = "shardtune_probe"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What some families ask of attention besides: none of it is known here."""
WINDOW_FAMILIES = frozenset(
    {"gemma3_text", "gpt_oss", "ministral", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen3",
     "smollm3", "starcoder2"}
)  # fmt: skip
"""Families whose layers hand their sliding window on to attention, each its own (`sliding_window`):
the last so many tokens are seen, the token itself among them."""


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
    return partial(varlen_attn, **fewer)


_varlen = _find_varlen()


_masked: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Why a model keeps its mask."""
_ordinary: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Why a model's attention isn't FlashAttention 4's."""


def use_varlen_attention(model: Any, device: str, compute: torch.dtype) -> None:
    """Sets `varlen_attention` as the attention of a model that transformers has just made, before
    anything is wrapped or compiled, if nothing speaks against it."""
    why = why_unavailable(device, compute) or why_unsuited(model)
    if why is not None:
        _masked[model] = why
        return
    register()
    config = model.config.get_text_config()
    if config.model_type in SINK_FAMILIES:
        _ordinary[model] = "it has none for sinks"
        model.set_attn_implementation(VARLEN_SINKS)
        return
    why = flash.why_unavailable(device, compute, *_heads(config), windowed=_is_windowed(config))
    if why is not None:
        _ordinary[model] = why
    model.set_attn_implementation(VARLEN if why else VARLEN_DETERMINISTIC)


def describe_attention(model: Any) -> str:
    """Which kernels and which kind of isolation attention has, and why."""
    base = unwrap_model(model)
    if takes_boundaries(model):
        kernels = "FlashAttention 4"
        if model.config._attn_implementation != VARLEN_DETERMINISTIC:
            why = _ordinary.get(base, "not requested")
            kernels = f"torch's kernels ({kernels}: {why})"
        return f"attention: {kernels}; packed documents are isolated by cu_seqlens"
    why = _masked.get(base, "the strategy splits the model into stages")
    return f"attention: packed documents are isolated by a dense mask ({why})"


def same_on_all_ranks(said: list[str]) -> str:
    """What all ranks say of their attention, or who says what."""
    if len(set(said)) == 1:
        return said[0]
    ranks = {line: [n for n, each in enumerate(said) if each == line] for line in said}
    parts = "; ".join(f"ranks {', '.join(map(str, who))}: {line}" for line, who in ranks.items())
    return f"attention differs between ranks, and so does its speed: {parts}"


def _heads(config: Any) -> tuple[int, int, int]:
    """How many of queries, how many of keys and values, and how wide they are."""
    heads: int = getattr(config, "num_attention_heads", 0) or 1
    groups = getattr(config, "num_key_value_heads", None) or heads
    return heads, groups, getattr(config, "head_dim", None) or config.hidden_size // heads


def _is_windowed(config: Any) -> bool:
    """Whether some of its layers have a sliding window."""
    types = getattr(config, "layer_types", None)
    if types:
        return "sliding_attention" in types
    asked = getattr(config, "use_sliding_window", True)
    return bool(asked) and getattr(config, "sliding_window", None) is not None


def register() -> None:
    """Registers our attention with transformers, with the masks of what callers without boundaries
    get."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    for name, function, mask in (
        (VARLEN, varlen_attention, sdpa_mask),
        (VARLEN_DETERMINISTIC, deterministic_varlen_attention, sdpa_mask),
        (VARLEN_SINKS, sink_varlen_attention, eager_mask),
    ):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)


def why_unavailable(device: str, compute: torch.dtype) -> str | None:
    """What speaks against boundaries in place of a mask on a machine; None if nothing does."""
    if torch.device(device).type != "cuda":
        return "its weights are not on a GPU"
    if _varlen is None:
        return f"torch {torch.__version__} has no usable varlen_attn (torch 2.11 has)"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernel needs compute capability 8.0 or later"
    if compute not in (torch.bfloat16, torch.float16):
        return "the kernel needs a 16-bit precision"
    return None


def why_unsuited(model: Any) -> str | None:
    """What a family's attention has besides plain causal attention within a document."""
    whole, config = model.config, model.config.get_text_config()
    known = {"full_attention"}
    if config.model_type in WINDOW_FAMILIES:
        known.add("sliding_attention")
    kinds = set(getattr(config, "layer_types", None) or ()) - known
    windowed = getattr(config, "sliding_window", None) is not None
    windowed = windowed and getattr(config, "use_sliding_window", True)
    windowed = windowed and config.model_type not in WINDOW_FAMILIES
    ahead = not getattr(config, "is_causal", True)
    own = "eager" if config.model_type in SINK_FAMILIES else "sdpa"
    reasons = (
        (not model._supports_attention_backend, "it has no exchangeable attention"),
        (config is not whole or whole.is_encoder_decoder, "it is not a text-only decoder"),
        (bool(kinds), f"it has layers of {', '.join(sorted(kinds))}"),
        (getattr(model, "_is_stateful", False), "it has a recurrent state"),
        (windowed, "its layers don't pass on their sliding window"),
        (ahead or getattr(config, "use_bidirectional_attention", False), "it is not causal"),
        (whole._attn_implementation != own, f"model.attention is not {own}"),
    )
    found = next((why for holds, why in reasons if holds), None)
    found = found or _probe(model, sinks=config.model_type in SINK_FAMILIES)
    return None if found is None else f"{config.model_type}: {found}"


class _Arrived(Exception):
    """Carries what the first layer asks of attention out of a forward pass, which ends there."""

    def __init__(self, widths: set[int], asked: dict[str, Any]) -> None:
        super().__init__()
        self.widths, self.asked = widths, asked


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **asked: Any
) -> tuple[Tensor, None]:
    raise _Arrived({each.shape[-1] for each in (query, key, value)}, asked)


@torch.no_grad()
def _probe(model: Any, *, sinks: bool) -> str | None:
    """Not every family hands on what it is given, and none says so. So we look, at the cost of the
    projections of one layer; with weights that have no memory it costs nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(_PROBE, _probe_attention)
    was_training, before = model.training, model.config._attn_implementation
    device = next(model.parameters()).device
    ids = torch.zeros(1, 8, dtype=torch.long, device=device)
    positions = torch.arange(8, device=device)[None]
    told = varlen_inputs(torch.arange(8)[None] % 4, lambda tensor: tensor.to(device))
    model.train()  # dropout is asked for in training only
    model.set_attn_implementation(_PROBE)
    try:
        model(input_ids=ids, position_ids=positions, use_cache=False, **told)
    except _Arrived as arrived:
        if sinks and arrived.asked.pop("s_aux", None) is None:
            return "it passes no sinks to attention"
        return _why_refused(arrived)
    except Exception as error:  # noqa: BLE001 - a family that we know too little of
        return f"its layers can't be probed ({type(error).__name__})"
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)
    return "it never calls attention"


def _why_refused(arrived: _Arrived) -> str | None:
    if arrived.asked.get("cu_seq_lens_q") is None or arrived.asked.get("max_length_q") is None:
        return "it doesn't pass cu_seqlens on to its layers"
    if more := _unsupported(**arrived.asked):
        return f"it needs {', '.join(more)}"
    widest = max(arrived.widths)
    if len(arrived.widths) > 1 or widest > 256 or widest % 8:
        widths = ", ".join(map(str, sorted(arrived.widths)))
        return f"its head dims are {widths}: the kernel takes one, a multiple of 8 up to 256"
    return None


def _unsupported(
    *, dropout: float = 0.0, is_causal: bool | None = None, **others: Any
) -> list[str]:
    """What attention is asked for that boundaries and a causal kernel can't give."""
    asked = [name for name in _UNSUPPORTED if others.get(name) is not None]
    asked += ["dropout"] if dropout else []
    return asked + (["bidirectional attention"] if is_causal is False else [])


def varlen_attention(
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
    sliding_window: int | None = None,
    ordered: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer: `[rows, heads, length, dim]` to `[rows, length, heads, dim]`.

    With `max_length_q` the mask doesn't count: `cu_seq_lens_q` has the boundaries of documents over
    all rows, or is None where each row is one document. A layer with a `sliding_window` sees the
    last so many tokens of its document; one that is wider than a row is none. `ordered` is
    FlashAttention 4.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if max_length_q is None and attention_mask is not None and attention_mask.shape == (1,) * 4:
        assert key.shape[2] == 1, "a stand-in for a mask came without boundaries"
    rows, _, length, _ = query.shape
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if max_length_q is not None and cu_seq_lens_q is None and window is not None and not ordered:
        cu_seq_lens_q = _row_ends(rows, length, query.device)
    if max_length_q is None or (cu_seq_lens_q is None and not ordered):
        mask = attention_mask if max_length_q is None else None
        answer: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling,
            sliding_window=sliding_window, **others,
        )  # fmt: skip
        return answer
    assert not _unsupported(dropout=dropout, **others), "`why_unsuited` has looked"
    query, key, value = (each.transpose(1, 2) for each in _cast(query, key, value))
    if ordered:
        found, _ = flash.flash_attention(
            query, key, value, cu_seq_lens_q, max_length_q, scaling, window
        )
        return found, None
    assert cu_seq_lens_q is not None, "SDPA has taken the others"
    if query.is_cuda:
        found = _varlen_kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, window)
        return found, None
    return _varlen_by_mask(query, key, value, cu_seq_lens_q, scaling, window), None


def deterministic_varlen_attention(
    module: nn.Module, *given: Any, **told: Any
) -> tuple[Tensor, None]:
    """The same by the kernel whose gradients are the same each time."""
    return varlen_attention(module, *given, ordered=True, **told)


def sink_varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    s_aux: Tensor,
    scaling: float,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, Any]:
    """The same with a sink for each head. Without boundaries it is the family's own function."""
    if max_length_q is None:
        own = sys.modules[type(module).__module__].eager_attention_forward
        answer: tuple[Tensor, Any] = own(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
            s_aux=s_aux, sliding_window=sliding_window, **others,
        )  # fmt: skip
        return answer
    assert not _unsupported(dropout=dropout, **others), "`why_unsuited` has looked"
    rows, heads, length, dim = query.shape
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    ends = cu_seq_lens_q
    if ends is None:
        ends = _row_ends(rows, length, query.device)
    flat = (each.transpose(1, 2).flatten(0, 1) for each in _cast(query, key, value))
    found, _ = sink_attention(*flat, s_aux, ends, max_length_q, scaling, window)
    return found.view(rows, length, heads, dim), None


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast does for SDPA: rotary embeddings may have made fp32 of a 16-bit product."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(each.to(dtype) for each in tensors)


def _row_ends(rows: int, length: int, device: torch.device) -> Tensor:
    """The boundaries where each row is one document."""
    return torch.arange(0, (rows + 1) * length, length, device=device, dtype=torch.int32)


def _varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    assert _varlen is not None, "`why_unavailable` has looked"
    flat = (each.flatten(0, 1) for each in (query, key, value))
    seen = (-1 if window is None else window - 1, 0)  # tokens before this one, and behind it
    found: Tensor = _varlen(*flat, ends, ends, longest, longest, scale=scale, window_size=seen)
    return found.view(query.shape)


def _varlen_by_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """The same from the same boundaries, where there is no kernel: what tests can see on a CPU."""
    rows, length = query.shape[:2]
    token = torch.arange(rows * length, device=ends.device, dtype=ends.dtype)
    document = torch.searchsorted(ends, token, right=True).view(rows, length)
    position = torch.arange(length, device=ends.device)
    seen = (document[:, :, None] == document[:, None, :]) & (position[:, None] >= position)
    if window is not None:
        seen = seen & (position[:, None] - position < window)
    found = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return found.transpose(1, 2)
