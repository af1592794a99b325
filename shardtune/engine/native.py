"""PyTorch's own tools in one process. `ddp.py`, `fsdp.py` and others spread the same step out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType, TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtune.core.document_boundaries import takes_boundaries
from shardtune.core.footprint import Held
from shardtune.core.layout import Home
from shardtune.core.setup import EngineSetup
from shardtune.core.step import IGNORED, EvalResult, LateResult, MicroBatch, StepResult
from shardtune.core.tensor_shards import TensorShard, by_weight, round_robin
from shardtune.core.world import World
from shardtune.engine.activation_offload import Offload
from shardtune.engine.dtensor import gathered, local, reshard, shard_of, size_of, whole
from shardtune.engine.host_to_device import Staging, fetched, sent
from shardtune.engine.loss import forward, loss_sum, selects_logits
from shardtune.engine.optim.adamw_8bit import is_8bit, packed, unpacked
from shardtune.engine.optim.build_optimizer import (
    future_moments,
    make_optimizer,
    moment_tensors,
    take_step,
)
from shardtune.engine.shards import load_shard, shard_place, shards_of
from shardtune.engine.timer import ComputeTimer
from shardtune.engine.unsharded import Unsharded
from shardtune.kernels.linear_cross_entropy import fused_loss

COMPUTE = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Peers:
    """The ranks that compute other rows of the same step as this one."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """None is every rank."""

    def sum(self, tensor: Tensor) -> None:
        """Adds up over them, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)


