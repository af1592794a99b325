"""Load-balancing and z-losses of a mixture's routers, over the whole optimizer step.

With c_e the (token, layer) pairs of a step that are sent to expert e, p_e the sum of the router's
probabilities for it, R the number of pairs and E the number of experts:

    load balancing (Switch Transformer, as transformers has it): E * sum_e (c_e / R) * (p_e / R)
    z (ST-MoE): mean of logsumexp(logits)^2 over the pairs

The first is no sum over tokens: what a token adds to it depends on where all the others go. So the
experts that the tokens of a step choose are counted over all micro-batches and ranks before the
first gradient is computed; c has no gradient itself. R alone, which the z-loss needs, is known
without a forward pass. Then each router adds the gradient of its own
logits, where its scores go into the experts: nothing leaves the layer, so that activation
checkpointing and sharding work as ever.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.core.step import MicroBatch
from shardtune.engine.data_peers import Peers
from shardtune.errors import ModelError, Problem

AUX_KEY, Z_KEY = "train.router_aux_loss_coef", "train.router_z_loss_coef"


def routed_tokens(batch: MicroBatch) -> int:
    """Tokens of a micro-batch that routers see, padding not counted where it is known."""
    return batch.input_ids.numel() if batch.lengths is None else batch.tokens


class RouterLosses:
    """Gives the routers of a model the gradients of both losses."""

    def __init__(self, model: nn.Module, *, balance: float, z: float, device: torch.device) -> None:
        self.balance, self.z = balance, z
        self.scale: Tensor | float = 1.0
        """What the gradient of the step's mean is multiplied with."""
        self.counting = False
        """Whether forward passes count which experts are chosen."""
        self._mask: Tensor | None = None
        self._device = device
        self._chosen = torch.zeros(0, device=device)
        self._pairs = torch.zeros((), device=device)
        self._logits_of: set[type] = set()
        """The classes of routers whose answers have been seen to begin with logits."""
        routers = _routers(model, balance, z)
        self._layers = len(routers)
        for router in routers:
            router.register_forward_hook(self._routed)

    def begin_step(self, tokens: int, peers: Peers) -> None:
        """Of so many tokens on this rank that are no padding. Where the step needs to know which
        experts they choose, it counts from here on."""
        self._chosen = torch.zeros(0, device=self._device)
        self._pairs = torch.zeros((), device=self._device)
        self.counting = bool(self.balance)
        if not self.counting:
            self._pairs += tokens * self._layers
            peers.sum(self._pairs)
            self._pairs.clamp_(min=1)

    def begin_batch(self, lengths: Tensor | None, width: int) -> None:
        """Of a micro-batch whose rows have so many tokens, padding not counted; None: all of
        them."""
        self._mask = None
        if lengths is not None:
            places = torch.arange(width, device=lengths.device)
            self._mask = (places < lengths[:, None]).flatten().float()

    def end_counting(self, peers: Peers) -> None:
        """Adds up over ranks, once a step."""
        self.counting = False
        both = torch.cat([self._chosen, self._pairs[None]])
        peers.sum(both)
        self._chosen, self._pairs = both[:-1], both[-1].clamp(min=1)

    def gradient(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Of both losses, by the logits of one router."""
        wide = logits.float()
        shares = wide.softmax(-1)
        found = torch.zeros_like(wide)
        if self.balance and len(self._chosen):
            pull = self._chosen * (self.balance * wide.shape[-1] / self._pairs**2)
            found += shares * (pull - (shares * pull).sum(-1, keepdim=True))
        if self.z:
            found += wide.logsumexp(-1, keepdim=True) * shares * (2 * self.z / self._pairs)
        if mask is not None:
            found *= mask[:, None]
        return (found * self.scale).to(logits.dtype)

    def _routed(self, router: nn.Module, given: Any, answer: Any) -> Any:
        """Takes the place of a router's answer: logits, scores of those chosen, which they are."""
        if not _is_known(answer):
            kind = type(router).__name__
            fact = f"{kind} doesn't answer with logits, scores and chosen experts"
            raise ModelError(Problem(AUX_KEY if self.balance else Z_KEY, fact, "set it to 0"))
        logits, scores, *others = answer
        self._require_logits(type(router), logits)
        if self.counting:
            self._count(logits.detach(), scores.shape[-1])
        if torch.is_grad_enabled():
            scores = _AddGradient.apply(scores, logits, self, self._mask)  # type: ignore[no-untyped-call]
        return (logits, scores, *others)

    def _require_logits(self, kind: type, first: Tensor) -> None:
        """Refuses probabilities: softmax takes from logits what both losses are made of. A GPU is
        waited for once a class, not once a step."""
        if kind in self._logits_of:
            return
        if _are_probabilities(first.detach().float()):
            fact = f"{kind.__name__} answers with probabilities, from which logits can't be had"
            raise ModelError(Problem(AUX_KEY if self.balance else Z_KEY, fact, "set it to 0"))
        self._logits_of.add(kind)

    def _count(self, logits: Tensor, top: int) -> None:
        chosen = logits.float().topk(top, dim=-1).indices
        counted = (
            torch.ones(len(logits), device=logits.device) if self._mask is None else self._mask
        )
        found = torch.zeros(logits.shape[-1], device=logits.device)
        found.scatter_add_(0, chosen.flatten(), counted.repeat_interleave(top))
        self._chosen = found + self._chosen if len(self._chosen) else found
        self._pairs = self._pairs + counted.sum()


class _AddGradient(torch.autograd.Function):
    """Hands scores on as they are; on the way back it adds a gradient to their logits."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, logits: Tensor, losses: RouterLosses, mask: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.losses, ctx.mask = losses, mask
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        return gradient, ctx.losses.gradient(logits, ctx.mask), None, None


def _is_known(answer: Any) -> bool:
    """Whether it is logits by token and expert, scores of those chosen, and which they are."""
    if not isinstance(answer, tuple) or len(answer) != 3:
        return False
    return all(isinstance(each, Tensor) and each.ndim == 2 for each in answer)


def _are_probabilities(rows: Tensor) -> bool:
    """Whether each row adds up to one, as logits don't for all tokens of a micro-batch."""
    return bool((rows >= 0).all() and ((rows.sum(-1) - 1).abs() < 1e-2).all())


def _routers(model: nn.Module, balance: float, z: float) -> list[nn.Module]:
    """The modules whose logits transformers records; refuses a family that has no such loss."""
    base = unwrap_model(model)
    inner = getattr(base, "model", base)
    recorders = getattr(inner, "_can_record_outputs", None) or {}
    recorder = recorders.get("router_logits")
    # Others show logits in another place, among other things: llama4, Doge.
    kind = getattr(recorder, "target_class", None) if getattr(recorder, "index", 0) == 0 else None
    found = [each for each in base.modules() if kind is not None and isinstance(each, kind)]
    homes = [sys.modules.get(kind.__module__) for kind in type(base).__mro__]  # FSDP derives one
    has_loss = any(hasattr(home, "load_balancing_loss_func") for home in homes)
    family = base.config.model_type
    if not found:
        fact = f"{family} has no routers that answer with their logits first in transformers"
        raise ModelError(Problem(AUX_KEY if balance else Z_KEY, fact, "set it to 0"))
    if balance and not has_loss:
        fact = f"{family} has no load-balancing loss in transformers"
        raise ModelError(Problem(AUX_KEY, fact, "set it to 0"))
    return found
