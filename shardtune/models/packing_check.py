"""Shows that a model keeps packed documents apart, before anything is trained on them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.document_boundaries import attention_inputs
from shardtune.core.setup import Precision
from shardtune.errors import ModelError, Problem
from shardtune.models.load import COMPUTE_DTYPES

LENGTH = 12  # tokens of each of the two documents
LEAK = 0.1  # share of what seeing the other document would change


@torch.no_grad()
def require_document_isolation(
    model: nn.Module, *, rows: int, device: str = "cpu", precision: Precision = "fp32"
) -> None:
    """Refuses a model that lets a document see the one before it in its row.

    Most models of transformers build a mask from positions that start again; some families ignore
    them, and none says so. So we look: the second of two packed documents must come out as it does
    alone. What a leak would change is measured too, by positions that run on. `rows` is the size
    of a micro-batch, because some attention kernels isolate only one row at a time. The model is
    called as training calls it, in `precision` and with boundaries where its attention takes them.
    """
    was_training = model.training
    model.eval()
    config: Any = model.config
    draw = torch.Generator().manual_seed(0)
    most = min(1000, config.get_text_config().vocab_size)
    ids = torch.randint(0, most, (rows, 2 * LENGTH), generator=draw)
    once = torch.arange(LENGTH)
    restarting = torch.cat([once, once]).expand(rows, -1)
    running_on = torch.arange(2 * LENGTH).expand(rows, -1)
    compute = COMPUTE_DTYPES[precision]
    with torch.autocast(torch.device(device).type, compute, enabled=compute != torch.float32):
        alone = _logits(model, ids[:, LENGTH:], once.expand(rows, -1), device)
        packed = _logits(model, ids, restarting, device)[:, LENGTH:]
        leaking = _logits(model, ids, running_on, device)[:, LENGTH:]
    model.train(was_training)
    difference = (packed - alone).norm().item()  # of all: one logit may be off by rounding alone
    leak = (leaking - alone).norm().item()
    if not math.isfinite(difference + leak):
        fact = f"this model ({config.model_type}) answers with NaN or infinity in {precision}"
        fix = "set train.precision: fp32, or bf16, which has its range"
        raise ModelError(Problem("train.precision", fact, fix))
    if not difference <= LEAK * leak:  # what isn't a number shows nothing
        fact = (
            f"this model ({config.model_type}) doesn't keep packed documents apart: a document "
            f"changes the logits of the next by {difference:.2g}; seeing it would, by {leak:.2g}"
        )
        raise ModelError(Problem("data.packing", fact, "set data.packing: false"))


def _logits(model: nn.Module, ids: Tensor, positions: Tensor, device: str) -> Tensor:
    logits: Tensor = model(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        use_cache=False,
        **attention_inputs(model, positions, device),
    ).logits
    return logits.float()
