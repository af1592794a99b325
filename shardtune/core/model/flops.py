"""FLOPs: floating-point operations of a forward pass, counted from a model's shape."""

from __future__ import annotations

from shardtune.core.model.shape import MATMUL_KINDS, ModelShape


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


def attention_flops(shape: ModelShape, seq: int, *, causal: bool = True) -> int:
    """Of the scores and the weighted sums in a forward pass over one sequence of `seq` tokens.

    `causal` counts only the pairs that a token may see; without it every pair counts, as
    kernels without that knowledge compute them and some reports count them.
    """
    pair = 2 * shape.heads * (shape.head_dim + shape.value_dim)
    whole, half = seq * seq, seq * (seq + 1) // 2
    if not causal:
        return pair * whole * (shape.layers + shape.encoder_layers + _cross_layers(shape))
    windowed = shape.windowed_layers if shape.window is not None and shape.window < seq else 0
    seen = (shape.layers - windowed) * half
    if windowed:
        assert shape.window is not None
        outside = seq - shape.window
        seen += windowed * (half - outside * (outside + 1) // 2)
    return pair * (seen + (shape.encoder_layers + _cross_layers(shape)) * whole)


def _cross_layers(shape: ModelShape) -> int:
    return shape.layers if shape.encoder_layers else 0
