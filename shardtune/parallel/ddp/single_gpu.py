"""Full fine-tuning on one GPU: split fp32 weights, whose upper halves the model computes with.

Autocast would make 16-bit copies in each step, and fp32 gradients of 16-bit products: passes over
memory in which nothing is computed. Here a weight's upper half is one of bf16 that the model has,
and the lower half lies with the optimizer, which reads and writes both. Gradients stay as the
products left them; where several micro-batches are added up they become fp32 before the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from shardtune.engine.forward_pass import COMPUTE
from shardtune.engine.gradient_reduction import GradientReduction
from shardtune.engine.native import NativeEngine
from shardtune.engine.optim.adamw_split_bf16 import SplitAdamW
from shardtune.engine.optim.build_optimizer import make_optimizer
from shardtune.engine.optim.host_mapped import host_mapped_zeros
from shardtune.engine.optim.split_fp32 import joined, split
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.engine.training_state import TrainingState
from shardtune.kernels.autocast_forward import autocast_forward

ROUNDED_GRADIENT_TOKENS = 3072
"""Tokens up to which torch adds up an embedding's gradient on a GPU in its own precision."""


class SplitWeightEngine(NativeEngine):
    """What is trained is a weight of the model and its lower half beside it."""

    adds_in_place = True
    _one_micro_batch = False
    """Whether this step has no other: its gradient stays in 16 bits, and can be recorded."""

    def __init__(self, model: nn.Module, setup: EngineSetup, world: World) -> None:
        assert COMPUTE[setup.precision] == torch.bfloat16
        self.lower_halves = split_weights(model, host_mapped=setup.optimizer.host_mapped)
        add_up_rows(model)
        autocast_forward(model, torch.bfloat16)  # buffers are in fp32
        parameters = TrainedParameters.of(model)
        rule = setup.optimizer
        optimizer = SplitAdamW(
            make_optimizer(parameters.local_shards, rule, setup.schedule.peak),
            {parameters.named[name]: half for name, half in self.lower_halves.items()},
            host_mapped=rule.host_mapped,
        )
        self.split_state = SplitTrainingState(
            parameters,
            optimizer,
            self.lower_halves,
            may_be_written=rule.host_mapped and torch.device(world.device).type == "cuda",
        )
        super().__init__(
            model,
            setup,
            world,
            gradients=SplitWeightGradients(parameters, torch.device(world.device)),
            training_state=self.split_state,
            captures=True,
        )

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        return self.split_state.joined_shards(), self._numbers()

    def held(self) -> Held:
        found = dict(super().held().bytes)
        home = self._home()
        size = found.pop(("optim", home)) + sum(
            size_of(each) for each in self.lower_halves.values()
        )
        return Held({**found, ("optim", "cpu" if self.setup.optimizer.host_mapped else home): size})

    def _backward(self, microbatches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        self._one_micro_batch = len(microbatches) == 1
        return super()._backward(microbatches, scale)

    def _replayed(self, batch: MicroBatch, scale: Tensor) -> Tensor | None:
        return super()._replayed(batch, scale) if self._one_micro_batch else None

    def _pass(self, batch: MicroBatch, scale: Tensor | float, *, last: bool) -> Tensor:
        loss = super()._pass(batch, scale, last=last)
        if not last:
            for weight in self.trained.values():
                if weight.grad is not None:
                    weight.grad = weight.grad.float()
        return loss


class SplitTrainingState(TrainingState):
    """Weights and moments of split fp32 weights, saved as the fp32 weights that they are."""

    optimizer: SplitAdamW

    def __init__(
        self,
        parameters: TrainedParameters,
        optimizer: SplitAdamW,
        lower_halves: Mapping[str, Tensor],
        *,
        may_be_written: bool,
    ) -> None:
        """`may_be_written`: moments lie in CPU memory, and a GPU may still write to them."""
        super().__init__(parameters, optimizer)
        self.lower_halves = lower_halves
        self.may_be_written = may_be_written

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, upper in self.parameters.named.items():
            yield name, joined(upper.detach(), self.lower_halves[name])

    def moments(self, name: str) -> Mapping[str, Tensor]:
        if self.may_be_written:
            torch.cuda.current_stream().synchronize()
        return super().moments(name)

    def joined_shards(self) -> list[TensorShard]:
        """All of it. Weights are put together when they are copied, one at a time."""
        found = []
        for name, upper in self.parameters.named.items():
            shape, made = (
                tuple(upper.shape),
                partial(joined, upper.detach(), self.lower_halves[name]),
            )
            form = upper.new_empty((), dtype=torch.float32).expand(shape)
            found.append(TensorShard(f"weight.{name}", shape, Region.whole(shape), form, made))
            for kind, moment in self.moments(name).items():
                whole = Region.whole(tuple(moment.shape))
                found.append(TensorShard(f"{kind}.{name}", tuple(moment.shape), whole, moment))
        return sorted(found, key=lambda shard: shard.key)

    def _load_weight(self, name: str, weight: Tensor) -> None:
        split(weight, self.parameters.named[name], self.lower_halves[name])

    def _load_moments(self, name: str, moments: dict[str, Tensor]) -> None:
        self.optimizer.take_over(self.parameters.named[name], moments)


class SplitWeightGradients(GradientReduction):
    """Gradients in 16 bits, whose norm has 32."""

    def __init__(self, parameters: TrainedParameters, device: torch.device) -> None:
        super().__init__(parameters)
        self.device = device

    def norm(self) -> Tensor:
        """In fp32: by itself the norm of a 16-bit tensor has 16 bits."""
        found = list(self.parameters.gradients().values())
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
