"""Stages: consecutive layers of an unmodified causal language model, with its ends where they are.

A rank gets the model as a skeleton in which only its own layers have memory. A stage runs them
through the model's own forward pass, on a shallow copy of the model that has no other layers:
masks, rotary positions and checkpointing stay the business of transformers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.parallel_plan import Family, active_share, family_of, require_stages
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.core.pipeline_schedule import Pipelining, split_layers, stage_costs
from shardtune.core.step import IGNORED
from shardtune.engine.loss import loss_sum
from shardtune.engine.row_lengths import TakesRowLengths
from shardtune.engine.unsharded import Unsharded

Autocast = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Anatomy:
    """Where the layers and the ends of a model are."""

    family: Family
    base: Any
    """The model without its head."""
    layers: tuple[nn.Module, ...]
    embeddings: tuple[nn.Module, ...]
    norm: nn.Module
    head: nn.Module

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        causal: Any = unwrap_model(model)
        family = family_of(causal.config)
        base = getattr(causal, family.base)
        ends = [name for name in (family.embedding, family.positions) if name]
        return cls(
            family,
            base,
            tuple(getattr(base, family.layers)),
            tuple(getattr(base, name) for name in ends),
            getattr(base, family.norm),
            getattr(causal, family.head),
        )

    @property
    def hidden(self) -> int:
        return int(self.base.config.get_text_config().hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are in: as the embeddings, of which trained ones are in fp32."""
        weights = [weight for each in self.embeddings for weight in each.parameters()]
        trained = any(weight.requires_grad for weight in weights)
        return torch.float32 if trained else weights[0].dtype


@dataclass(frozen=True)
class Division:
    """Which layers each stage has, and on which of the pipeline's ranks it runs."""

    layers: tuple[range, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, anatomy: Anatomy, pipelining: Pipelining, ranks: int) -> Division:
        require_stages(len(anatomy.layers), pipelining, ranks)
        active = active_share(anatomy.base.config)
        layers = [matrices(layer, active) for layer in anatomy.layers]
        costs = stage_costs(layers, matrices(anatomy.head))
        return cls(split_layers(costs, pipelining.stages(ranks)), pipelining.ranks(ranks))

    def mine(self, rank: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def absent(self, anatomy: Anatomy, rank: int) -> list[nn.Module]:
        """The layers and ends that a rank has nothing to do with."""
        kept = {index for stage in self.mine(rank) for index in self.layers[stage]}
        missing = [layer for index, layer in enumerate(anatomy.layers) if index not in kept]
        if self.ranks[0] != rank:
            missing += anatomy.embeddings
        if self.ranks[-1] != rank:
            missing += [anatomy.norm, anatomy.head]
        return missing


def matrices(part: nn.Module, active: float = 1.0) -> float:
    """The weights of a part's matrices, adapters not counted: multiplications for one token, which
    meets the share `active` of a layer's experts."""
    found = 0.0
    for name, module in part.named_modules():
        if "lora_" in name or "modules_to_save" in name:
            continue
        if isinstance(module, nn.Linear):  # also where its numbers are packed in fewer bits
            found += module.in_features * module.out_features
        elif type(module).__name__ == "Conv1D":  # GPT-2's
            found += module.get_parameter("weight").numel()
        else:  # experts lie together in tensors of three dimensions
            own = module.parameters(recurse=False)
            found += active * sum(each.numel() for each in own if each.ndim == 3)
    return found


class Stage(nn.Module):
    """One stage as a module: tokens or hidden states in, hidden states or a loss out.

    The last stage gives the loss of a micro-batch, summed over label tokens, in training; in
    evaluation the loss, the number of tokens that it would have chosen itself, and of labels.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        division: Division,
        number: int,
        autocast: Autocast,
        sharded: Unsharded,
        flowing: torch.dtype,
    ) -> None:
        """`flowing` is what hidden states are in between stages."""
        super().__init__()
        self.number = number
        self.first, self.last = number == 0, number == len(division.layers) - 1
        self.body = _body(anatomy, division.layers[number], first=self.first, last=self.last)
        self.head = anatomy.head if self.last else None
        self._dtype = flowing
        self._autocast = autocast
        self._sharded = sharded
        self._told_lengths = [m for m in self.body.modules() if isinstance(m, TakesRowLengths)]

    def forward(
        self,
        given: Tensor,
        position_ids: Tensor,
        targets: Tensor,
        seeds: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        if self.training:  # the same draws whoever computes the stage, and after a resume
            torch.manual_seed((int(seeds) + self.number) % 2**63)
        for module in self._told_lengths:
            module.row_lengths = lengths
        with self._autocast():
            name = "input_ids" if self.first else "inputs_embeds"
            found = self.body(**{name: given}, position_ids=position_ids, use_cache=False)
            hidden: Tensor = found.last_hidden_state
            if self.head is None:
                return self._handed_on(hidden.to(self._dtype))
            kept = (targets != IGNORED).any(dim=0).nonzero().squeeze(1)
            if len(kept) == 0:  # an empty micro-batch still needs its backward pass
                kept = torch.zeros(1, dtype=torch.long, device=targets.device)
            logits = self.head(hidden[:, kept]).flatten(0, 1)
        targets = targets[:, kept].flatten()
        if self.training:
            return torch.stack([self._sharded.loss_sum(logits, targets)])
        loss = loss_sum(logits, targets)
        counted = targets != IGNORED
        correct = ((logits.argmax(-1) == targets) & counted).sum()
        return torch.stack([loss.double(), correct.double(), counted.sum().double()])

    def _handed_on(self, hidden: Tensor) -> Tensor:
        """Gradients come back for whatever is sent, also where all before it is frozen."""
        if torch.is_grad_enabled() and not hidden.requires_grad:
            return hidden.detach().requires_grad_()
        return hidden


def _body(anatomy: Anatomy, layers: range, *, first: bool, last: bool) -> Any:
    """The model without its head, with some of its layers only."""
    family, base = anatomy.family, anatomy.base
    body = copy.copy(base)
    body._modules = dict(base._modules)  # the copy would share them
    body.config = _config(base.config, layers)
    setattr(body, family.layers, nn.ModuleList(anatomy.layers[n] for n in layers))
    if not first:
        setattr(body, family.embedding, nn.Identity())
        if family.positions:
            setattr(body, family.positions, _Nothing())
        if family.dropout:
            setattr(body, family.dropout, nn.Identity())
    if not last:
        setattr(body, family.norm, nn.Identity())
    return body


def _config(config: Any, layers: range) -> Any:
    """The configuration of a model that has these layers only."""
    mine = copy.copy(config)
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds is not None:
        mine.layer_types = [kinds[n] for n in layers]
    mine.num_hidden_layers = len(layers)
    return mine


class _Nothing(nn.Module):
    """Adds nothing: positions go in where tokens do."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)