class NativeEngine:
    """One optimizer step with autograd, in plain sight.

    Whatever spreads the model over ranks has been done to `model` before; here it shows only in how
    gradients meet (`_synchronising`) and in tensors that may be a rank's share of a larger one.
    """

    fuses = True
    """Whether the model's own forward pass ends with its output head."""
    alone = True
    """Whether a rank can run a micro-batch without the others."""
    lower_halves: Mapping[str, Tensor] = MappingProxyType({})
    """The lower 16 bits of split fp32 weights, by name."""

    def __init__(
        self,
        model: nn.Module,
        setup: EngineSetup,
        world: World,
        peers: Peers | None = None,
        sharded: Unsharded | None = None,
    ) -> None:
        """Without `peers` every other rank is one: each has rows of its own."""
        self.setup = setup
        self.sharded = sharded or Unsharded()
        self.world = world
        self.peers = peers or Peers(world.rank, world.size)
        self.device = torch.device(world.device)
        self.model = model
        self.trained = self._find_trained()
        # The update knows nothing of other ranks: it sees local shards, as weights of their own.
        self.local_shards = {name: shard_of(parameter) for name, parameter in self.trained.items()}
        self.optimizer = self._make_optimizer()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.precision == "fp16")
        self.taken = 0
        self._losses: list[Tensor] = []
        self._select = selects_logits(model)
        wished = self.fuses and sharded is None and setup.loss == "fused"
        self._fused = fused_loss(model) if wished else None
        self._activation_offload = (
            Offload(model, self.device) if setup.offload_activations else None
        )
        self._timer = ComputeTimer(self.device)
        self._staging = Staging(self.device, told=takes_boundaries(model))

    def _find_trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.local_shards, self.setup.optimizer, self.setup.schedule.peak)

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        """One optimizer step; `microbatches` are this rank's share, as many as every other's.

        A GPU is only told what to do: nothing in here waits for it. Counts, norm, and whether the
        update is applied stay with it until somebody reads the result.
        """
        self._begin()
        counts = self._count(microbatches)
        # The ranks' gradients are averaged; the sum over label tokens wants no such division.
        scale = (self.peers.size / counts[1].clamp(min=1).double()).float()
        total = self._backward(microbatches, scale)
        self.world.heartbeat.enter("collective")
        self.peers.sum(total)
        self.world.heartbeat.enter("update")
        rate = self.setup.schedule.at(self.taken)
        norm, applied = self._update(rate)
        self.taken += 1
        return self._result(rate, [total, norm, applied, *counts])

    def stage(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return [self._staging.send(batch) for batch in microbatches]

    def rehearse(self, microbatches: Sequence[MicroBatch]) -> None:
        """Forward and backward with what the optimizer will hold beside it; the gradient is let go.

        The second micro-batch meets the gradient of the first; a third would take no more.
        """
        self._begin()
        moments = future_moments(self.local_shards.values(), self.setup.optimizer)
        self._backward(self._enough(microbatches), torch.ones((), device=self.device))
        del moments
        self._forget()

    def _enough(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """As many micro-batches as can be in memory together."""
        return microbatches[:2]

    def _forget(self) -> None:
        """The engine as it was before the backward pass."""
        reshard(self.model)
        for parameter in self.trained.values():
            parameter.grad = None
        self.model.eval()
        self._timer.restart()

    def _backward(self, microbatches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        """Forward and backward of this rank's micro-batches; returns the sum of their losses."""
        self._losses = []
        for index, batch in enumerate(microbatches):
            torch.manual_seed(self._seed_of(index))
            self.world.heartbeat.forward(*batch.input_ids.shape)
            with self._timer.running():
                loss = self._pass(batch, scale, last=index == len(microbatches) - 1)
            self._losses.append(loss)
        total = torch.zeros((), device=self.device)
        for loss in self._losses:
            total += loss
        return total

    def _update(self, rate: float) -> tuple[Tensor, Tensor]:
        """Clips and applies the gradient, unless it isn't finite. All ranks see the same norm."""
        self._reduce_gradients()
        self.scaler.unscale_(self.optimizer)
        norm = self._norm()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self._shards_bound():
            applied = take_step(self.optimizer, norm, self.setup.max_grad_norm)
        self.scaler.update()
        return norm, applied

    def _result(self, rate: float, figures: Sequence[Tensor]) -> StepResult:
        """The step's figures, which leave the device together, in one copy."""
        parts = [figure.to(self.device).reshape(1) for figure in figures]
        parts += [torch.stack(self._losses).flatten()] if self._losses else []
        times = self._timer.end_step()  # before the figures go: who has them may ask for it
        figures_here = fetched(torch.cat([part.detach().double() for part in parts]))

        def result() -> StepResult:
            total, norm, applied, tokens, labels, *losses = figures_here.wait()
            lap = times()
            return StepResult(
                loss=total / max(1, labels),
                grad_norm=norm,
                learning_rate=rate,
                tokens=int(tokens),
                labels=int(labels),
                applied=bool(applied),
                busy=lap.busy,
                since_last=lap.since_last,
                losses=tuple(losses),
            )

        if self.device.type == "cpu":
            return result()
        return LateResult(result, figures_here.is_here)

    @torch.no_grad()
    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for batch in microbatches:
            self.world.heartbeat.enter("evaluate")
            with self._autocast():
                sums[:2] += self._judge(batch)
            sums[2] += batch.labels
        reshard(self.model)
        self.peers.sum(sums)
        loss, correct, labels = sums.tolist()
        return EvalResult(name, loss, int(correct), int(labels))

    def offending_samples(
        self, step: int, microbatches: Sequence[MicroBatch], result: StepResult
    ) -> tuple[str, ...]:
        guilty = [not math.isfinite(loss) for loss in result.losses]
        seen = torch.tensor([int(any(guilty))])
        if self.world.size > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        if not seen:  # every loss was a number: it is a gradient that wasn't
            guilty = self._overflowing(step, microbatches)
        # A pipeline has empty micro-batches behind these, and losses on its last rank only.
        wrong = (batch for batch, bad in zip(microbatches, guilty, strict=False) if bad)
        return tuple(sample for batch in wrong for sample in batch.samples)

    def nonfinite_weights(self) -> tuple[str, ...]:
        parts = ((name, local(parameter.detach())) for name, parameter in self.trained.items())
        return tuple(name for name, part in parts if not part.isfinite().all())

    def module(self) -> nn.Module:
        return self.model

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._own_weights()

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.trained.items():
            yield name, self._whole(name, weight.detach())

    def held(self) -> Held:
        moments = moment_tensors(self.optimizer)
        home = self._home()
        return Held(
            {
                ("params", home): sum(size_of(p) for p in self.model.parameters() if not p.is_meta),
                ("grads", home): sum(size_of(gradient) for gradient in self._gradients().values()),
                ("optim", home): sum(size_of(moment) for moment in moments),
            }
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        tensors = {f"weight.{name}": weight for name, weight in self._own_weights()}
        for name, parameter in self.trained.items():
            for key, value in self._moments(name).items():
                tensors[f"{key}.{name}"] = (
                    self.sharded.unshuffled(name, gathered(value, parameter))
                    if value.ndim
                    else value
                )
        return tensors, self._numbers()

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        """Every rank has everything: each saves some of the tensors."""
        tensors, numbers = self.state()
        return round_robin(tensors, self.world.rank, self.world.size), numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        reshard(self.model)
        kept = by_weight(tensors)
        for name in self.trained:
            found = {kind: self._load_shard(tensors, kind, name) for kind in kept[name]}
            with torch.no_grad():
                self._put(name, found.pop("weight"))
            if found:
                self._remember(name, found)
        self.taken = int(numbers["taken"])
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            scaler |= {"scale": numbers["scale"], "_growth_tracker": int(numbers["growth"])}
            self.scaler.load_state_dict(scaler)

    def _put(self, name: str, weight: Tensor) -> None:
        """Takes over this rank's shard of a weight."""
        local(self.trained[name]).copy_(weight)

    def _remember(self, name: str, moments: dict[str, Tensor]) -> None:
        """Takes over this rank's shard of a weight's moments."""
        state = packed(moments, self.optimizer) if is_8bit(self.optimizer) else moments
        self.optimizer.state[self.local_shards[name]] = state

    def __enter__(self) -> NativeEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def _moments(self, name: str) -> Mapping[str, Tensor]:
        """A weight's moments of this rank in fp32; none before the first step."""
        kept = self.optimizer.state.get(self.local_shards[name], {})
        return unpacked(kept) if kept and is_8bit(self.optimizer) else kept

    def _load_shard(self, tensors: Mapping[str, Tensor], kind: str, name: str) -> Tensor:
        """This rank's shard of a stored tensor; nothing else is read where that can be."""
        parameter = self.trained[name]
        if kind == "step":  # one count a weight
            return tensors[f"step.{name}"].to(local(parameter).device, copy=True)
        return load_shard(
            tensors, f"{kind}.{name}", parameter, self.sharded.regions(name, parameter)
        )

    def _sharded_state(
        self, twin: int = 0, twins: int = 1, without: Collection[str] = ()
    ) -> list[TensorShard]:
        """What this rank saves of weights that are spread. A share that several hold, or `twins`
        that no tensor knows of, is saved by one of them: another one for each weight."""
        found = []
        for number, (name, parameter) in enumerate(self.trained.items()):
            place = shard_place(parameter)
            mine = number % (place.copies * twins) == place.copy * twins + twin
            if mine and name not in without:
                regions = self.sharded.regions(name, parameter)
                found += shards_of(name, parameter, self._moments(name), regions)
        return found

    def _numbers(self) -> dict[str, float]:
        numbers = {"taken": float(self.taken)}
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            numbers |= {"scale": scaler["scale"], "growth": float(scaler["_growth_tracker"])}
        return numbers

    @contextlib.contextmanager
    def _shards_bound(self) -> Iterator[None]:
        """Lets the update see weights and gradients where they now lie; FSDP2 moves them."""
        divided = [
            (parameter, shard)
            for parameter, shard in zip(
                self.trained.values(), self.local_shards.values(), strict=True
            )
            if shard is not parameter
        ]
        for parameter, shard in divided:
            shard.data = local(parameter.detach())
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        yield
        for _, shard in divided:
            shard.grad = None

    # Small parts of a step --------------------------------------------------------------------

    def _begin(self) -> None:
        self.model.train()  # all of it: an adapter's wrapper is in training before what it wraps
        for parameter in self.trained.values():  # not the model's, which may be gathered ones
            parameter.grad = None

    def _pass(self, batch: MicroBatch, scale: Tensor | float, *, last: bool) -> Tensor:
        """Forward and backward; returns the summed loss."""
        with self._synchronising(last=last):
            with self._autocast(), self._saving():
                loss = self._loss(batch)
            self.world.heartbeat.enter("backward")
            self.scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
        if self._activation_offload is not None:
            self._activation_offload.done()
        return loss.detach()

    def _loss(self, batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch, ready for the backward pass."""
        here, kept, targets = self._asked(batch)
        if self._fused is None:
            logits = forward(self._module(), here, kept)
            return self.sharded.loss_sum(logits, targets.flatten())
        with self._fused.returning_loss(targets):
            return forward(self._module(), here, kept)

    def _asked(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor | None, Tensor]:
        """The batch on this device, the positions at which it has labels, and those labels."""
        here = self._staging.receive(batch)
        if not self._select:
            return here, None, here.targets
        return here, here.kept, here.targets[:, here.kept]

    def _judge(self, batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch, and how many of its targets the model would choose."""
        here, kept, targets = self._asked(batch)
        if self._fused is not None:
            with self._fused.evaluating(targets):
                return forward(self.model, here, kept)
        logits, targets = forward(self.model, here, kept), targets.flatten()
        correct = ((logits.argmax(-1) == targets) & (targets != IGNORED)).sum()
        return torch.stack([loss_sum(logits, targets), correct])

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.trained.items() if p.grad is not None}

    def _reduce_gradients(self) -> None:
        """Brings gradients together that have not met in the backward pass."""
        self.sharded.reduce_gradients(self._gradients())

    def _norm(self) -> Tensor:
        """The norm of the whole gradient, the same on every rank."""
        return whole(nn.utils.get_total_norm(self._gradients().values()))

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        return self.sharded.unshuffled(name, whole(tensor)) if tensor.ndim else tensor

    def _count(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Tokens and label tokens of the step over all ranks: one small all-reduce."""
        self.world.heartbeat.enter("collective")
        tokens, labels = sum(b.tokens for b in microbatches), sum(b.labels for b in microbatches)
        counts = sent(torch.tensor([tokens, labels]), self.device)
        self.peers.sum(counts)
        return counts

    def _overflowing(self, step: int, microbatches: Sequence[MicroBatch]) -> list[bool]:
        """Which micro-batches of a step make a gradient that isn't finite: each again, by itself,
        without the other ranks. Under fp16 the loss scale is to blame, not a sample."""
        if self.scaler.is_enabled() or not self.alone:
            return []
        found = []
        for index, batch in enumerate(microbatches):
            torch.manual_seed(self._seed_of(index, taken=step - 1))
            self._begin()
            self._pass(batch, 1.0, last=False)
            gradients = self._gradients().values()
            found.append(not all(bool(gradient.isfinite().all()) for gradient in gradients))
        self._begin()
        return found

    def _seed_of(self, index: int, taken: int | None = None) -> int:
        """Dropout is keyed by step and micro-batch, so that a resumed run draws the same."""
        taken = self.taken if taken is None else taken
        key = f"{self.setup.seed}/{taken}/{self.peers.rank}/{index}"
        return int.from_bytes(sha256(key.encode()).digest()[:8], "big") >> 1

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        dtype = COMPUTE[self.setup.precision]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def _saving(self) -> contextlib.AbstractContextManager[object]:
        return (
            contextlib.nullcontext()
            if self._activation_offload is None
            else self._activation_offload.saving()
        )

    def _home(self) -> Home:
        return "gpu"

    def _module(self) -> nn.Module:
        return self.model

    def _synchronising(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()
