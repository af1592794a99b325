"""DistributedDataParallel: every rank holds the whole model, and computes other rows."""

from __future__ import annotations

import contextlib
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardtune.core.model.kind import kind_of
from shardtune.core.setup import EngineSetup
from shardtune.core.step import MicroBatch
from shardtune.core.world import World
from shardtune.engine.gradient_reduction import GradientReduction
from shardtune.engine.native import NativeEngine
from shardtune.engine.text_part import weights_beside_text
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.errors import ModelError, Problem
from shardtune.parallel.ddp.single_gpu import SplitWeightEngine


class MetGradients(GradientReduction):
    """Gradients that DDP has averaged in the backward pass."""

    unreached: AbstractSet[str] = frozenset()
    """Trained weights without a gradient: those of encoders that text never goes through, and what
    only chooses (biases of routers, indexers of sparse attention)."""

    def reduce(self) -> None:
        """Refuses a gradient that the ranks' others have not met: replicas would drift apart."""
        late = sorted(self.unreached & self.parameters.gradients().keys())
        if late:
            fact = f"weights have a gradient in some micro-batches alone, {late[0]} among them"
            fix = "set strategy: {type: fsdp}, which adds up what there is"
            raise ModelError(Problem("strategy", fact, fix))


class DDPEngine(NativeEngine):
    """Gradients meet once per step, with the last micro-batch."""

    def __init__(self, model: nn.Module, setup: EngineSetup, world: World) -> None:
        self._ddp: DistributedDataParallel | None = None
        gradients = MetGradients(TrainedParameters.of(model))
        super().__init__(model, setup, world, gradients=gradients)
        small = self._spread_small(model)
        self._try_two_tokens()
        gradients.unreached = self.trained.keys() - self.parameters.gradients().keys()
        self._begin()
        leave_out: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        # They are the same on every rank, and have no gradient to wait for.
        leave_out(model, [*small, *weights_beside_text(model), *sorted(gradients.unreached)])
        self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.forward_pass.module = self._ddp
        # DDP lays its buckets out anew after its first backward pass, and with them the order in
        # which the ranks' numbers are summed. That has to happen before the first step: a run that
        # is resumed would otherwise round its next step differently from one that was not.
        self._try_two_tokens()
        self._begin()

    def _spread_small(self, model: nn.Module) -> list[str]:
        """Weights in 8 bits, which gloo can't send, as bytes: they are rounded by data, and on
        different GPUs that may come out differently. Returns their names."""
        small = {n: p for n, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn}
        for parameter in small.values():
            dist.broadcast(parameter.detach().view(torch.uint8), 0)
        return list(small)

    def _try_two_tokens(self) -> None:
        """Forward and backward of two tokens; the gradient stays until the next pass begins."""
        ids = torch.arange(2).unsqueeze(0)
        config = getattr(self.model, "config", None)
        mask = torch.ones_like(ids) if kind_of(config) == "encoder_decoder" else None
        self._begin()
        with torch.compiler.set_stance("force_eager"):  # nothing is to be compiled for two tokens
            self._pass(MicroBatch(ids, ids, ids, (), 2, 2, source_mask=mask), 1.0, last=True)

    def _synchronising(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        if self._ddp is None or last:
            return contextlib.nullcontext()
        return self._ddp.no_sync()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Lets go of its buckets before the process group ends.
        self._ddp, self.forward_pass.module = None, self.model


def native_engine(model: nn.Module, setup: EngineSetup, world: World) -> NativeEngine:
    """The engine for a whole model on each rank, of which there may be only one."""
    if setup.split_fp32:
        return SplitWeightEngine(model, setup, world)
    if world.size > 1:
        return DDPEngine(model, setup, world)
    return NativeEngine(model, setup, world, captures=True)
