"""A KV cache whose tensors stay where they are: each row has a slot, its tokens from column 0 on.

    slot 0   a b c d e ·        a step writes each row's token behind its last one, and attends to
    slot 1   f g h · · ·        all columns of a bucket: what lies behind a row's token is masked
    slot 2   · · · · · ·        (nobody's: it is computed with the others, and its token dropped)

So a step has few shapes (rows and columns rounded up), and no number in it but what lies in
tensors: it can be a CUDA graph. Where steps are launched one by one, `serve/row_cache.py` attends
to no column too many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from shardtune.engine.decode_graphs import Bucket

COLUMN_STEP = 128
"""Columns are rounded up to a multiple of this; above 1,024, of an eighth of the power of two."""
ATTENTION_KINDS = ("full_attention", "sliding_attention")
"""Layers whose masks are known here."""


def round_rows(rows: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ..."""
    power = 1 << (rows - 1).bit_length()
    return 3 * power // 4 if power >= 4 and rows <= 3 * power // 4 else power


def round_columns(columns: int) -> int:
    step = max(COLUMN_STEP, (1 << (columns - 1).bit_length()) // 16)
    return -(-columns // step) * step


class SlotCache:
    """Keys and values by slot; `cache` is what the model's forward takes."""

    def __init__(self, config: Any) -> None:
        kinds = DynamicCache(config=config).layers
        self._layers = [_SlotLayer() for _ in kinds]
        self._windows: list[int | None] = [getattr(each, "sliding_window", None) for each in kinds]
        self.cache = Cache(layers=self._layers)
        self.lengths: list[int] = []
        """How many tokens of each row are in the cache."""
        self.shape = (0, 0)
        """Rows and columns that there is room for."""

    def prefill(self) -> Any:
        """An empty cache for new prompts. It keeps their keys outside a sliding window too."""
        return Cache(layers=[DynamicLayer() for _ in self._layers])

    def has_room(self, rows: int, columns: int) -> bool:
        """For so many rows, each of so many columns."""
        return rows <= self.shape[0] and columns <= self.shape[1]

    def reserve(self, rows: int, columns: int) -> bool:
        """Makes room; returns whether tensors have moved. Where memory runs out, those who are here
        have the room that they had."""
        if self.has_room(rows, columns):
            return False
        old, new = self.shape, (round_rows(rows), round_columns(columns))
        kept = len(self.lengths), max(self.lengths, default=0)
        self.shape = (min(old[0], new[0]), min(old[1], new[1]))  # which all layers have meanwhile
        for layer in self._layers:
            layer.reallocate(new, kept)
        self.shape = new
        return True

    def clear(self) -> None:
        """Forgets all rows, and gives their memory back."""
        self.lengths, self.shape = [], (0, 0)
        for layer in self._layers:
            layer.release()

    def add(self, prefilled: Any, row: int, length: int, shared: int = 0) -> None:
        """A new last row of `length` tokens from one row of a prefilled cache: its last columns, or
        its first `shared` and the rest of them last, with padding in between."""
        place = len(self.lengths)
        for layer, new in zip(self._layers, prefilled.layers, strict=True):
            if new.is_initialized:  # layers that share another's keys have none of their own
                keys, values = new.keys[row], new.values[row]
                # A sliding window may have dropped what no later token sees.
                own = min(length - shared, keys.shape[-2])
                layer.make(self.shape, keys, values)
                layer.write(place, length - own, keys[:, -own:], values[:, -own:])
                if shared:
                    layer.write(place, 0, keys[:, :shared], values[:, :shared])
        self.lengths.append(length)

    def remove(self, row: int) -> None:
        """Forgets a row. The last one takes its place, as the caller must note as well."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self._layers:
                layer.move_row(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def bucket(self) -> Bucket:
        """Rows and columns that the next step is computed with."""
        rows, columns = len(self.lengths), max(self.lengths) + 1
        return min(round_rows(rows), self.shape[0]), min(round_columns(columns), self.shape[1])

    def begin_step(self, bucket: Bucket, positions: Tensor, dtype: torch.dtype) -> Any:
        """What the next forward pass writes at `positions` (rows, 1) and sees; returns its mask, or
        one for each kind of layer where there are two."""
        rows, columns = bucket
        places = torch.arange(rows, device=positions.device)
        for layer in self._layers:
            layer.show(places, positions[:, 0], columns)
        column = torch.arange(columns, device=positions.device)

        def mask(window: int | None) -> Tensor:
            seen = column <= positions
            if window is not None:
                seen &= column > positions - window
            hidden = torch.zeros(seen.shape, dtype=dtype, device=positions.device)
            return hidden.masked_fill_(~seen, torch.finfo(dtype).min)[:, None, None]

        kinds = sorted(set(self._windows), key=lambda window: window or 0)
        if len(kinds) == 1:
            return mask(kinds[0])
        return dict(zip(ATTENTION_KINDS, map(mask, kinds), strict=True))


def why_no_slots(model: Any) -> str:
    """Why a model's rows can't be decoded in slots; nothing if they can."""
    config = model.config.get_text_config()
    layers = DynamicCache(config=model.config).layers
    kinds = {type(layer) for layer in layers}
    windows = {getattr(layer, "sliding_window", None) for layer in layers}
    named = set(getattr(config, "layer_types", None) or ATTENTION_KINDS)
    reasons = (
        (not layers or kinds - {DynamicLayer, DynamicSlidingWindowLayer}, "it has other states"),
        (named - set(ATTENTION_KINDS), "it attends in other ways than to all or to a window"),
        (len(windows - {None}) > 1, "it has windows of several sizes"),
        (getattr(config, "alibi", False), "its attention counts columns (ALiBi)"),
        (
            not getattr(model, "_can_compile_fullgraph", False),
            "transformers says that its shapes depend on its numbers",
        ),
    )
    return next((why for holds, why in reasons if holds), "")


class _SlotLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's part: transformers sees the rows and columns of a bucket."""

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._all: tuple[Tensor, Tensor] | None = None
        self._places: Tensor | None = None
        self._positions: Tensor | None = None
        self._columns = 0

    def reallocate(self, shape: tuple[int, int], kept: tuple[int, int]) -> None:
        if self._all is None:
            return
        rows, columns = kept
        self.keys = self.values = None  # which would keep what they are parts of
        if not rows:
            self._all = None  # before there are others in its place
            return
        grown = (_zeros(self._all[0], shape), _zeros(self._all[1], shape))
        for new, old in zip(grown, self._all, strict=True):
            new[:rows, :, :columns] = old[:rows, :, :columns]
        self._all = grown

    def release(self) -> None:
        self._all = self.keys = self.values = None

    def make(self, shape: tuple[int, int], keys: Tensor, values: Tensor) -> None:
        """Tensors for rows like these, unless there are some."""
        if self._all is None:
            self._all = (_zeros(keys[None], shape), _zeros(values[None], shape))

    def write(self, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Some of the keys and values of a row."""
        assert self._all is not None
        for tensor, new in zip(self._all, (keys, values), strict=True):
            tensor[row, :, start : start + new.shape[-2]] = new

    def move_row(self, source: int, target: int, length: int) -> None:
        for tensor in self._all or ():
            tensor[target, :, :length] = tensor[source, :, :length]

    def show(self, places: Tensor, positions: Tensor, columns: int) -> None:
        self._places, self._positions, self._columns = places, positions, columns

    def get_seq_length(self) -> int:
        """The bucket's: who counted by it would be wrong without a CUDA graph as well as with."""
        return self._columns - 1

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return self._columns, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the step's token of each row; returns all columns of the bucket."""
        assert self._all is not None
        assert self._places is not None
        keys, values = self._all
        keys[self._places, :, self._positions] = key_states[:, :, 0]
        values[self._places, :, self._positions] = value_states[:, :, 0]
        rows = len(self._places)
        # Shared by later layers in some families, which find it under these names.
        shown = keys[:rows, :, : self._columns], values[:rows, :, : self._columns]
        self.keys, self.values = shown
        return shown


def _zeros(like: Tensor, shape: tuple[int, int]) -> Tensor:
    # Zeros, for attention multiplies what is masked by 0: chance memory may hold a NaN.
    return like.new_zeros((shape[0], like.shape[1], shape[1], like.shape[-1]))
