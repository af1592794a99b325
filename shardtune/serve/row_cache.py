"""The KV cache of a batch whose rows come and go between two steps.

Rows end at the same column, as in a batch with left padding: row 0 has 5 tokens, row 1 has 3.

    row 0   a b c d e ·        the column `end` is where the next step writes, for all rows;
    row 1   · · f g h ·        what lies before a row is masked

So the masks of transformers hold as they are, sliding windows too, and each row has the positions
that it has alone. A row that is finished is overwritten by the last one; a new row is written
against `end`. Tensors have room to the right and for further rows, so that a step copies nothing;
when the room is used up, what is still needed moves into new ones of twice the size. Each layer
knows its own room and `end`: where memory runs out after some have grown, all rows are where they
were.
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

LEAST_COLUMNS = 128
LEAST_ROWS = 4


def can_batch(config: Any) -> bool:
    """Whether all that a model remembers are keys and values: no recurrent or convolution state."""
    layers = DynamicCache(config=config).layers
    return bool(layers) and all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers
    )


class RowCache:
    """Keys and values of the rows of a batch; `cache` is what the model's forward takes."""

    def __init__(self, config: Any) -> None:
        self._layers = [_Layer() for _ in DynamicCache(config=config).layers]
        self.cache = Cache(layers=self._layers)
        self.lengths: list[int] = []
        """How many tokens of each row are in the cache."""

    def prefill(self) -> Any:
        """An empty cache for new prompts. It keeps their keys outside a sliding window too."""
        return Cache(layers=[DynamicLayer() for _ in self._layers])

    @property
    def width(self) -> int:
        """Columns that the longest row takes."""
        return max(self.lengths, default=0)

    def add(self, prefilled: Any, row: int, length: int) -> None:
        """A new last row: the last `length` columns of one row of a prefilled cache."""
        place = len(self.lengths)
        self._make_room(place + 1, max(length, self.width))
        for layer, new in zip(self._layers, prefilled.layers, strict=True):
            if new.is_initialized:  # layers that share another's keys have none of their own
                layer.write(place, new.keys[row, :, -length:], new.values[row, :, -length:])
        self.lengths.append(length)

    def remove(self, row: int) -> None:
        """Forgets a row. The last one takes its place, as the caller must note as well."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self._layers:
                layer.move_row(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def begin_step(self) -> tuple[Tensor, Tensor]:
        """Room for one more token of each row: the attention mask with it, and its positions."""
        rows, width = len(self.lengths), self.width
        self._make_room(rows, width)
        for layer in self._layers:
            layer.begin_step(rows, width)
        lengths = torch.tensor(self.lengths)[:, None]
        mask = (torch.arange(width + 1)[None] >= width - lengths).long()
        self.lengths = [length + 1 for length in self.lengths]
        return mask, lengths

    def _make_room(self, rows: int, width: int) -> None:
        """At least `rows` rows, `width` columns before the end, and one behind it."""
        used = len(self.lengths), self.width
        for layer in self._layers:
            layer.make_room(rows, width, used)


class SingleRowCache:
    """The same for one row: transformers' own cache, whatever else than keys it holds."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.cache = self.prefill()
        self.lengths: list[int] = []

    def prefill(self) -> Any:
        return DynamicCache(config=self._config)

    def add(self, prefilled: Any, row: int, length: int) -> None:
        assert not self.lengths, "one row at a time"
        self.cache, self.lengths = prefilled, [length]

    def remove(self, row: int) -> None:
        self.cache, self.lengths = self.prefill(), []

    def begin_step(self) -> tuple[Tensor, Tensor]:
        (length,) = self.lengths
        self.lengths = [length + 1]
        return torch.ones(1, length + 1, dtype=torch.long), torch.tensor([[length]])


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer's part: transformers sees the rows and columns that are in use."""

    def __init__(self) -> None:
        super().__init__()
        self._all: tuple[Tensor, Tensor] | None = None
        self._shape = (0, 0)
        """Rows and columns that there is room for."""
        self._next = 0
        """The column where the next step writes, for all rows."""
        self._rows = self._start = self._end = 0  # of the step under way

    def make_room(self, rows: int, width: int, used: tuple[int, int]) -> None:
        """Tensors of another size where these are too small; the `used` rows and columns move into
        them."""
        used_rows, used_width = used
        if not used_rows:
            self._next = width
        if rows <= self._shape[0] and width <= self._next < self._shape[1]:
            return
        shape = (
            max(self._shape[0], LEAST_ROWS, 2 * rows if rows > self._shape[0] else rows),
            max(LEAST_COLUMNS, 2 * width),
        )
        if self._all is not None:
            grown = (_zeros(self._all[0], shape), _zeros(self._all[1], shape))
            for new, old in zip(grown, self._all, strict=True):
                kept = old[:used_rows, :, self._next - used_width : self._next]
                new[:used_rows, :, width - used_width : width] = kept
            self._all = grown
        self._shape, self._next = shape, width

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """The keys and values of one row, against the end."""
        start = self._next - keys.shape[-2]
        if self._all is None:
            self._all = (_zeros(keys[None], self._shape), _zeros(values[None], self._shape))
        self._all[0][row, :, start : self._next] = keys
        self._all[1][row, :, start : self._next] = values

    def move_row(self, source: int, target: int, length: int) -> None:
        start = self._next - length
        for tensor in self._all or ():
            tensor[target, :, start : self._next] = tensor[source, :, start : self._next]

    def begin_step(self, rows: int, width: int) -> None:
        """What the next step reads; it writes the column behind that."""
        self._rows, self._start, self._end = rows, self._next - width, self._next
        self._next += 1

    def get_seq_length(self) -> int:
        return self._end - self._start

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the step's token of each row; returns all keys and values that it may see."""
        assert self._all is not None
        keys, values = self._all
        now = slice(self._end, self._end + 1)
        keys[: self._rows, :, now], values[: self._rows, :, now] = key_states, value_states
        seen = slice(self._start, self._end + 1)
        # Shared by later layers in some families, which find it under these names.
        self.keys, self.values = keys[: self._rows, :, seen], values[: self._rows, :, seen]
        return self.keys, self.values


def _zeros(like: Tensor, shape: tuple[int, int]) -> Tensor:
    # Zeros, for attention multiplies what is masked by 0: chance memory may hold a NaN.
    return like.new_zeros((shape[0], like.shape[1], shape[1], like.shape[-1]))
