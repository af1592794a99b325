"""The loss of a language model, as a sum over label tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.model.peft_wrapper import unwrap_model
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


def model_inputs(model: nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """What `model` is called with to answer a micro-batch.

    A decoder alone gets no attention mask: padding stands behind the tokens that count, and
    restarting positions, or boundaries in `batch.attention`, keep documents apart. A mask of ones
    would switch that separation off. An encoder looks ahead, so it has to be told of padding.
    Behind it the decoder is given the targets themselves, shifted by one as its family does it
    (teacher forcing).
    """
    if batch.source_mask is None:
        positions = {"position_ids": batch.position_ids}
        return {"input_ids": batch.input_ids, **positions, **batch.attention}
    shift = unwrap_model(model).prepare_decoder_input_ids_from_labels
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.source_mask,
        "decoder_input_ids": shift(batch.targets),
    }


def forward(model: nn.Module, inputs: Mapping[str, Any], kept: Tensor | None) -> Tensor:
    """The model's answer at the positions in `kept`, at all of them if it is None.

    Logits as `[n, vocabulary]`, unless the output head has been asked for something else.
    """
    where = {} if kept is None else {"logits_to_keep": kept}
    answer: Tensor = model(use_cache=False, **inputs, **where).logits
    return answer.flatten(0, 1) if answer.ndim == 3 else answer


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over label tokens, in fp32 whatever the logits are in."""
    return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
