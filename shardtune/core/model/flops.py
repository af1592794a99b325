"""FLOPs: floating-point operations of a forward pass, counted from a model's shape."""

from __future__ import annotations

from shardtune.core.model.shape import MATMUL_KINDS, ModelShape
from shardtune.core.model.weight import Weight


def multiplied_parameters(shape: ModelShape) -> int:
    """Weights that one token is multiplied with: the output head counts even where it is the
    embedding, looking up doesn't."""
    inside = sum(shape.active(w) for w in shape.weights if w.kind in MATMUL_KINDS)
    return inside + (shape.token_table.size if shape.tied else 0)


def matmul_flops_per_token(shape: ModelShape) -> int:
    """Of a forward pass, attention's own products not counted.

    In a model with an encoder a token goes through both halves: one read for each written.
    """
    return 2 * multiplied_parameters(shape)


def matmul_flops(shape: ModelShape, seq: int, target: int | None = None) -> int:
    """Of a forward pass over one row of `seq` tokens, attention's own products not counted. A model
    with an encoder reads `seq` tokens and writes `target`."""
    if target is None:
        return seq * matmul_flops_per_token(shape)
    inside = sum(
        shape.active(weight) * (seq if reads_source(weight) else target)
        for weight in shape.weights
        if weight.kind in MATMUL_KINDS
    )
    return 2 * (inside + (target * shape.token_table.size if shape.tied else 0))


def reads_source(weight: Weight) -> bool:
    """Whether a weight of a model with an encoder is multiplied with the tokens of the source: the
    encoder's, and keys and values of the decoder's cross-attention."""
    if weight.part == "encoder_layer":
        return True
    *_, attention, matrix = ("", *weight.module.split("."))
    return attention in _CROSS_ATTENTION and matrix in _KEYS_AND_VALUES


_CROSS_ATTENTION = frozenset({"EncDecAttention", "encoder_attn"})
_KEYS_AND_VALUES = frozenset({"k", "v", "k_proj", "v_proj"})


def attention_flops(
    shape: ModelShape, seq: int, target: int | None = None, *, causal: bool = True
) -> int:
    """Of the scores and the weighted sums in a forward pass over one row of `seq` tokens; a model
    with an encoder reads those, and writes `target` (as many, if it isn't said).

    `causal` counts only the pairs that a token may see; without it every pair counts, as
    kernels without that knowledge compute them and some reports count them.
    """
    pair = 2 * shape.heads * (shape.head_dim + shape.value_dim)
    written = seq if target is None else target
    across = shape.layers * seq * written if shape.encoder_layers else 0
    read = shape.encoder_layers * seq * seq
    if not causal:
        return pair * (read + across + shape.layers * written * written)
    half = written * (written + 1) // 2
    windowed = shape.windowed_layers if shape.window is not None and shape.window < written else 0
    seen = (shape.layers - windowed) * half
    if windowed:
        assert shape.window is not None
        outside = written - shape.window
        seen += windowed * (half - outside * (outside + 1) // 2)
    return pair * (seen + read + across)
