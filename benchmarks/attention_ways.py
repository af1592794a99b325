"""Ways to compute causal attention of which no document sees another. `attention.py` times them.

Each takes queries as `[tokens, heads, dim]`, keys and values with fewer heads, documents one after
the other, and is prepared once for a batch: what depends on the lengths alone isn't its time.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

LONG = 1024  # tokens of a document from which a call of its own may pay
ROUND = 128  # such lengths are padded to a multiple, or each would need a kernel prepared for it


@dataclass(frozen=True)
class Packed:
    """Rows that documents fill to the last token."""

    lengths: tuple[int, ...]
    rows: int
    width: int
    device: torch.device
    longest: int | None = None
    """Documents are never longer; as wide as a row where nobody says."""

    @property
    def tokens(self) -> int:
        return self.rows * self.width

    @property
    def ends(self) -> Tensor:
        """Where documents begin and end, counted over all tokens."""
        return self._moved(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32))

    @property
    def documents(self) -> Tensor:
        """The number of each token's document."""
        lengths = torch.tensor(self.lengths)
        return self._moved(torch.repeat_interleave(torch.arange(len(lengths)), lengths))

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)


@dataclass(frozen=True)
class Way:
    """`prepare` makes what a batch needs, and answers with the function that computes it."""

    name: str
    prepare: Callable[[Packed], Attend]
    isolates: bool = True
    on_cpu: bool = False


@contextmanager
def _cudnn(tensor: Tensor) -> Iterator[None]:
    """SDPA's fastest kernel on a GPU; whatever there is elsewhere."""
    if not tensor.is_cuda:
        yield
        return
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yield


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`[rows, width, heads, dim]`, each row a document."""
    heads_first = (each.transpose(1, 2) for each in (query, key, value))
    return functional.scaled_dot_product_attention(
        *heads_first, is_causal=True, enable_gqa=True
    ).transpose(1, 2)


def _not_apart(packed: Packed) -> Attend:
    """What isolation costs is measured against this."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = (each.unflatten(0, (packed.rows, packed.width)) for each in (query, key, value))
        with _cudnn(query):
            return _causal(*rows).flatten(0, 1)

    return attend


def _dense_mask(packed: Packed) -> Attend:
    """As transformers does it: with a mask, keys and values are repeated for each query head."""
    documents = packed.documents.view(packed.rows, packed.width)
    position = torch.arange(packed.width, device=packed.device)
    mask = (documents[:, :, None] == documents[:, None, :]) & (position[:, None] >= position)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        rows = (
            each.unflatten(0, (packed.rows, packed.width)).transpose(1, 2)
            for each in (query, key, value)
        )
        found = functional.scaled_dot_product_attention(*rows, attn_mask=mask[:, None])
        return found.transpose(1, 2).flatten(0, 1)

    return attend


def _varlen(packed: Packed) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = packed.ends, packed.longest or packed.width
    known = inspect.signature(varlen_attn).parameters  # they differ between torch 2.10 and 2.12
    told: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {}
    told |= {} if told else {"is_causal": True}
    told |= {"enable_gqa": True} if "enable_gqa" in known else {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Any = varlen_attn(query, key, value, ends, ends, longest, longest, **told)
        return found

    return attend


def _flash_package(module: str) -> Callable[[Packed], Attend]:
    def prepare(packed: Packed) -> Attend:
        call = importlib.import_module(module).flash_attn_varlen_func
        told: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), packed.ends)
        told |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), packed.width)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            found = call(query, key, value, causal=True, **told)
            return found[0] if isinstance(found, tuple) else found

        return attend

    return prepare


def _cudnn_ragged(packed: Packed) -> Attend:
    """cuDNN's own way with documents of different lengths, through torch's private operation."""
    ends, longest = packed.ends, packed.width

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: tuple[Tensor, ...] = torch.ops.aten._cudnn_attention_forward(
            query, key, value, None, ends, ends, longest, longest, True, 0.0, True, False
        )
        return found[0]

    return attend


@cache
def _flex_compiled() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask)


def flex_mask(packed: Packed, documents: Tensor) -> Any:
    """Which blocks of keys each block of queries looks at."""

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[query] == documents[key])

    create = _flex_compiled()[1]
    return create(same_document, None, None, packed.tokens, packed.tokens, device=packed.device)


def _flex(packed: Packed) -> Attend:
    mask, compiled = flex_mask(packed, packed.documents), _flex_compiled()[0]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        one_row = (each.transpose(0, 1)[None] for each in (query, key, value))
        found: Tensor = compiled(*one_row, block_mask=mask, enable_gqa=True)
        return found[0].transpose(0, 1)

    return attend


