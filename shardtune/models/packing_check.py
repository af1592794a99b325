"""Shows that a model keeps packed documents apart, before anything is trained on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.document_boundaries import attention_inputs
from shardtune.core.setup import Precision
from shardtune.errors import ModelError, Problem
from shardtune.models.document_isolation import isolate_documents
from shardtune.models.layer_sample import layer_sample
from shardtune.models.load import COMPUTE_DTYPES

LENGTH = 12  # tokens of each of the two documents
ROUNDING = 100  # times what a document differs alone in another place of the batch
LEAK = 0.1  # in 16 bits: share of what seeing the other document would change


def require_isolating_layers(config: Any, attention: str | None) -> None:
    """Refuses a family one of whose layers lets a document see the one before it in its row.

    Looked for in fp32, where rounding can't hide it, on a small model with each kind of layer; of a
    family that can't be built small, the model itself has to tell.
    """
    other_kernels = attention is not None and ("flash" in attention or "flex" in attention)
    model = layer_sample(config, None if other_kernels else attention)
    if model is None:
        return
    isolate_documents(model)
    require_document_isolation(model, rows=2)


@torch.no_grad()
def require_document_isolation(
    model: nn.Module, *, rows: int, device: str = "cpu", precision: Precision = "fp32"
) -> None:
    """Refuses a model that lets a document see the one before it in its row.

    Most models of transformers build a mask from positions that start again; some families ignore
    them, and none says so. So we look: the second of two packed documents must come out as it does
    alone. In fp32 it may differ by 100 times as much as it does alone in another place of the
    batch. In 16 bits that says nothing: there it is compared with what a leak would change, shown
    by positions that run on. `rows` is the size of a micro-batch, because some attention kernels
    isolate only one row at a time. The model is called as training calls it, in `precision` and
    with boundaries where its attention takes them.
    """
    was_training = model.training
    model.eval()
    config: Any = model.config
    compute = COMPUTE_DTYPES[precision]
    with torch.autocast(torch.device(device).type, compute, enabled=compute != torch.float32):
        found = _Answers.of(model, rows, device)
    model.train(was_training)
    if not math.isfinite(found.leak + found.difference):
        fact = f"this model ({config.model_type}) answers with NaN or infinity in {precision}"
        fix = "set train.precision: fp32, or bf16, which has its range"
        raise ModelError(Problem("train.precision", fact, fix))
    exact = precision == "fp32" and all(p.dtype != torch.bfloat16 for p in model.parameters())
    most = ROUNDING * found.rounding if exact else LEAK * found.leak
    if not found.difference <= most:
        against = f"rounding, by {found.rounding:.2g}" if exact else f"a leak, by {found.leak:.2g}"
        fact = (
            f"this model ({config.model_type}) doesn't keep packed documents apart: a document "
            f"changes the logits of the next by {found.difference:.2g} of their size; {against}"
        )
        raise ModelError(Problem("data.packing", fact, "set data.packing: false"))


@dataclass(frozen=True)
class _Answers:
    """How far logits of a document differ from those that it has alone, as shares of their size;
    norms of all of them, as one logit may be off by rounding alone."""

    difference: float
    """Packed behind another document."""
    rounding: float
    """Alone, in other rows of the batch and with padding behind; what fp32 rounds at least."""
    leak: float
    """Behind another document, with positions that run on."""

    @classmethod
    def of(cls, model: nn.Module, rows: int, device: str) -> _Answers:
        config: Any = model.config
        draw = torch.Generator().manual_seed(0)
        most = min(1000, config.get_text_config().vocab_size)
        ids = torch.randint(0, most, (rows, 2 * LENGTH), generator=draw)
        first, second = ids[:, :LENGTH], ids[:, LENGTH:]
        once, on = torch.arange(LENGTH), torch.arange(2 * LENGTH)

        def ask(tokens: Tensor, positions: Tensor) -> Tensor:
            return _logits(model, tokens, positions.expand(len(tokens), -1), device)

        alone = ask(second, once)
        elsewhere = ask(second.flip(0), once).flip(0)
        padded = ask(torch.cat([second, first], dim=1), on)[:, :LENGTH]
        packed = ask(ids, torch.cat([once, once]))[:, LENGTH:]
        leaking = ask(ids, on)[:, LENGTH:]
        size = alone.norm()
        difference, place, padding, leak = (
            ((each - alone).norm() / size).item() for each in (packed, elsewhere, padded, leaking)
        )
        return cls(difference, max(place, padding, torch.finfo(torch.float32).eps), leak)


def _logits(model: nn.Module, ids: Tensor, positions: Tensor, device: str) -> Tensor:
    logits: Tensor = model(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        use_cache=False,
        **attention_inputs(model, positions, device),
    ).logits
    return logits.float()
