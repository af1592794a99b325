"""Causal attention with sinks as a custom op: each head has a logit more, which takes its share of
the softmax and gives nothing (gpt-oss).

With `lse` the log-sum-exp of a row's scores and s the sink, all of it is in one number:

    lse' = log(exp(lse) + exp(s))       probabilities: exp(score - lse')
                                        output: exp(lse - lse') times that without a sink

FlashAttention's backward pass makes probabilities from scores and a log-sum-exp, and needs the
output only for the sum of `dO * O` in each row. So it is right for sinks as it is, once it is given
the output with sinks and lse'. The sinks' own gradient is

    ds = - sum over the rows of exp(s - lse') * sum(dO * O)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("shardtune::sink_attention", mutates_args=())
def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    ends: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """The tokens of all documents one after the other, `[tokens, heads, dim]` in and out, and the
    log-sum-exp with the sinks, `[heads, tokens]`. `ends` are the documents' boundaries
    (`cu_seqlens`). With a `window` a token sees the last so many, itself among them."""
    if query.is_cuda:
        plain, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, ends, ends, longest, longest, 0.0, True, False,
            scale=scale, **_window(window),
        )  # fmt: skip
    else:
        scores = _scores(query, key, ends, scale, window)
        lse = scores.logsumexp(-1)
        plain = _weighted((scores - lse[..., None]).exp(), value, query)
    whole = torch.logaddexp(lse, sinks.float()[:, None])
    share = (lse - whole).exp().t()[..., None]
    return (plain * share).to(query.dtype), whole


@sink_attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _dim = query.shape
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("shardtune::sink_attention_backward", mutates_args=())
def sink_attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    ends: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    if query.is_cuda:
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # dropout's
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad_output.contiguous(), query, key, value, output, lse, ends, ends, longest, longest,
            0.0, True, unused, unused, scale=scale, **_window(window),
        )  # fmt: skip
        return found
    groups = query.shape[1] // key.shape[1]
    shares = (_scores(query, key, ends, scale, window) - lse[..., None]).exp()
    given, gradient = output.float().transpose(0, 1), grad_output.float().transpose(0, 1)
    wide_key, wide_value = (_by_head(each, groups) for each in (key, value))
    inside = gradient @ wide_value.transpose(1, 2) - (gradient * given).sum(-1, keepdim=True)
    grad_scores = shares * inside * scale
    grad_key, grad_value = (
        (weights.transpose(1, 2) @ other).view(-1, groups, *other.shape[1:]).sum(1).transpose(0, 1)
        for weights, other in (
            (grad_scores, query.float().transpose(0, 1)),
            (shares, gradient),
        )
    )
    grad_query = (grad_scores @ wide_key).transpose(0, 1)
    return (
        grad_query.to(query.dtype).contiguous(),
        grad_key.to(key.dtype).contiguous(),
        grad_value.to(value.dtype).contiguous(),
    )


@sink_attention_backward.register_fake
def _(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [each.new_empty(each.shape) for each in (query, key, value)]
    return grads[0], grads[1], grads[2]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, ends, ctx.longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, sinks, ends, *output)


def _backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, sinks, ends, output, lse = ctx.saved_tensors
    gradients = sink_attention_backward(
        grad_output, query, key, value, output, lse, ends, ctx.longest, ctx.scale, ctx.window
    )
    grad_sinks = None
    if ctx.needs_input_grad[3]:
        shares = (sinks.float()[:, None] - lse).exp()
        products = (grad_output.float() * output.float()).sum(-1).t()
        grad_sinks = -(shares * products).sum(1).to(sinks.dtype)
    return (*gradients, grad_sinks, None, None, None, None)


sink_attention.register_autograd(_backward, setup_context=_setup_context)


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


# Where there is no kernel: what tests can see on a CPU --------------------------------------------


def _scores(query: Tensor, key: Tensor, ends: Tensor, scale: float, window: int | None) -> Tensor:
    """`[heads, tokens, tokens]` in fp32, minus infinity where a token isn't seen."""
    place = torch.arange(len(query), device=query.device)
    document = torch.searchsorted(ends, place.to(ends.dtype), right=True)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    if window is not None:
        seen = seen & (place[:, None] - place < window)
    wide = _by_head(key, query.shape[1] // key.shape[1])
    scores = query.float().transpose(0, 1) @ wide.transpose(1, 2) * scale
    return scores.masked_fill(~seen, float("-inf"))


def _weighted(shares: Tensor, value: Tensor, query: Tensor) -> Tensor:
    return (shares @ _by_head(value, query.shape[1] // value.shape[1])).transpose(0, 1)


def _by_head(given: Tensor, groups: int) -> Tensor:
    """Keys or values for each head of the queries, in fp32."""
    return given.float().transpose(0, 1).repeat_interleave(groups, 0)
