"""CUDA graphs of a step: forward and backward of a micro-batch in one launch, the update in one.

A short micro-batch keeps a GPU busy for less time than Python takes to launch its thousands of
kernels. A graph has them recorded, with their addresses: inputs are copied to where they were, and
all kernels run again by themselves. A shape is recorded when it comes for the second time (the
first one compiles and tunes what there is), and graphs share one pool of memory. They launch the
kernels that the same code launches without them, on the same numbers, so a run that records at
another step, as one that is resumed does, is the same to the bit.

What changes from step to step lies in tensors: the loss scale, the learning rate, whether the
update is applied. Dropout's generator is one that a graph reads its seed from.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters as dynamo_counters
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shardtune.core.host.heartbeat import compiling
from shardtune.core.model.document_boundaries import takes_boundaries
from shardtune.core.setup import EngineSetup
from shardtune.core.units import GIB
from shardtune.core.world import World
from shardtune.engine.graph_pool import GraphPool
from shardtune.engine.host_to_device import Staged
from shardtune.engine.optimizer_update import OptimizerUpdate
from shardtune.engine.row_lengths import TakesRowLengths
from shardtune.engine.trained_parameters import TrainedParameters

MOST_GRAPHS = 32
"""Shapes that are recorded; the others run as they did before."""
MOST_TRAINED = 1 << 29
"""Weights whose gradient may be there twice: once as the step's, once as a micro-batch's."""
_log = logging.getLogger("shardtune")


def why_not(
    setup: EngineSetup,
    world: World,
    parameters: TrainedParameters,
    model: Any,
    *,
    in_place: bool = False,
) -> str:
    """What speaks against recording the steps of an engine; nothing if it is empty. `in_place`: the
    backward pass adds to the step's gradient, weight by weight, so it isn't there twice."""
    trained = sum(parameter.numel() for parameter in parameters.named.values())
    whole = sum(parameter.numel() for parameter in model.parameters())
    recomputes = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    reasons = (
        (torch.device(world.device).type != "cuda", "the model is not on a GPU"),
        (world.size > 1, "gradients are all-reduced inside the backward pass"),
        (_get_current_dispatch_mode() is not None, "a dispatch mode intercepts operations"),
        (not takes_boundaries(model), "transformers asks the GPU which mask attention needs"),
        (setup.precision == "fp16", "the loss scale changes under fp16"),
        (bool(setup.router_aux_loss_coef + setup.router_z_loss_coef), "routers have own losses"),
        (
            any(isinstance(module, TakesRowLengths) for module in model.modules()),
            "rotary frequencies go by the length of each document",
        ),
        (setup.offload_activations, "activations wait in CPU memory"),
        (recomputes, "whole layers are recomputed, and ask for the generator's state"),
        (
            not in_place and (2 * trained > whole or trained > MOST_TRAINED),
            "the gradient would be there twice",
        ),
    )
    return next((why for holds, why in reasons if holds), "")


def describe_graphs(engine: object) -> str:
    """In words, for whoever wonders why short steps are slow."""
    recorded = getattr(engine, "graphs", None)
    if isinstance(recorded, RecordedSteps):
        return f"CUDA graphs: {recorded.covers}"
    why = getattr(engine, "why_no_graphs", "") or "the strategy has none"
    return f"CUDA graphs: none ({why}); short steps wait for the host"


@dataclass(frozen=True)
class RecordedPass:
    """The forward and backward pass of one shape."""

    graph: torch.cuda.CUDAGraph
    batch: Staged
    """Where it reads its inputs."""
    loss: Tensor


class RecordedSteps:
    """The graphs of an engine's steps. Gradients have one place from the first graph on."""

    def __init__(
        self,
        parameters: TrainedParameters,
        update: OptimizerUpdate,
        loss: Callable[[Staged], Tensor],
        device: torch.device,
        most_tokens: int,
        *,
        in_place: bool = False,
    ) -> None:
        """`loss`: the forward pass of a micro-batch on the device, which is recorded for at most
        `most_tokens`. `in_place`: see `why_not`."""
        self._in_place = in_place
        self._most_tokens = most_tokens
        self._weights = list(parameters.named.values())
        self._update = update
        self._loss = loss
        self._device = device
        self._gradients: list[Tensor] = []
        self._passes: dict[Hashable, RecordedPass] = {}
        self._needed: dict[Hashable, int] = {}
        """What a pass of each shape that was computed without a graph has saved, in bytes."""
        self._updated = False
        """Whether the optimizer has had a step: its moments lie in memory only then."""
        self._refused = ""
        self._scale = torch.zeros((), device=device)
        self._rate = torch.zeros((), device=device)
        self._recorded_update: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None
        self._pool = GraphPool()

    @property
    def covers(self) -> str:
        """What is recorded, in words."""
        if self._in_place:
            return f"steps of one micro-batch of up to {self._most_tokens:,} tokens"
        return f"micro-batches of up to {self._most_tokens:,} tokens, and the update"

    @property
    def refused(self) -> str:
        """Why nothing more is recorded."""
        return self._refused

    def begin(self) -> bool:
        """Makes gradients zero where they have their place; otherwise there is nothing to do."""
        if not self._gradients:
            return False
        torch._foreach_zero_(self._gradients)
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient
        return True

    def replay(self, batch: Staged, scale: Tensor) -> Tensor | None:
        """The summed loss of a micro-batch, whose gradient is added to that of the step; None where
        it has to be computed without a graph."""
        recorded = self._passes.get(_shape_of(batch))
        if recorded is None:
            return None
        for here, given in zip(_tensors(recorded.batch), _tensors(batch), strict=True):
            here.copy_(given)
        self._scale.copy_(scale)
        recorded.graph.replay()
        return recorded.loss.clone()

    def is_known(self, batch: Staged) -> bool:
        """Whether its shape has been computed before and can be recorded. Before the first update
        none can: graphs would take the memory of the moments."""
        short = batch.input_ids.numel() <= self._most_tokens
        return short and self._updated and not self._refused and _shape_of(batch) in self._needed

    def record(self, batch: Staged) -> bool:
        """Records the passes of a micro-batch whose shape is known; returns whether it did. Nothing
        is computed by that."""
        shape = _shape_of(batch)
        why = f"{MOST_GRAPHS} shapes have one" if len(self._passes) == MOST_GRAPHS else ""
        why = why or self._lacks_memory(self._needed[shape])
        if why:
            self._refuse(why)
            return False
        try:
            self._passes[shape] = self._recorded(batch)
        except RuntimeError as error:
            self._refuse(_first_error(error))
        return not self._refused

    @contextlib.contextmanager
    def measured(self, batch: Staged) -> Iterator[None]:
        """Around a forward pass without a graph: notes what it saves, of shapes that are too long
        for one as well."""
        shape = _shape_of(batch)
        if self._refused or shape in self._needed:
            yield
            return
        before, compiled = torch.cuda.memory_allocated(self._device), _graphs_compiled()
        yield
        self._needed[shape] = torch.cuda.memory_allocated(self._device) - before
        if compiled != _graphs_compiled():
            self._forget_passes()

    def _forget_passes(self) -> None:
        """Layers were compiled anew, for more shapes than before: what is compiled last is used
        from now on, for shapes that are recorded too. A graph must not round otherwise."""
        torch.cuda.synchronize(self._device)
        self._passes.clear()

    def _lacks_memory(self, needed: int) -> str:
        """A graph keeps its memory, and the largest shape so far may be computed without one beside
        it."""
        free, _ = torch.cuda.mem_get_info(self._device)
        allocator = torch.cuda.memory_reserved(self._device)
        free += allocator - torch.cuda.memory_allocated(self._device) - self._gradient_bytes()
        largest = max(self._needed.values())
        if free >= needed + largest:
            return ""
        free = max(free, 0)  # the gradients alone may be too much
        return (
            f"{free / GIB:.1f} GiB are free, and {needed / GIB:.1f} would be kept, beside "
            f"{largest / GIB:.1f} of the largest micro-batch without a graph"
        )

    def _gradient_bytes(self) -> int:
        """What gradients take beside a recorded pass: the step's, unless they have their place
        already, and a micro-batch's where they are added all at once."""
        copies = (not self._gradients) + (not self._in_place)
        return copies * sum(weight.nbytes for weight in self._weights)

    def _recorded(self, batch: Staged) -> RecordedPass:
        static = _copied(batch)
        totals = self._gradients or [torch.zeros_like(weight) for weight in self._weights]
        graph = torch.cuda.CUDAGraph()
        never_anew = torch.compiler.set_stance("fail_on_recompile")
        with compiling(), never_anew, self._pool.capture(graph):
            loss = self._loss(static)
            self._record_backward(loss * self._scale, totals)
            loss = loss.detach()
        if not self._gradients:
            for weight, total in zip(self._weights, totals, strict=True):
                if weight.grad is not None:  # of the micro-batches of this step
                    total.copy_(weight.grad)
                weight.grad = total
            self._gradients = totals
        return RecordedPass(graph, static, loss)

    def _record_backward(self, loss: Tensor, totals: list[Tensor]) -> None:
        """Adds the gradient to `totals`: all at once where weights are few, else each as it
        comes."""
        if not self._in_place:
            torch._foreach_add_(totals, torch.autograd.grad(loss, self._weights))
            return
        before = [weight.grad for weight in self._weights]
        for weight, total in zip(self._weights, totals, strict=True):
            weight.grad = total
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            for weight, gradient in zip(self._weights, before, strict=True):
                weight.grad = gradient

    def _refuse(self, why: str) -> None:
        self._refused = why
        torch.cuda.synchronize(self._device)
        _log.warning("no more CUDA graphs: %s; steps are launched kernel by kernel", why)

    def update(self, rate: float) -> tuple[Tensor, Tensor]:
        """The update of `OptimizerUpdate`, with a learning rate that lies on the device, where the
        optimizer can read it there."""
        self._updated = True
        if type(self._update.optimizer) is not torch.optim.AdamW:
            return self._update.apply(rate)
        self._rate.fill_(rate)
        if self._recorded_update is None and not (self._gradients and self._can_record_update()):
            return self._update.apply(self._rate)
        if self._recorded_update is None:
            try:
                self._recorded_update = self._record_update()
            except RuntimeError as error:
                self._refuse(_first_error(error))
                return self._update.apply(self._rate)
        graph, norm, applied = self._recorded_update
        graph.replay()
        return norm, applied

    def _record_update(self) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Nothing is changed by that."""
        graph = torch.cuda.CUDAGraph()
        groups = self._update.optimizer.param_groups
        for group in groups:
            group["capturable"] = True  # it is, fused: its counts lie on the device
        try:
            with self._pool.capture(graph):
                norm, applied = self._update.apply(self._rate)
        finally:
            for group in groups:
                group["capturable"] = False
        return graph, norm, applied

    def _can_record_update(self) -> bool:
        """Moments have to be there, and torch's AdamW to have them."""
        optimizer = self._update.optimizer
        known = type(optimizer) is torch.optim.AdamW and not self._refused
        return known and len(optimizer.state) == len(self._weights)

    def forget_update(self) -> None:
        """Moments have another place now."""
        self._recorded_update = None


def _tensors(batch: Staged) -> list[Tensor]:
    told = (each for each in batch.attention.values() if isinstance(each, Tensor))
    return [batch.input_ids, batch.position_ids, batch.targets, batch.kept, *told]


def _shape_of(batch: Staged) -> Hashable:
    told = [(key, _form(value)) for key, value in batch.attention.items()]
    return tuple(batch.input_ids.shape), len(batch.kept), tuple(told)


def _form(value: Any) -> Hashable:
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _copied(batch: Staged) -> Staged:
    """One of its own, at addresses that stay. What was one tensor is one again: a compiled layer
    asks for that."""
    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return copies.setdefault(id(value), value.clone())

    return replace(
        batch,
        input_ids=copy(batch.input_ids),
        position_ids=copy(batch.position_ids),
        targets=copy(batch.targets),
        kept=copy(batch.kept),
        attention={name: copy(value) for name, value in batch.attention.items()},
        arrived=None,
    )


def _graphs_compiled() -> int:
    """By torch.compile in this process."""
    return int(dynamo_counters["stats"]["unique_graphs"])


def _first_error(error: BaseException) -> str:
    """What went wrong first: a capture that has failed says so once more when it ends."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [repr(error)])[0][:200]
