"""What layers and loss save and hold at a time: what planner and model have to agree on."""

from __future__ import annotations

WIDE_MATMUL = 2
"""Selective activation checkpointing at level `mlp` recomputes a matmul whose output is this many
times wider than its input: in a decoder that is what comes before an MLP's activation. In an 8 B
Llama it is 61 % of all that is saved, for half of a forward pass."""
CHUNK_LOGITS = 1 << 28
"""Logits of one chunk of the loss: large enough for tensor cores, half a GiB in 16 bits."""
_ROW_MULTIPLE = 256
"""Of a chunk's rows: a GEMM is slower with others."""


def loss_chunk_rows(vocab: int, logits: int = CHUNK_LOGITS) -> int:
    """Tokens whose logits our loss has at a time."""
    return max(_ROW_MULTIPLE, logits // vocab // _ROW_MULTIPLE * _ROW_MULTIPLE)
