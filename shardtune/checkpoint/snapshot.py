"""A copy of a rank's pieces in main memory, so that training can go on while they are written.

The memory is kept for the next copy: getting new memory from the system costs more than copying,
and there is never more than one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardtune.core.pieces import Piece


class Snapshot:
    """Memory for one copy of the pieces."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces, copied; from a GPU the copy may still be under way: see `settle`."""
        buffers = {_key(piece): self._buffer(piece) for piece in pieces}
        self._kept = buffers
        copies = [replace(piece, tensor=buffers[_key(piece)]) for piece in pieces]
        if any(piece.tensor.is_cuda for piece in pieces):
            self._copy_beside(pieces, copies)
        else:
            for piece, copy in zip(pieces, copies, strict=True):
                copy.tensor.copy_(piece.tensor)
        return copies

    def settle(self) -> None:
        """Returns when the copy is complete. The thread that writes waits here."""
        if self._copied is not None:
            self._copied.synchronize()

    def _buffer(self, piece: Piece) -> Tensor:
        kept = self._kept.get(_key(piece))
        if kept is not None:
            return kept
        pinned = piece.tensor.is_cuda  # a copy to other memory would make the GPU wait
        return torch.empty(tuple(piece.tensor.shape), dtype=piece.tensor.dtype, pin_memory=pinned)

    def _copy_beside(self, pieces: Sequence[Piece], copies: Sequence[Piece]) -> None:
        """Copies on a stream of its own. The next update waits for it on the GPU; the forward and
        backward passes before it don't change what is copied, and run meanwhile."""
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for piece, copy in zip(pieces, copies, strict=True):
                copy.tensor.copy_(piece.tensor, non_blocking=True)
                if piece.tensor.is_cuda:
                    piece.tensor.record_stream(self._stream)
            copied = self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)

        def wait(*_: object) -> None:
            torch.cuda.current_stream().wait_event(copied)
            handle.remove()

        handle = register_optimizer_step_pre_hook(wait)


def _key(piece: Piece) -> tuple[object, ...]:
    return piece.key, piece.cut, piece.tensor.dtype, tuple(piece.tensor.shape)
