"""The KV cache of a batch whose rows come and go between two steps.

Rows end at the same column, as in a batch with left padding: row 0 has 5 tokens, row 1 has 3.

    row 0   a b c d e ·        the column `end` is where the next step writes, for all rows;
    row 1   · · f g h ·        what lies before a row is masked

So the masks of transformers hold as they are, sliding windows too, and each row has the positions
that it has alone. A row that is finished is overwritten by the last one; a new row is written
against `end`. Tensors have room to the right and for further rows, so that a step copies nothing;
when the room is used up, what is still needed moves into new ones of twice the size.
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
        self._end = 0
        self._columns = 0
        self._rows = 0

    def prefill(self) -> Any:
        """An empty cache for new prompts. It keeps their keys outside a sliding window too."""
        return Cache(layers=[DynamicLayer() for _ in self._layers])

    @property
    def width(self) -> int:
        """Columns that the longest row takes."""
        return max(self.lengths, default=0)

    def add(self, prefilled: Any, row: int, length: int) -> None:
        """A new last row: the last `length` columns of one row of a prefilled cache."""
        self._make_room(len(self.lengths) + 1, max(length, self.width), least_end=length)
        place = len(self.lengths)
        for layer, new in zip(self._layers, prefilled.layers, strict=True):
            if new.is_initialized:  # layers that share another's keys have none of their own
                keys, values = new.keys[row, :, -length:], new.values[row, :, -length:]
                layer.write(place, self._end, keys, values)
        self.lengths.append(length)

    def remove(self, row: int) -> None:
        """Forgets a row. The last one takes its place, as the caller must note as well."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self._layers:
                layer.move_row(last, row, self._end - self.lengths[last], self._end)
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def begin_step(self) -> tuple[Tensor, Tensor]:
        """Room for one more token of each row: the attention mask with it, and its positions."""
        self._make_room(len(self.lengths), self.width, least_end=self._end)
        for layer in self._layers:
            layer.show(len(self.lengths), self._end - self.width, self._end)
        lengths = torch.tensor(self.lengths)[:, None]
        mask = (torch.arange(self.width + 1)[None] >= self.width - lengths).long()
        self._end += 1
        self.lengths = [length + 1 for length in self.lengths]
        return mask, lengths

    def _make_room(self, rows: int, width: int, least_end: int) -> None:
        """At least `rows` rows, `width` columns before the end, and one behind it."""
        if not self.lengths:
            self._end = least_end
        if rows <= self._rows and width <= self._end < self._columns:
            return
        self._rows = max(self._rows, LEAST_ROWS, 2 * rows if rows > self._rows else rows)
        self._columns = max(LEAST_COLUMNS, 2 * width)
        for layer in self._layers:
            layer.reallocate(
                (self._rows, self._columns), (len(self.lengths), self.width), self._end, width
            )
        self._end = width


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
        self._shape: tuple[int, int] = (0, 0)
        self._all: tuple[Tensor, Tensor] | None = None
        self._rows = self._start = self._end = 0

    def reallocate(
        self, shape: tuple[int, int], used: tuple[int, int], end: int, new_end: int
    ) -> None:
        """Tensors of another size; the used columns before `end` come to lie before `new_end`."""
        self._shape = shape
        if self._all is None:
            return
        rows, width = used
        grown = (_zeros(self._all[0], shape), _zeros(self._all[1], shape))
        for new, old in zip(grown, self._all, strict=True):
            new[:rows, :, new_end - width : new_end] = old[:rows, :, end - width : end]
        self._all = grown

    def write(self, row: int, end: int, keys: Tensor, values: Tensor) -> None:
        """The keys and values of one row, against column `end`."""
        length = keys.shape[-2]
        if self._all is None:
            self._all = (_zeros(keys[None], self._shape), _zeros(values[None], self._shape))
        self._all[0][row, :, end - length : end] = keys
        self._all[1][row, :, end - length : end] = values

    def move_row(self, source: int, target: int, start: int, end: int) -> None:
        for tensor in self._all or ():
            tensor[target, :, start:end] = tensor[source, :, start:end]

    def show(self, rows: int, start: int, end: int) -> None:
        """What the next step reads; it writes column `end`."""
        self._rows, self._start, self._end = rows, start, end

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
