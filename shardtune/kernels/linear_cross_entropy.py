"""Output head and cross-entropy in one, in pieces: the logits of a micro-batch never exist at once.

With a vocabulary of 128 k and 16 k tokens the logits and what the loss makes of them take 20 GiB
and more, for a moment that decides whether a job fits. Here a few hundred rows at a time become
logits, loss and gradient, and are gone before the next ones come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.step import IGNORED
from shardtune.kernels.cross_entropy import available, cross_entropy_in_place

PIECE = 1 << 28  # logits of one piece: large enough for a matrix unit, half a GiB in 16 bits


class FusedLoss:
    """Lets a model's output head answer with the loss where it is given targets.

    The model itself runs as ever, from its own forward, so that whatever is wrapped around it (DDP,
    FSDP2, checkpointing) stays in place; only its last layer answers otherwise.
    """

    def __init__(self, head: nn.Linear) -> None:
        self._head = head
        self._logits: Callable[[Tensor], Tensor] = head.forward
        self._answer: Callable[[Tensor], Tensor] = self._logits
        setattr(head, "forward", lambda hidden: self._answer(hidden))  # noqa: B010  (mypy)

    @contextmanager
    def summing(self, targets: Tensor) -> Iterator[None]:
        """Inside, the head gives the summed loss of `targets` in place of logits."""
        with self._answering(lambda hidden: self._loss(hidden, targets)):
            yield

    @contextmanager
    def judging(self, targets: Tensor) -> Iterator[None]:
        """Inside, the head gives the summed loss and how many targets it would have chosen."""
        with self._answering(lambda hidden: self._judgement(hidden, targets)):
            yield

    @contextmanager
    def _answering(self, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
        self._answer = answer
        try:
            yield
        finally:
            self._answer = self._logits

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        head = self._head
        loss: Tensor = _LinearLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), head.weight, head.bias, targets.flatten()
        )
        return loss

    def _judgement(self, hidden: Tensor, targets: Tensor) -> Tensor:
        head, total = self._head, torch.zeros(2, device=hidden.device, dtype=torch.float64)
        rows, aims = hidden.flatten(0, -2), targets.flatten()
        for piece in _pieces(len(rows), head.out_features):
            logits = functional.linear(rows[piece], head.weight, head.bias)
            kept = aims[piece]
            total[0] += functional.cross_entropy(
                logits.float(), kept, ignore_index=IGNORED, reduction="sum"
            )
            total[1] += ((logits.argmax(-1) == kept) & (kept != IGNORED)).sum()
        return total


def fused_loss(model: nn.Module) -> FusedLoss | None:
    """Ready for `model`; None where its head is not a plain linear layer that ends the model."""
    unwrap = getattr(model, "get_base_model", None)  # peft's wrapper
    causal: Any = unwrap() if unwrap else model
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear or not _ends_with(causal, head):
        return None
    return FusedLoss(head)


def _ends_with(causal: Any, head: nn.Linear) -> bool:
    """Whether the head's outputs are the logits: some families scale or bend them afterwards."""
    config = causal.config.get_text_config()
    after = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
    return not any(getattr(config, name, None) not in (None, 1, 1.0) for name in after)


class _LinearLoss(torch.autograd.Function):
    """The gradient is computed with the loss: by the time of the backward pass logits are gone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> Tensor:
        device = hidden.device.type
        compute = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        )
        with torch.autocast(device, enabled=False):
            matrix = weight.to(compute)
            offset = None if bias is None else bias.to(compute)
            total = torch.zeros((), device=hidden.device)
            to_hidden = torch.empty_like(hidden)
            _, for_weight, for_bias, _ = ctx.needs_input_grad
            to_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
            to_bias = None
            if bias is not None and for_bias:
                to_bias = torch.zeros_like(bias, dtype=torch.float32)
            score = _score_on(device)
            for piece in _pieces(len(hidden), weight.shape[0]):
                rows = hidden[piece].to(compute)
                logits = functional.linear(rows, matrix, offset)
                loss, gradient = score(logits, targets[piece])
                total += loss
                to_hidden[piece] = gradient @ matrix
                if to_weight is not None:
                    _add_product(to_weight, gradient.T, rows)
                if to_bias is not None:
                    to_bias += gradient.sum(0)
        ctx.save_for_backward(to_hidden, to_weight, to_bias)
        ctx.kinds = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if kept is None else _times(kept, outer, kind)
            for kept, kind in zip(ctx.saved_tensors, ctx.kinds, strict=True)
        ]
        return *scaled, None


def _times(kept: Tensor, outer: Tensor, kind: torch.dtype) -> Tensor:
    """In place if it can be: the tensor is ours alone, and may be as large as the head."""
    place = kept if kept.dtype == kind else torch.empty_like(kept, dtype=kind)
    return torch.mul(kept, outer, out=place)


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of some rows, and its gradient in the logits' own precision."""
    wide = logits.float()
    counted = targets != IGNORED
    aims = torch.where(counted, targets, 0)[:, None]
    norms = wide.logsumexp(-1, keepdim=True)
    loss = torch.where(counted[:, None], norms - wide.gather(1, aims), 0.0).sum()
    column = torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.exp(wide - norms) - (column == aims).float()
    return loss, (gradient * counted[:, None]).to(logits.dtype)


@torch.library.custom_op("shardtune::score", mutates_args=())
def _in_one(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same as one operation, which is what a compiler makes of it on a GPU: so a dry run
    without one counts what a GPU would hold, and not what lies between."""
    return _score(logits, targets)


@_in_one.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=torch.float32), torch.empty_like(logits)


@cache
def _score_on(device: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    if device == "cuda":
        return cross_entropy_in_place if available() else torch.compile(_score, dynamic=True)
    return _in_one


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds in fp32 what is multiplied in 16 bits; on a GPU inside the matrix unit."""
    if total.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _pieces(rows: int, vocabulary: int) -> Iterator[slice]:
    """A multiple of 256 rows at a time: a matrix unit is slower with others."""
    size = max(256, PIECE // vocabulary // 256 * 256)
    for begin in range(0, rows, size):
        yield slice(begin, begin + size)
