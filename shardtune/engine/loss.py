"""The loss of a causal language model, as a sum over label tokens."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.peft_wrapper import unwrap_model
from shardtune.core.step import IGNORED, MicroBatch


def selects_logits(model: nn.Module) -> bool:
    """Whether the model can be told at which positions to compute its logits."""
    inner: nn.Module = unwrap_model(model)  # peft's wrapper hides the signature
    return "logits_to_keep" in inspect.signature(inner.forward).parameters


def kept_positions(batch: MicroBatch) -> Tensor:
    """The positions at which some row has a label.

    The output head runs only there. On data with long prompts that saves most of its work, and the
    memory of its logits. They are found in CPU memory, where the batch lies: asking a GPU would
    mean to wait for it.
    """
    kept = (batch.targets != IGNORED).any(dim=0).nonzero().squeeze(1)
    if len(kept) == 0:  # every rank must still run its backward pass: keep one untrained position
        kept = torch.zeros(1, dtype=torch.long, device=kept.device)
    return kept


def forward(model: nn.Module, batch: MicroBatch, kept: Tensor | None) -> Tensor:
    """The model's answer at the positions in `kept`, at all of them if it is None.

    Logits as `[n, vocabulary]`, unless the output head has been asked for something else.

    No attention mask is made: padding stands behind the tokens that count, and restarting
    positions, or boundaries in `batch.attention`, keep documents apart. A mask of ones would switch
    that separation off.
    """
    where = {} if kept is None else {"logits_to_keep": kept}
    answer: Tensor = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        **batch.attention,
        **where,
    ).logits
    return answer.flatten(0, 1) if answer.ndim == 3 else answer


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over label tokens, in fp32 whatever the logits are in."""
    return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
