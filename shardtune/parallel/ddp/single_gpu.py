"""Full fine-tuning on one GPU: split fp32 weights, whose upper halves the model computes with.

Autocast would make 16-bit copies in each step, and fp32 gradients of 16-bit products: passes over
memory in which nothing is computed. Here a weight's upper half is one of bf16 that the model has,
and the lower half lies with the optimizer, which reads and writes both. Gradients stay as the
products left them; where several micro-batches are added up they become fp32 before the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardtune.core.footprint import Held
from shardtune.core.setup import EngineSetup
from shardtune.core.step import MicroBatch
from shardtune.core.tensor_shards import Region, TensorShard
from shardtune.core.world import World
from shardtune.engine.dtensor import size_of
from shardtune.engine.native import COMPUTE, NativeEngine
from shardtune.engine.optim.adamw_split_bf16 import SplitAdamW
from shardtune.engine.optim.host_mapped import host_mapped_zeros
from shardtune.engine.optim.split_fp32 import joined, split
from shardtune.kernels.autocast_forward import autocast_forward

ROUNDED_GRADIENT_TOKENS = 3072
"""Tokens up to which torch adds up an embedding's gradient on a GPU in its own precision."""


class SplitWeightEngine(NativeEngine):
    """What is trained is a weight of the model and its lower half beside it."""

    def __init__(self, model: nn.Module, setup: EngineSetup, world: World) -> None:
        assert COMPUTE[setup.precision] == torch.bfloat16
        self.lower_halves = split_weights(model, host_mapped=setup.optimizer.host_mapped)
        add_up_rows(model)
        autocast_forward(model, torch.bfloat16)  # buffers are in fp32
        super().__init__(model, setup, world)

    def _make_optimizer(self) -> SplitAdamW:
        lower = {self.trained[name]: half for name, half in self.lower_halves.items()}
        return SplitAdamW(
            super()._make_optimizer(), lower, host_mapped=self.setup.optimizer.host_mapped
        )

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, upper in self.trained.items():
            yield name, joined(upper.detach(), self.lower_halves[name])

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        """Weights are put together when they are copied, one at a time."""
        found = []
        for name, upper in self.trained.items():
            shape, made = (
                tuple(upper.shape),
                partial(joined, upper.detach(), self.lower_halves[name]),
            )
            form = upper.new_empty((), dtype=torch.float32).expand(shape)
            found.append(TensorShard(f"weight.{name}", shape, Region.whole(shape), form, made))
            for kind, moment in self._moments(name).items():
                whole = Region.whole(tuple(moment.shape))
                found.append(TensorShard(f"{kind}.{name}", tuple(moment.shape), whole, moment))
        return sorted(found, key=lambda shard: shard.key), self._numbers()

    def _put(self, name: str, weight: Tensor) -> None:
        split(weight, self.trained[name], self.lower_halves[name])

    def _remember(self, name: str, moments: dict[str, Tensor]) -> None:
        assert isinstance(self.optimizer, SplitAdamW)
        self.optimizer.take_over(self.trained[name], moments)

    def _moments(self, name: str) -> Mapping[str, Tensor]:
        if self.setup.optimizer.host_mapped and self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # a GPU may still write to CPU memory
        return super()._moments(name)

    def held(self) -> Held:
        found = dict(super().held().bytes)
        home = self._home()
        size = found.pop(("optim", home)) + sum(
            size_of(each) for each in self.lower_halves.values()
        )
        return Held({**found, ("optim", "cpu" if self.setup.optimizer.host_mapped else home): size})

    def _pass(self, batch: MicroBatch, scale: Tensor | float, *, last: bool) -> Tensor:
        loss = super()._pass(batch, scale, last=last)
        if not last:
            for weight in self.trained.values():
                if weight.grad is not None:
                    weight.grad = weight.grad.float()
        return loss

    def _norm(self) -> Tensor:
        """In fp32: by itself the norm of a 16-bit tensor has 16 bits."""
        found = list(self._gradients().values())
        if not found:
            return torch.zeros((), device=self.device)
        parts = torch._foreach_norm(found, 2, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(parts))
        return norm


def split_weights(model: nn.Module, *, host_mapped: bool = False) -> dict[str, Tensor]:
    """Leaves the upper half of each trained weight in the model; returns the lower ones by name, in
    CPU memory where they are `host_mapped`."""
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    first: dict[nn.Parameter, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.requires_grad:
            path, leaf = name.rpartition(".")[::2]
            place = (model.get_submodule(path), leaf)
            places.setdefault(first.setdefault(weight, name), []).append(place)
    first.clear()
    lower = {}
    for name, found in places.items():
        weight = model.get_parameter(name)
        upper = nn.Parameter(torch.empty_like(weight, dtype=torch.bfloat16))
        room = host_mapped_zeros if host_mapped else torch.empty_like
        lower[name] = room(weight.detach(), dtype=torch.int16)
        with torch.no_grad():
            split(weight, upper, lower[name])
        free: Any = upper
        free.grad_dtype = None  # 16 bits, or fp32 once something is added
        for module, leaf in found:  # shared ones stay shared
            setattr(module, leaf, upper)
    for module in model.modules():
        pack: Any = getattr(module, "pack_trained_weights", None)
        if pack is not None:
            pack()
    return lower


def add_up_rows(model: nn.Module) -> None:
    """Lets embeddings add up the gradients of a token that comes often in fp32."""
    for module in model.modules():
        if type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq):
            setattr(module, "forward", partial(_rows, module))  # noqa: B010  (mypy)


def _rows(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    weight, pad = embedding.weight, embedding.padding_idx
    if ids.is_cuda and ids.numel() > ROUNDED_GRADIENT_TOKENS:
        return functional.embedding(ids, weight, pad)
    rows: Tensor = _Rows.apply(weight, ids, -1 if pad is None else pad)  # type: ignore[no-untyped-call]
    return rows


class _Rows(torch.autograd.Function):
    """An embedding whose gradient is rounded once."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, pad: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.pad, ctx.kind = len(weight), pad, weight.dtype
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        wide = gradients[0].float()
        found = torch.ops.aten.embedding_dense_backward(wide, ids, ctx.rows, ctx.pad, False)
        return found.to(ctx.kind), None, None