def _loop(packed: Packed) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        alone = (each.split(packed.lengths) for each in (query, key, value))
        with _cudnn(query):
            return torch.cat(
                [_causal(*(each[None] for each in one))[0] for one in zip(*alone, strict=True)]
            )

    return attend


class _Spread(torch.autograd.Function):
    """Takes tokens to places of which each token has one; both ways are a gather."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_at: Tensor, place_of: Tensor) -> Tensor:
        ctx.place_of = place_of
        return tokens.index_select(0, token_at)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].index_select(0, ctx.place_of), None, None


class _Collect(torch.autograd.Function):
    """The way back; padding has no gradient."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, place_of: Tensor) -> Tensor:
        ctx.place_of, ctx.shape = place_of, places.shape
        return places.index_select(0, place_of)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        spread = gradients[0].new_zeros(ctx.shape)
        return spread.index_copy_(0, ctx.place_of, gradients[0]), None


def buckets(lengths: tuple[int, ...], widest: int) -> dict[int, list[int]]:
    """The documents by the width that they are padded to: one of a dozen, each 1.4 times the last.

    More widths would pad less, but each is a call of its own.
    """
    found: dict[int, list[int]] = {}
    widths = [64, 96]
    while widths[-1] < widest:
        widths.append(2 * widths[-2])
    for number, length in enumerate(lengths):
        width = next(width for width in widths if width >= length)
        found.setdefault(width, []).append(number)
    return dict(sorted(found.items()))


def _bucketed(packed: Packed) -> Attend:
    groups = buckets(packed.lengths, packed.width)
    return _in_groups(packed, [(width, numbers, _causal) for width, numbers in groups.items()])


def _by_length(packed: Packed) -> Attend:
    """Short documents together, by a kernel that takes many; long ones in calls of their own."""
    alone = [n for n, length in enumerate(packed.lengths) if length >= LONG]
    groups: list[Group] = [
        (-(-packed.lengths[number] // ROUND) * ROUND, [number], _causal) for number in alone
    ]
    others = [n for n, length in enumerate(packed.lengths) if length < LONG]
    if others:
        lengths = tuple(packed.lengths[number] for number in others)
        together = _varlen(Packed(lengths, 1, sum(lengths), packed.device, longest=LONG))
        groups.insert(0, (0, others, lambda *rows: together(*(each[0] for each in rows))[None]))
    return _in_groups(packed, groups)


Group = tuple[int, list[int], Attend]
"""The width that documents are padded to (0: they stand one after the other in one row), their
numbers, and what computes `[rows, width, heads, dim]`."""


def _in_groups(packed: Packed, groups: Sequence[Group]) -> Attend:
    """Padding stands behind a document, where nothing looks: any token may stand there."""
    starts = [0, *accumulate(packed.lengths)]
    shapes: list[tuple[int, int]] = []
    pieces: list[Tensor] = []
    place_of = torch.empty(packed.tokens, dtype=torch.long)
    filled = 0
    for width, numbers, _ in groups:
        together = sum(packed.lengths[number] for number in numbers)
        shapes.append((len(numbers), width) if width else (1, together))
        for number in numbers:
            begin, length = starts[number], packed.lengths[number]
            taken = width or length
            pieces.append(torch.arange(begin, begin + taken).clamp(max=begin + length - 1))
            place_of[begin : begin + length] = torch.arange(filled, filled + length)
            filled += taken
    token_at, place_of = torch.cat(pieces).to(packed.device), place_of.to(packed.device)
    sizes = [count * width for count, width in shapes]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spread = (
            _Spread.apply(each, token_at, place_of).split(sizes) for each in (query, key, value)
        )
        with _cudnn(query):
            found = [
                compute(*(each.unflatten(0, shape) for each in one)).flatten(0, 1)
                for shape, one, (_, _, compute) in zip(
                    shapes, zip(*spread, strict=True), groups, strict=True
                )
            ]
        collected: Tensor = _Collect.apply(torch.cat(found), place_of)
        return collected

    return attend


WAYS = (
    Way("not isolated: SDPA, causal, a row at a time", _not_apart, isolates=False, on_cpu=True),
    Way("SDPA with a dense mask", _dense_mask, on_cpu=True),
    Way("`varlen_attn`", _varlen),
    Way("FlexAttention, compiled", _flex),
    Way("a loop of SDPA calls, one a document", _loop, on_cpu=True),
    Way("SDPA, documents of like lengths padded", _bucketed, on_cpu=True),
    Way(f"`varlen_attn` below {LONG} tokens, SDPA above", _by_length),
    Way("cuDNN, ragged", _cudnn_ragged),
    Way("FlashAttention 4", _flash_package("flash_attn.cute")),
    Way("FlashAttention 3", _flash_package("flash_attn_interface")),
    Way("FlashAttention 2", _flash_package("flash_attn")),
)
