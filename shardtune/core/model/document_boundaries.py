"""Where packed documents begin and end, told to attention that keeps them apart without a mask.

A dense mask takes memory by the square of a row's length, and on a GPU it takes the fast kernels
away. A list of boundaries is all that a kernel for documents of different lengths has to know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VARLEN, VARLEN_DETERMINISTIC = "shardtune", "shardtune-ordered"
VARLEN_SINKS = "shardtune-sinks"
"""The names by which transformers finds our attention functions: with torch's kernels, with one
that adds up in the same order each time, and with torch's beside sinks."""
FEWEST = 64  # documents that room is made for: lists of few sizes let few graphs be compiled


def attention_inputs(model: Any, positions: Tensor, device: Any) -> dict[str, Any]:
    """What `model` has to be given beside tokens and positions; nothing where its attention isn't
    ours."""
    return (
        varlen_inputs(positions, lambda tensor: tensor.to(device))
        if takes_boundaries(model)
        else {}
    )


def varlen_inputs(positions: Tensor, send: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The documents of a micro-batch, as our attention wants to be told of them.

    `positions` must lie in CPU memory: a GPU that is asked for boundaries is a GPU waited for.
    transformers would ask it too, to choose a mask. It hands one of four dimensions on as it is, so
    a single number stands in for the mask, which our function never looks at. `send` brings a
    tensor to where the model is.
    """
    ends = document_ends(positions)
    there = None if ends is None else send(ends)
    longest = _power_of_two(positions.shape[1])
    return {
        "attention_mask": send(positions.new_ones((1, 1, 1, 1)).bool()),
        "cu_seq_lens_q": there,
        "cu_seq_lens_k": there,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def takes_boundaries(model: Any) -> bool:
    """Whether the model's attention takes boundaries in place of a mask."""
    config = getattr(model, "config", None)
    known = (VARLEN, VARLEN_DETERMINISTIC, VARLEN_SINKS)
    return getattr(config, "_attn_implementation", None) in known


def document_ends(positions: Tensor) -> Tensor | None:
    """Where documents begin, counted over the tokens of all rows, and where the last one ends.

    A document begins with each row, and wherever positions don't go on. Behind the end it is said
    again and again: documents without tokens fill the list up. None where every row is one
    document, so that plain causal attention will do, which is faster.
    """
    rows, length = positions.shape
    restarts = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(restarts.any()):
        return None
    begins = positions.new_ones((rows, length)).bool()
    begins[:, 1:] = restarts
    found = begins.flatten().nonzero().squeeze(1)
    size = max(FEWEST, _power_of_two(len(found)))
    ends = found.new_full((size + 1,), rows * length)
    ends[: len(found)] = found
    return ends.int()


def _power_of_two(number: int) -> int:
    """The smallest that is not below."""
    return 1 << (number - 1).bit_length()
