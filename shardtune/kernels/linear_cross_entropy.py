"""Fused linear cross-entropy: output head and loss in chunks, so that the logits never exist at
once.

With a vocabulary of 128 k and 16 k tokens the logits and their gradient take 20 GiB and more, for a
moment that decides whether a job fits. Here a few hundred rows at a time become logits, loss and
gradient (`dz = softmax(z) - onehot`, `dx = dz W`, `dW += dz^T x`), and are gone before the next
ones come: the gradient is computed in the forward pass and scaled in the backward pass. What a
family does with its logits before the loss (soft-capping, a factor) is done on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.model.activation_memory import loss_chunk_rows
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.core.step import IGNORED
from shardtune.kernels.cross_entropy import available, cross_entropy_in_place
from shardtune.kernels.logit_transform import LogitTransform, logit_transform_of

AS_THEY_ARE = LogitTransform()


class FusedLoss:
    """Lets a model's output head return the loss where it is given targets.

    The model itself runs as ever, from its own forward, so that whatever is wrapped around it (DDP,
    FSDP2, checkpointing) stays in place; only its last layer returns something else.
    """

    def __init__(self, head: nn.Linear, transform: LogitTransform = AS_THEY_ARE) -> None:
        """`transform`: what the model does with its logits."""
        self._head = head
        self._transform = transform
        self._logits: Callable[[Tensor], Tensor] = head.forward
        self._answer: Callable[[Tensor], Tensor] = self._logits
        setattr(head, "forward", lambda hidden: self._answer(hidden))  # noqa: B010  (mypy)

    @contextmanager
    def returning_loss(self, targets: Tensor) -> Iterator[None]:
        """Inside, the head gives the summed loss of `targets` in place of logits."""
        with self._answering(lambda hidden: self._loss(hidden, targets)):
            yield

    @contextmanager
    def evaluating(self, targets: Tensor) -> Iterator[None]:
        """Inside, the head gives the summed loss and how many targets it would have chosen."""
        with self._answering(lambda hidden: self._evaluation(hidden, targets)):
            yield

    @contextmanager
    def _answering(self, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
        self._answer = answer
        try:
            with self._transform.left_out():
                yield
        finally:
            self._answer = self._logits

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        head = self._head
        loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), head.weight, head.bias, targets.flatten(), self._transform
        )
        return loss

    def _evaluation(self, hidden: Tensor, targets: Tensor) -> Tensor:
        head, total = self._head, torch.zeros(2, device=hidden.device, dtype=torch.float64)
        rows, labels = hidden.flatten(0, -2), targets.flatten()
        for chunk in _chunks(len(rows), head.out_features):
            logits = self._transform(functional.linear(rows[chunk], head.weight, head.bias))
            kept = labels[chunk]
            total[0] += functional.cross_entropy(
                logits, kept, ignore_index=IGNORED, reduction="sum"
            )
            total[1] += ((logits.argmax(-1) == kept) & (kept != IGNORED)).sum()
        return total


def fused_loss(model: nn.Module) -> FusedLoss | None:
    """Ready for `model`; None where its head is not a plain linear layer that ends the model, but
    for a factor and soft-capping."""
    causal: Any = unwrap_model(model)
    head = causal.get_output_embeddings()
    transform = logit_transform_of(causal)
    if type(head) is not nn.Linear or transform is None:
        return None
    return FusedLoss(head, transform)


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient is computed with the loss: by the time of the backward pass logits are gone."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
    ) -> Tensor:
        device = hidden.device.type
        compute = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        )
        with torch.autocast(device, enabled=False):
            matrix = weight.to(compute)
            offset = None if bias is None else bias.to(compute)
            total = torch.zeros((), device=hidden.device)
            grad_hidden = torch.empty_like(hidden)
            _, for_weight, for_bias, *_ = ctx.needs_input_grad
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
            grad_bias = None
            if bias is not None and for_bias:
                grad_bias = torch.zeros_like(bias, dtype=torch.float32)
            cross_entropy = _cross_entropy_for(device)
            for chunk in _chunks(len(hidden), weight.shape[0]):
                rows = hidden[chunk].to(compute)
                logits = functional.linear(rows, matrix, offset)
                loss, gradient = cross_entropy(
                    logits, targets[chunk], transform.factor, transform.cap
                )
                total += loss
                grad_hidden[chunk] = gradient @ matrix
                if grad_weight is not None:
                    _accumulate_matmul(grad_weight, gradient.T, rows)
                if grad_bias is not None:
                    grad_bias += gradient.sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.kinds = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if kept is None else _scaled_gradient(kept, grad_loss, kind)
            for kept, kind in zip(ctx.saved_tensors, ctx.kinds, strict=True)
        ]
        return *scaled, None, None


def _scaled_gradient(kept: Tensor, grad_loss: Tensor, kind: torch.dtype) -> Tensor:
    """In place if it can be: the tensor is ours alone, and may be as large as the head."""
    place = kept if kept.dtype == kind else torch.empty_like(kept, dtype=kind)
    return torch.mul(kept, grad_loss, out=place)


def _cross_entropy_with_gradient(
    logits: Tensor, targets: Tensor, factor: float = 1.0, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The summed loss of some rows, and its gradient in the logits' own precision."""
    transform = LogitTransform(factor, cap)
    wide = transform(logits)
    counted = targets != IGNORED
    labels = torch.where(counted, targets, 0)[:, None]
    log_sum_exp = wide.logsumexp(-1, keepdim=True)
    loss = torch.where(counted[:, None], log_sum_exp - wide.gather(1, labels), 0.0).sum()
    column = torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.exp(wide - log_sum_exp) - (column == labels).float()
    gradient = gradient * transform.slope(wide)
    return loss, (gradient * counted[:, None]).to(logits.dtype)


@torch.library.custom_op("shardtune::cross_entropy", mutates_args=("logits",))
def _cross_entropy_op(
    logits: Tensor, targets: Tensor, factor: float = 1.0, cap: float = 0.0
) -> Tensor:
    """The summed loss; the gradient is written over the logits. One operation, as a GPU's kernel
    is: so a dry run without one counts what a GPU would hold, and not what lies between."""
    loss, gradient = _cross_entropy_with_gradient(logits, targets, factor, cap)
    logits.copy_(gradient)
    return loss


@_cross_entropy_op.register_fake
def _(logits: Tensor, targets: Tensor, factor: float = 1.0, cap: float = 0.0) -> Tensor:
    return logits.new_empty((), dtype=torch.float32)


def _cross_entropy_over_logits(
    logits: Tensor, targets: Tensor, factor: float = 1.0, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _cross_entropy_op(logits, targets, factor, cap), logits


@cache
def _cross_entropy_for(device: str) -> Callable[..., tuple[Tensor, Tensor]]:
    if device == "cuda":
        return (
            cross_entropy_in_place
            if available()
            else torch.compile(_cross_entropy_with_gradient, dynamic=True)
        )
    return _cross_entropy_over_logits


def _accumulate_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right` in fp32, of 16-bit operands; on a GPU inside the GEMM."""
    if total.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _chunks(rows: int, vocabulary: int) -> Iterator[slice]:
    size = loss_chunk_rows(vocabulary)
    for begin in range(0, rows, size):
        yield slice(begin, begin + size)
