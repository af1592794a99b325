"""PyTorch's own tools: one process, or DDP over several. FSDP2 builds on it in `fsdp.py`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardtune.core.footprint import Held
from shardtune.core.layout import Home
from shardtune.core.pieces import Piece, by_weight, dealt
from shardtune.core.setup import EngineSetup
from shardtune.core.step import IGNORED, EvalResult, MicroBatch, StepResult
from shardtune.core.world import World
from shardtune.engines.loss import forward, loss_sum, selects_logits
from shardtune.engines.optimizer import make_optimizer
from shardtune.engines.shares import divided_like, share_from
from shardtune.engines.tensors import local, size_of, whole

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NativeEngine:
    """One optimizer step with autograd, in plain sight.

    Whatever spreads the model over ranks has been done to `model` before; here it shows only in how
    gradients meet (`_synchronising`) and in tensors that may be a rank's share of a larger one.
    """

    def __init__(self, model: nn.Module, setup: EngineSetup, world: World) -> None:
        self.setup = setup
        self.world = world
        self.device = torch.device(world.device)
        self.model = model
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.trained, setup.optimizer, setup.schedule.peak)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=setup.precision == "fp16")
        self.taken = 0
        self._losses: list[Tensor] = []
        self._select = selects_logits(model)

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        """One optimizer step; `microbatches` are this rank's share, as many as every other's."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        tokens, labels = self._count(microbatches)
        # The ranks' gradients are averaged; the sum over label tokens wants no such division.
        scale = self.world.size / max(1, labels)
        pulse = self.world.pulse
        self._losses = []
        for index, batch in enumerate(microbatches):
            self._seed(index)
            with self._synchronising(last=index == len(microbatches) - 1):
                pulse.forward(*batch.input_ids.shape)
                with self._autocast():
                    logits, targets = forward(
                        self._module(), self._here(batch), select=self._select
                    )
                loss = loss_sum(logits, targets)
                pulse.enter("backward")
                self.scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
            self._losses.append(loss.detach())
        total = self._total()
        pulse.enter("update")
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
        )

    def _update(self, rate: float) -> tuple[float, bool]:
        """Clips and applies the gradient, unless it isn't finite. All ranks see the same norm."""
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.trained.values() if p.grad is not None]
        norm = whole(nn.utils.get_total_norm(gradients)).item()
        applied = math.isfinite(norm)
        limit = self.setup.max_grad_norm
        if limit is not None and applied and norm > limit:
            torch._foreach_mul_(gradients, limit / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if applied:
            self.scaler.step(self.optimizer)  # the optimizer's own step where nothing is scaled
        self.scaler.update()
        return norm, applied

    @torch.no_grad()
    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for batch in microbatches:
            self.world.pulse.enter("evaluate")
            with self._autocast():
                logits, targets = forward(self.model, self._here(batch), select=self._select)
            counted = targets != IGNORED
            sums[0] += loss_sum(logits, targets)
            sums[1] += ((logits.argmax(-1) == targets) & counted).sum()
            sums[2] += counted.sum()
        if self.world.size > 1:
            dist.all_reduce(sums)
        loss, correct, labels = sums.tolist()
        return EvalResult(name, loss, int(correct), int(labels))

    def suspects(self, microbatches: Sequence[MicroBatch]) -> tuple[str, ...]:
        guilty = [not math.isfinite(loss) for loss in self._losses]
        seen = torch.tensor([int(any(guilty))])
        if self.world.size > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        if not seen:  # every loss was a number: it is a gradient that wasn't
            guilty = self._overflowing(microbatches)
        wrong = (batch for batch, bad in zip(microbatches, guilty, strict=True) if bad)
        return tuple(sample for batch in wrong for sample in batch.samples)

    def broken(self) -> tuple[str, ...]:
        parts = ((name, local(parameter.detach())) for name, parameter in self.trained.items())
        return tuple(name for name, part in parts if not part.isfinite().all())

    def module(self) -> nn.Module:
        return self.model

    def trained_weights(self) -> Mapping[str, Tensor]:
        return {name: whole(parameter.detach()) for name, parameter in self.trained.items()}

    def held(self) -> Held:
        states = [s for kept in self.optimizer.state.values() for s in kept.values()]
        moments = [s for s in states if isinstance(s, Tensor) and s.ndim > 0]
        gradients = [p.grad for p in self.trained.values() if p.grad is not None]
        home = self._home()
        return Held(
            {
                ("params", home): sum(size_of(p) for p in self.model.parameters()),
                ("grads", home): sum(size_of(gradient) for gradient in gradients),
                ("optim", home): sum(size_of(moment) for moment in moments),
            }
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        tensors = {f"weight.{name}": weight for name, weight in self.trained_weights().items()}
        for name in self.trained:
            for key, value in self._moments(name).items():
                tensors[f"{key}.{name}"] = whole(value)
        return tensors, self._numbers()

    def pieces(self) -> tuple[list[Piece], dict[str, float]]:
        tensors, numbers = self.state()
        return dealt(tensors, self.world.rank, self.world.size), numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.items():
                local(parameter).copy_(share_from(tensors, f"weight.{name}", parameter))
        for name, kinds in by_weight(tensors).items():
            parameter = self.trained[name]
            for kind in kinds:
                if kind == "step":  # one count a weight
                    count = tensors[f"step.{name}"].to(parameter.device, copy=True)
                    self.optimizer.state[parameter]["step"] = count
                elif kind != "weight":
                    share = share_from(tensors, f"{kind}.{name}", parameter)
                    self.optimizer.state[parameter][kind] = divided_like(share, parameter)
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
        """What the optimizer keeps for a weight; nothing before the first step."""
        kept = self.optimizer.state.get(self.trained[name], {})
        return {key: torch.as_tensor(value) for key, value in kept.items()}

    def _numbers(self) -> dict[str, float]:
        numbers = {"taken": float(self.taken)}
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            numbers |= {"scale": scaler["scale"], "growth": float(scaler["_growth_tracker"])}
        return numbers

    # Small parts of a step --------------------------------------------------------------------

    def _total(self) -> Tensor:
        """The step's loss, summed over all ranks."""
        self.world.pulse.enter("collective")
        total = torch.zeros((), device=self.device)
        for loss in self._losses:
            total += loss
        if self.world.size > 1:
            dist.all_reduce(total)
        return total

    def _overflowing(self, microbatches: Sequence[MicroBatch]) -> list[bool]:
        """Which micro-batches of the last step make a gradient that isn't finite: each again, by
        itself, without the other ranks. Under fp16 the loss scale is to blame, not a sample."""
        if self.scaler.is_enabled():
            return [False] * len(microbatches)
        found = []
        self.model.train()
        for index, batch in enumerate(microbatches):
            self._seed(index, step=self.taken - 1)
            self.optimizer.zero_grad(set_to_none=True)
            with self._synchronising(last=False):
                with self._autocast():
                    logits, targets = forward(
                        self._module(), self._here(batch), select=self._select
                    )
                loss_sum(logits, targets).backward()  # type: ignore[no-untyped-call]
            gradients = (p.grad for p in self.trained.values() if p.grad is not None)
            found.append(not all(bool(gradient.isfinite().all()) for gradient in gradients))
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _count(self, microbatches: Sequence[MicroBatch]) -> tuple[int, int]:
        """Tokens and label tokens of the step over all ranks: one small all-reduce."""
        self.world.pulse.enter("collective")
        counts = torch.tensor(
            [sum(b.tokens for b in microbatches), sum(b.labels for b in microbatches)],
            device=self.device,
        )
        if self.world.size > 1:
            dist.all_reduce(counts)
        tokens, labels = counts.tolist()
        return tokens, labels

    def _seed(self, index: int, step: int | None = None) -> None:
        """Dropout is keyed by step and micro-batch, so that a resumed run draws the same."""
        taken = self.taken if step is None else step
        key = f"{self.setup.seed}/{taken}/{self.world.rank}/{index}"
        torch.manual_seed(int.from_bytes(sha256(key.encode()).digest()[:8], "big") >> 1)

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
        self._ddp: DistributedDataParallel | None = DistributedDataParallel(
            model, gradient_as_bucket_view=True
        )
        self._settle()

    def _settle(self) -> None:
        """DDP lays its buckets out anew after its first backward pass, and with them the order in
        which the ranks' numbers are summed. That has to happen before the first step: a run that
        is resumed would otherwise round its next step differently from one that was not."""
        self.model.train()
        ids = torch.arange(2, device=self.device).unsqueeze(0)
        batch = MicroBatch(ids, ids, ids, (), 2, 2)
        with self._autocast():
            logits, targets = forward(self._module(), batch, select=self._select)
        loss_sum(logits, targets).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=True)

    def _module(self) -> nn.Module:
        assert self._ddp is not None
        return self._ddp

    def _synchronising(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        assert self._ddp is not None
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ddp = None  # lets go of its buckets before the process group ends


def native_engine(model: nn.Module, setup: EngineSetup, world: World) -> NativeEngine:
    """The engine for a whole model on each rank, of which there may be only one."""
    return (DDPEngine if world.size > 1 else NativeEngine)(model, setup, world)
