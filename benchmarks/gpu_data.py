"""Weights and batches of `benchmarks.gpu`: the same numbers for every method of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu_cases import ATTENTION, MLP, TINY_BATCH, TINY_EXPERTS, TINY_SIZES, Case
from shardtune.config.job import LoRA
from shardtune.core.model.active_experts import active_experts
from shardtune.core.model.known_models import find_model
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.data.packing import pack

BATCHES = 4  # a run goes round them
SHORTEST, LONGEST = 50, 2000  # tokens of a document
DOCUMENTS = 1000  # of the set that is packed
PADDED_ROWS = 8  # documents of a micro-batch where each has a row of its own
BASE = torch.bfloat16
UNGATED = frozenset({"falcon", "gpt_neox", "starcoder2"})
"""Families whose MLP has two products."""


def config_of(case: Case, *, tiny: bool) -> Any:
    """The configuration as transformers has it; a tiny one keeps all but the sizes."""
    from transformers import AutoConfig

    known = dict(find_model(case.model).config)
    if tiny:
        known |= TINY_SIZES | {"num_kv_heads": 2, "pad_token_id": 0}
        known |= {name: size for name, size in TINY_EXPERTS.items() if name in known}
        known.pop("layer_types", None)
        if known["model_type"] == "falcon":
            del known["head_dim"]  # it has a property of that name
    if case.layers is not None:
        known["num_hidden_layers"] = case.layers
    return AutoConfig.for_model(**known)


def draw(name: str, shape: tuple[int, ...], device: str) -> Tensor:
    """A weight of the model by its name in transformers: whoever asks gets the same numbers."""
    if len(shape) == 1 and name.endswith("bias"):
        return torch.zeros(shape, dtype=BASE, device=device)
    if len(shape) == 1:
        return torch.ones(shape, dtype=BASE, device=device)
    seed = int.from_bytes(sha256(name.encode()).digest()[:7], "big")
    source = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, dtype=BASE, device=device, generator=source).mul_(0.02)


@dataclass(frozen=True)
class Batch:
    """What one step trains on, in the two forms that trainers take."""

    ours: MicroBatch
    documents: tuple[Tensor, ...]
    """Each document's tokens where the rows are packed."""

    @property
    def labels(self) -> Tensor:
        """The targets where transformers wants them: at the token itself, not before it."""
        labels = self.ours.targets.roll(1, dims=1)
        labels[:, 0] = IGNORED
        return labels

    def padded(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Tokens, attention mask and labels of micro-batches with a document in each row."""
        found = []
        for start in range(0, len(self.documents), PADDED_ROWS):
            some = list(self.documents[start : start + PADDED_ROWS])
            pad = nn.utils.rnn.pad_sequence
            tokens = pad(some, batch_first=True)
            mask = pad([torch.ones_like(each) for each in some], batch_first=True)
            labels = tokens.masked_fill(mask == 0, IGNORED)
            labels[:, 0] = IGNORED
            found.append((tokens, mask, labels))
        return found


def batches(case: Case, vocabulary: int, *, tiny: bool) -> list[Batch]:
    rows, length = TINY_BATCH if tiny else (case.rows, case.length)
    if case.packed:
        return _packed(rows, length, vocabulary)
    return [_dense(rows, length, vocabulary, seed) for seed in range(BATCHES)]


def _dense(rows: int, length: int, vocabulary: int, seed: int) -> Batch:
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (rows, length), generator=source)
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = IGNORED
    positions = torch.arange(length).repeat(rows, 1)
    return Batch(MicroBatch(ids, positions, targets, (), ids.numel(), rows * (length - 1)), ())


def _packed(rows: int, length: int, vocabulary: int) -> list[Batch]:
    """Rows out of a whole set of documents, packed best fit decreasing, as we and TRL pack.

    Their lengths are spread evenly over the orders of magnitude: many short ones, few long ones.
    """
    source = np.random.default_rng(0)
    shortest, longest = (SHORTEST, LONGEST) if length > LONGEST else (4, length - 8)
    drawn = np.exp(source.uniform(math.log(shortest), math.log(longest + 1), size=DOCUMENTS))
    lengths = np.minimum(drawn.astype(np.int64), longest)
    filled = pack(lengths, length)
    picked = source.permutation(len(filled))[: BATCHES * rows].reshape(BATCHES, rows)
    documents = [torch.from_numpy(source.integers(0, vocabulary, size)) for size in lengths]
    return [
        _joined([[documents[each] for each in filled[row]] for row in some], length)
        for some in picked
    ]


def _joined(rows: list[list[Tensor]], length: int) -> Batch:
    """Documents in each row one behind the other; each has positions of its own."""
    ids, positions = (torch.zeros(len(rows), length, dtype=torch.long) for _ in range(2))
    targets = torch.full_like(ids, IGNORED)
    for row, documents in enumerate(rows):
        at = 0
        for tokens in documents:
            end = at + len(tokens)
            ids[row, at:end] = tokens
            positions[row, at:end] = torch.arange(len(tokens))
            targets[row, at : end - 1] = tokens[1:]
            at = end
        positions[row, at:] = torch.arange(length - at)  # padding is a document of its own
    # Longest first is how they were packed; whoever pads meets them in no order.
    mixed = [tokens for documents in rows for tokens in documents]
    order = np.random.default_rng(len(mixed)).permutation(len(mixed))
    tokens, labels = sum(map(len, mixed)), int((targets != IGNORED).sum())
    made = MicroBatch(ids, positions, targets, (), tokens, labels)
    return Batch(made, tuple(mixed[each] for each in order))


def flops(case: Case, config: Any, batch: Batch) -> float:
    """Of a step: what the model asks for, whatever a method computes again or in vain.

    2 N forward and 2 N for the gradient of the input, 2 N more where weights are trained, for
    each token; attention over each document's past, three times with its backward pass (windows
    that are shorter than a document are not taken off).
    """
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    size = getattr(config, "head_dim", None) or size
    hidden, wide, keys = config.hidden_size, heads * size, _key_heads(config) * size
    attention_shapes = [(hidden, wide), (hidden, keys), (hidden, keys), (wide, hidden)]
    mlp_shapes, expert_shapes, router = _mlp_shapes(config)
    shapes = attention_shapes + mlp_shapes
    adapted = {(): shapes, ATTENTION: attention_shapes, MLP: mlp_shapes}[case.targets]
    layers = config.num_hidden_layers
    met = active_experts(config.to_dict())
    weights = layers * sum(a * b for a, b in shapes) + config.vocab_size * hidden
    weights += layers * (met * sum(a * b for a, b in expert_shapes) + router)
    adapters = 0
    if case.lora:
        ranks = (case.rank, met * lora_of(case).rank_of_experts(met))
        both = (adapted, expert_shapes)
        adapters = layers * sum(
            rank * sum(a + b for a, b in some) for rank, some in zip(ranks, both, strict=True)
        )
    each = (4 if case.lora else 6) * weights + 6 * adapters
    rows, length = batch.ours.input_ids.shape
    lengths = [len(document) for document in batch.documents] or [length] * rows
    attention = layers * sum(2 * wide * own * own for own in lengths)
    return float(each * batch.ours.tokens + 3 * attention)


def _mlp_shapes(config: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """Matrices of a layer's MLP that all tokens meet, those of one expert, and a router's size."""
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", 0)
    if not active_experts(config.to_dict()):
        return [(hidden, inner)] * (2 if config.model_type in UNGATED else 3), [], 0
    counted = ("num_experts", "num_local_experts")
    count = next(getattr(config, name) for name in counted if hasattr(config, name))
    wide = getattr(config, "moe_intermediate_size", None) or inner
    return [], [(hidden, wide)] * 3, hidden * count


def lora_of(case: Case) -> LoRA:
    """The row's adapter."""
    return LoRA.model_validate(case.adapter, strict=False)


def _key_heads(config: Any) -> int:
    if config.model_type == "falcon":
        return int(config.num_kv_heads if config.new_decoder_architecture else 1)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
