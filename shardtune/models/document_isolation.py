"""Keeps packed documents apart in layers that carry a state from token to token, and in attention
whose family makes its masks without looking at positions.

A short convolution, a state-space layer (Mamba) or a linear attention (GatedDeltaNet) takes rows as
they come: the state at the end of a document goes into the next. Here each document becomes a row
of its own for as long as such a layer computes. Nothing looks ahead in them, so padding behind a
document changes nothing; documents of about one length share a batch, so that at most half of it is
padding. Whatever kernels are installed, they see rows and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.document_boundaries import takes_boundaries
from shardtune.engine.uneven_calls import UnevenCalls

MASKED_HERE = frozenset({"gpt_oss", "granitemoehybrid"})
"""Families that take masks ready made, and make theirs without positions."""
OF_PACKED_ROWS = frozenset(
    {"attention_mask", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)
"""What a layer may be told of its rows, which isn't true of rows that are one document each."""


def isolate_documents(model: Any) -> None:
    """Prepares a model that transformers has just made; without packed documents it computes as
    before."""
    config = model.config.get_text_config()
    mixers = [module for module in model.modules() if is_recurrent(module)]
    masks = config.model_type in MASKED_HERE and not takes_boundaries(model)
    decoder = model.get_decoder() if mixers or masks else None
    if not isinstance(decoder, nn.Module):
        return
    told = _Told()
    decoder.register_forward_pre_hook(told.read_positions, with_kwargs=True)
    for mixer in mixers:
        kind: type = type(mixer)
        mixer.__class__ = _by_document(kind)
        mixer._told = told
    if masks:
        decoder.register_forward_pre_hook(_with_masks(config, told), with_kwargs=True)


def is_recurrent(module: nn.Module) -> bool:
    """Whether a layer's tokens go through a causal convolution of its own: all layers that carry a
    state begin with one."""
    return any(isinstance(child, nn.Conv1d) for child in module.children())


class _Told:
    """Where the documents of the current micro-batch lie, as all layers of a model are told.

    A copy is the same one. A layer that is copied by itself (peft trains copies) hears what its
    model hears. Of a model and its copy the one that is called tells its layers before they
    compute.
    """

    documents: DocumentRows | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Told:
        return self

    def read_positions(self, module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        """Before each forward pass. With a cache there is one document a row, which goes on."""
        positions = named.get("position_ids")
        alone = named.get("past_key_values") is None and not named.get("use_cache")
        self.documents = None
        if isinstance(positions, Tensor) and positions.ndim == 2 and alone:
            self.documents = DocumentRows.of(positions)


@dataclass(frozen=True)
class DocumentRows:
    """The documents of packed rows, as rows of their own."""

    batches: tuple[tuple[Tensor, Tensor], ...]
    """Of each batch: which token stands at each place, counted over all packed rows, and which
    places hold one at all."""
    back: Tensor
    """Where each packed token lies among those of all batches."""

    @classmethod
    def of(cls, positions: Tensor) -> DocumentRows | None:
        """None where every row is one document. A GPU is waited for, once a micro-batch."""
        rows, length = positions.shape
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        starts = begins.flatten().nonzero().squeeze(1)
        if len(starts) == rows:
            return None
        ends = torch.cat([starts[1:], starts.new_tensor([rows * length])])
        lengths = ends - starts
        sizes = [1 << (each - 1).bit_length() for each in lengths.tolist()]
        batches = []
        for size in sorted(set(sizes)):
            chosen = torch.tensor([each == size for each in sizes], device=starts.device)
            places = torch.arange(size, device=starts.device)
            filled = places < lengths[chosen][:, None]
            tokens = starts[chosen][:, None] + torch.minimum(places, lengths[chosen][:, None] - 1)
            batches.append((tokens, filled))
        order = torch.cat([tokens[filled] for tokens, filled in batches])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return cls(tuple(batches), back)

    def apply(self, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """What a layer makes of `[rows, length, width]`, of each document by itself."""
        flat = hidden.flatten(0, 1)
        found = [layer(flat[tokens])[filled] for tokens, filled in self.batches]
        answer = torch.cat(found)[self.back]
        return answer.view(*hidden.shape[:2], -1)


@cache
def _by_document(kind: type) -> type:
    """A class, not a method of one layer: a copy of a layer has to compute with its own weights."""

    class ByDocument(kind, UnevenCalls):  # type: ignore[misc]
        _told: _Told

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
            forward, documents = super().forward, self._told.documents
            if documents is None:
                return forward(hidden_states, *given, **named)
            named = {key: value for key, value in named.items() if key not in OF_PACKED_ROWS}
            return documents.apply(lambda rows: forward(rows, *given, **named), hidden_states)

    ByDocument.__name__ = ByDocument.__qualname__ = kind.__name__
    return ByDocument


def _with_masks(config: Any, told: _Told) -> Callable[..., Any]:
    """transformers' own masks, from positions as well."""
    from transformers import masking_utils as masks

    def give(module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        if told.documents is None or named.get("attention_mask") is not None:
            return None
        if "flash" in config._attn_implementation:  # its kernels read positions themselves
            return None
        positions = named["position_ids"]
        dtype = next(module.parameters()).dtype
        if torch.is_autocast_enabled(positions.device.type):
            dtype = torch.get_autocast_dtype(positions.device.type)
        wanted = {
            "config": config,
            "inputs_embeds": torch.empty(*positions.shape, 1, dtype=dtype, device=positions.device),
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": positions,
        }
        named["attention_mask"] = {
            "full_attention": masks.create_causal_mask(**wanted),
            "linear_attention": None,
        }
        if getattr(config, "sliding_window", None):
            windowed = masks.create_sliding_window_causal_mask(**wanted)
            named["attention_mask"]["sliding_attention"] = windowed
        return given, named

    return give
