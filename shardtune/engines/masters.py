"""All weights on one GPU: the model computes with 16-bit copies of what is trained in fp32.

Autocast would make such copies in each step, and fp32 gradients of 16-bit products: passes over
memory in which nothing is computed. Here the update writes the copies while it has the weights, and
reads gradients as the products left them. Where several micro-batches are added up they become fp32
before the second one comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardtune.core.footprint import Held
from shardtune.core.setup import EngineSetup
from shardtune.core.step import MicroBatch
from shardtune.core.world import World
from shardtune.engines.native import COMPUTE, NativeEngine
from shardtune.engines.one_pass import OnePassAdamW
from shardtune.engines.tensors import size_of


class MasterEngine(NativeEngine):
    """What is trained lies with the optimizer; the model has copies, and gradients are theirs."""

    def __init__(self, model: nn.Module, setup: EngineSetup, world: World) -> None:
        self._masters, self._copies = give_copies(model, COMPUTE[setup.precision])
        super().__init__(model, setup, world)

    def _find_trained(self) -> dict[str, nn.Parameter]:
        return self._masters

    def _find_leaves(self) -> dict[str, nn.Parameter]:
        return self._copies

    def _make_optimizer(self) -> torch.optim.Optimizer:
        made = super()._make_optimizer()
        copy_of = {self._masters[name]: copy for name, copy in self._copies.items()}
        return OnePassAdamW(made, copy_of)

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        super().load_state(tensors, numbers)
        with torch.no_grad():
            for name, copy in self._copies.items():
                copy.copy_(self._masters[name])

    def held(self) -> Held:
        found = dict(super().held().bytes)
        found["optim", self._home()] += sum(size_of(each) for each in self._masters.values())
        return Held(found)

    def _pass(self, batch: MicroBatch, scale: Tensor | float, *, last: bool) -> Tensor:
        loss = super()._pass(batch, scale, last=last)
        if not last:
            for copy in self._copies.values():
                if copy.grad is not None:
                    copy.grad = copy.grad.float()
        return loss

    def _norm(self) -> Tensor:
        """In fp32: the norm of a 16-bit tensor is one of 16 bits by itself."""
        parts = torch._foreach_norm(list(self._gradients().values()), 2, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(parts))
        return norm

    @contextlib.contextmanager
    def _shares_bound(self) -> Iterator[None]:
        for name, master in self._masters.items():
            master.grad = self._copies[name].grad
        yield
        for master in self._masters.values():
            master.grad = None


def give_copies(
    model: nn.Module, dtype: torch.dtype
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Puts a copy in the place of each weight that is trained. Returns both by their names."""
    masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copy_of = {master: nn.Parameter(master.detach().to(dtype)) for master in masters.values()}
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if parameter in copy_of:  # shared ones stay shared
                setattr(module, leaf, copy_of[parameter])
    for module in model.modules():
        join: Any = getattr(module, "join_copies", None)
        if join is not None:
            join()
    for each in (*copy_of, *copy_of.values()):
        free: Any = each
        free.grad_dtype = None  # 16 bits, or fp32 once something is added
    return masters, {name: copy_of[master] for name, master in masters.items()}
