"""PyTorch's own tools: one process, or DDP over several. FSDP2 builds on it in `fsdp.py`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardtune.core.footprint import Held
from shardtune.core.layout import Home
from shardtune.core.setup import EngineSetup
from shardtune.core.step import IGNORED, EvalResult, MicroBatch, StepResult
from shardtune.core.world import World
from shardtune.engines.eight_bit import is_8bit, packed, unpacked
from shardtune.engines.fused_loss import fused_loss
from shardtune.engines.loss import forward, kept_positions, loss_sum, selects_logits
from shardtune.engines.optimizer import future_moments, make_optimizer, moment_tensors
from shardtune.engines.slices import Unsliced
from shardtune.engines.stopwatch import Stopwatch
from shardtune.engines.tensors import (
    gathered,
    let_go,
    local,
    share_of,
    size_of,
    spread_like,
    whole,
)

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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

    def __init__(
        self,
        model: nn.Module,
        setup: EngineSetup,
        world: World,
        peers: Peers | None = None,
        slices: Unsliced | None = None,
    ) -> None:
        """Without `peers` every other rank is one: each has rows of its own."""
        self.setup = setup
        self.slices = slices or Unsliced()
        self.world = world
        self.peers = peers or Peers(world.rank, world.size)
        self.device = torch.device(world.device)
        self.model = model
        self.trained = self._find_trained()
        # The update knows nothing of other ranks: it sees the shares, as weights of their own.
        self.shares = {name: share_of(parameter) for name, parameter in self.trained.items()}
        self.optimizer = make_optimizer(self.shares, setup.optimizer, setup.schedule.peak)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.precision == "fp16")
        self.taken = 0
        self._select = selects_logits(model)
        wished = self.fuses and slices is None and setup.loss == "fused"
        self._fused = fused_loss(model) if wished else None
        self._stopwatch = Stopwatch(self.device)

    def _find_trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        """One optimizer step; `microbatches` are this rank's share, as many as every other's."""
        self._begin()
        tokens, labels = self._count(microbatches)
        # The ranks' gradients are averaged; the sum over label tokens wants no such division.
        total = self._backward(microbatches, scale=self.peers.size / max(1, labels))
        self.peers.sum(total)
        rate = self.setup.schedule.at(self.taken)
        norm, applied = self._update(rate)
        self.taken += 1
        return StepResult(
            loss=total.item() / max(1, labels),
            grad_norm=norm,
            learning_rate=rate,
            tokens=tokens,
            labels=labels,
            applied=applied,
            busy=self._busy(),
        )

    def rehearse(self, microbatches: Sequence[MicroBatch]) -> None:
        """Forward and backward with what the optimizer will hold beside it; the gradient is let go.

        The second micro-batch meets the gradient of the first; a third would take no more.
        """
        self._begin()
        moments = future_moments(self.shares.values(), self.setup.optimizer)
        self._backward(self._enough(microbatches), scale=1.0)
        del moments
        self._forget()

    def _enough(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """As many micro-batches as can be in memory together."""
        return microbatches[:2]

    def _forget(self) -> None:
        """The engine as it was before the backward pass."""
        let_go(self.model)
        for parameter in self.trained.values():
            parameter.grad = None
        self.model.eval()
        self._stopwatch.read()

    def _backward(self, microbatches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Forward and backward of this rank's micro-batches; returns the sum of their losses."""
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(microbatches):
            torch.manual_seed(self._seed_of(index))
            with self._stopwatch.running():
                total += self._pass(batch, scale, last=index == len(microbatches) - 1)
        return total

    def _busy(self) -> float:
        """Seconds in which a rank computed forward and backward passes, on average over ranks."""
        seconds = torch.tensor(self._stopwatch.read(), device=self.device)
        if self.world.size > 1:
            dist.all_reduce(seconds)
        return float(seconds) / self.world.size

    def _update(self, rate: float) -> tuple[float, bool]:
        """Clips and applies the gradient, unless it isn't finite. All ranks see the same norm."""
        self._meet()
        self.scaler.unscale_(self.optimizer)
        norm = self._norm()
        applied = math.isfinite(norm)
        limit = self.setup.max_grad_norm
        if limit is not None and applied and norm > limit and self._gradients():
            shares = [local(gradient) for gradient in self._gradients().values()]
            torch._foreach_mul_(shares, limit / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if applied:
            with self._shares_bound():
                self.scaler.step(self.optimizer)  # the optimizer's own step where nothing is scaled
        self.scaler.update()
        return norm, applied

    @torch.no_grad()
    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for batch in microbatches:
            with self._autocast():
                sums[:2] += self._judge(batch)
            sums[2] += batch.labels
        let_go(self.model)
        self.peers.sum(sums)
        loss, correct, labels = sums.tolist()
        return EvalResult(name, loss, int(correct), int(labels))

    def module(self) -> nn.Module:
        return self.model

    def trained_weights(self) -> Mapping[str, Tensor]:
        return self._own_weights()

    def _own_weights(self) -> dict[str, Tensor]:
        return {name: self._whole(name, weight.detach()) for name, weight in self.trained.items()}

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
        tensors = {f"weight.{name}": weight for name, weight in self._own_weights().items()}
        for name, parameter in self.trained.items():
            for key, value in self._moments(name).items():
                tensors[f"{key}.{name}"] = (
                    self.slices.in_order(name, gathered(value, parameter)) if value.ndim else value
                )
        numbers = {"taken": float(self.taken)}
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            numbers |= {"scale": scaler["scale"], "growth": float(scaler["_growth_tracker"])}
        return tensors, numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        let_go(self.model)
        with torch.no_grad():
            for name, parameter in self.trained.items():
                weight = self.slices.side_by_side(name, tensors[f"weight.{name}"])
                local(parameter).copy_(local(spread_like(weight, parameter)))
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in self.trained}
        for key, value in tensors.items():
            kind, name = key.split(".", 1)
            if kind != "weight":
                parameter = self.trained[name]
                kept[name][kind] = (
                    local(spread_like(self.slices.side_by_side(name, value), parameter))
                    if value.ndim
                    else value.to(parameter.device, copy=True)
                )
        eight_bit = is_8bit(self.optimizer)
        for name, moments in kept.items():
            if moments:
                share = self.shares[name]
                self.optimizer.state[share] = (
                    packed(moments, self.optimizer) if eight_bit else moments
                )
        self.taken = int(numbers["taken"])
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            scaler |= {"scale": numbers["scale"], "_growth_tracker": int(numbers["growth"])}
            self.scaler.load_state_dict(scaler)

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
        kept = self.optimizer.state.get(self.shares[name], {})
        return unpacked(kept) if kept and is_8bit(self.optimizer) else kept

    @contextlib.contextmanager
    def _shares_bound(self) -> Iterator[None]:
        """Lets the update see weights and gradients where they now lie; FSDP2 moves them."""
        divided = [
            (parameter, share)
            for parameter, share in zip(self.trained.values(), self.shares.values(), strict=True)
            if share is not parameter
        ]
        for parameter, share in divided:
            share.data = local(parameter.detach())
            share.grad = None if parameter.grad is None else local(parameter.grad)
        yield
        for _, share in divided:
            share.grad = None

    # Small parts of a step --------------------------------------------------------------------

    def _begin(self) -> None:
        self.model.train()
        for parameter in self.trained.values():  # not the model's, which may be gathered ones
            parameter.grad = None

    def _pass(self, batch: MicroBatch, scale: float, *, last: bool) -> Tensor:
        """Forward and backward; returns the summed loss."""
        with self._synchronising(last=last):
            with self._autocast():
                loss = self._loss(batch)
            self.scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss(self, batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch, ready for the backward pass."""
        here, kept, targets = self._asked(batch)
        if self._fused is None:
            logits = forward(self._module(), here, kept)
            return self.slices.loss_sum(logits, targets.flatten())
        with self._fused.summing(targets):
            return forward(self._module(), here, kept)

    def _asked(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor | None, Tensor]:
        """The batch on this device, the positions at which it has labels, and those labels."""
        here = self._here(batch)
        if not self._select:
            return here, None, here.targets
        kept = kept_positions(batch).to(self.device, non_blocking=True)
        return here, kept, here.targets[:, kept]

    def _judge(self, batch: MicroBatch) -> Tensor:
        """The summed loss of a micro-batch, and how many of its targets the model would choose."""
        here, kept, targets = self._asked(batch)
        if self._fused is not None:
            with self._fused.judging(targets):
                return forward(self.model, here, kept)
        logits, targets = forward(self.model, here, kept), targets.flatten()
        correct = ((logits.argmax(-1) == targets) & (targets != IGNORED)).sum()
        return torch.stack([loss_sum(logits, targets), correct])

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.trained.items() if p.grad is not None}

    def _meet(self) -> None:
        """Brings gradients together that have not met in the backward pass."""
        self.slices.meet(self._gradients())

    def _norm(self) -> float:
        """The norm of the whole gradient, the same on every rank."""
        return float(whole(nn.utils.get_total_norm(self._gradients().values())))

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        return self.slices.in_order(name, whole(tensor)) if tensor.ndim else tensor

    def _count(self, microbatches: Sequence[MicroBatch]) -> tuple[int, int]:
        """Tokens and label tokens of the step over all ranks: one small all-reduce."""
        counts = torch.tensor(
            [sum(b.tokens for b in microbatches), sum(b.labels for b in microbatches)],
            device=self.device,
        )
        self.peers.sum(counts)
        tokens, labels = counts.tolist()
        return tokens, labels

    def _seed_of(self, index: int) -> int:
        """Dropout is keyed by step and micro-batch, so that a resumed run draws the same."""
        key = f"{self.setup.seed}/{self.taken}/{self.peers.rank}/{index}"
        return int.from_bytes(sha256(key.encode()).digest()[:8], "big") >> 1

    def _here(self, batch: MicroBatch) -> MicroBatch:
        if self.device.type == "cpu":
            return batch
        moved = {
            key: getattr(batch, key).to(self.device, non_blocking=True)
            for key in ("input_ids", "position_ids", "targets")
        }
        return replace(batch, **moved)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        dtype = COMPUTE[self.setup.precision]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def _home(self) -> Home:
        return "gpu"

    def _module(self) -> nn.Module:
        return self.model

    def _synchronising(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


class DDPEngine(NativeEngine):
    """Every rank holds the whole model; gradients meet once per step, with the last micro-batch."""

    def __init__(self, model: nn.Module, setup: EngineSetup, world: World) -> None:
        super().__init__(model, setup, world)
        self._ddp: DistributedDataParallel | None = _joined(model)

    def _module(self) -> nn.Module:
        assert self._ddp is not None
        return self._ddp

    def _synchronising(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        assert self._ddp is not None
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def _forget(self) -> None:
        super()._forget()
        self._ddp = None
        # After a backward pass DDP arranges its buckets anew, and sums them in another order.
        self._ddp = _joined(self.model)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ddp = None  # lets go of its buckets before the process group ends


def _joined(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def native_engine(model: nn.Module, setup: EngineSetup, world: World) -> NativeEngine:
    """The engine for a whole model on each rank, of which there may be only one."""
    return (DDPEngine if world.size > 1 else NativeEngine)(model, setup, world)
