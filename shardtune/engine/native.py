"""The native engine: one optimizer step with PyTorch's own tools, in one process.

The engines of `parallel/` spread the same step out. What a step is made of stands in files of its
own: `forward_pass.py`, `gradient_reduction.py`, `optimizer_update.py`; `training_state.py` is what
is saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType, TracebackType

import torch
from torch import Tensor, nn

from shardtune.core.footprint import Held
from shardtune.core.layout import Home
from shardtune.core.model.peft_wrapper import unwrap_model
from shardtune.core.setup import EngineSetup, captured_tokens
from shardtune.core.step import EvalResult, MicroBatch, StepResult
from shardtune.core.tensor_shards import TensorShard, round_robin
from shardtune.core.world import World
from shardtune.engine.cuda_graphs import RecordedSteps, why_not
from shardtune.engine.data_peers import Peers
from shardtune.engine.dtensor import reshard, size_of
from shardtune.engine.evaluate_loss import evaluate_loss
from shardtune.engine.forward_pass import ForwardPass
from shardtune.engine.gradient_reduction import GradientReduction
from shardtune.engine.host_to_device import Staged, sent
from shardtune.engine.nonfinite_samples import nonfinite_samples
from shardtune.engine.optim.build_optimizer import future_moments, make_optimizer, moment_tensors
from shardtune.engine.optimizer_update import OptimizerUpdate
from shardtune.engine.router_losses import routed_tokens
from shardtune.engine.shape_buckets import ShapeBuckets
from shardtune.engine.step_figures import step_result
from shardtune.engine.timer import ComputeTimer
from shardtune.engine.trained_parameters import TrainedParameters, base_weights
from shardtune.engine.training_state import TrainingState
from shardtune.engine.unsharded import Unsharded


class NativeEngine:
    """One optimizer step with autograd, in plain sight.

    Whatever spreads the model over ranks has been done to `model` before; here it shows only in how
    gradients meet (`_synchronising`, `gradients`) and in tensors that may be a rank's shard of a
    larger one.
    """

    fuses = True
    """Whether the model's own forward pass ends with its output head."""
    autocasts = True
    """Whether autocast rounds weights and inputs; else the weights are in 16 bits themselves."""
    alone = True
    """Whether a rank can run a micro-batch without the others."""
    scales_loss: type[torch.amp.GradScaler] = torch.amp.GradScaler
    """Dynamic loss scaling under fp16. Where ranks hold shards of a gradient, one that lets them
    agree on an overflow."""
    adds_in_place = False
    """Whether a recorded backward pass adds to the step's gradient, weight by weight."""
    lower_halves: Mapping[str, Tensor] = MappingProxyType({})
    """The lower 16 bits of split fp32 weights, by name."""

    def __init__(
        self,
        model: nn.Module,
        setup: EngineSetup,
        world: World,
        peers: Peers | None = None,
        sharded: Unsharded | None = None,
        *,
        gradients: GradientReduction | None = None,
        training_state: TrainingState | None = None,
        captures: bool = False,
    ) -> None:
        """Without `peers` every other rank is one: each has rows of its own. `captures`: short
        steps may become CUDA graphs."""
        self.setup = setup
        self.sharded = sharded or Unsharded()
        self.world = world
        self.peers = peers or Peers(world.rank, world.size)
        self.device = torch.device(world.device)
        self.model = model
        self.gradients = gradients or GradientReduction(TrainedParameters.of(model), self.sharded)
        self.parameters = self.gradients.parameters
        self.trained = self.parameters.named
        self.training_state = training_state or TrainingState(
            self.parameters,
            make_optimizer(self.parameters.local_shards, setup.optimizer, setup.schedule.peak),
            self.sharded,
        )
        self.optimizer = self.training_state.optimizer
        self.scaler = self.scales_loss(self.device.type, enabled=setup.precision == "fp16")
        self.optimizer_update = OptimizerUpdate(
            self.optimizer, self.scaler, self.gradients, setup.max_grad_norm
        )
        self.forward_pass = ForwardPass(
            model,
            setup,
            self.device,
            self.sharded,
            fuse=self.fuses and self.sharded.whole_logits and setup.loss == "fused",
            autocasts=self.autocasts,
        )
        self.taken = 0
        self._losses: list[Tensor] = []
        self._timer = ComputeTimer(self.device)
        self._in_training = False
        self.why_no_graphs = ""
        self.graphs = self._graphs() if captures else None

    def _graphs(self) -> RecordedSteps | None:
        """For the CUDA graphs of its steps, where nothing speaks against them."""
        self.why_no_graphs = why_not(
            self.setup, self.world, self.parameters, self.model, in_place=self.adds_in_place
        )
        if self.why_no_graphs:
            return None
        config = unwrap_model(self.model).config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        weights = base_weights(self.model)
        most_tokens = captured_tokens(weights, all_trained=self.adds_in_place)
        self.forward_pass.staging.buckets = ShapeBuckets(most_tokens, longest)
        return RecordedSteps(
            self.parameters,
            self.optimizer_update,
            self._forward_here,
            self.device,
            most_tokens,
            in_place=self.adds_in_place,
        )

    # The step ---------------------------------------------------------------------------------

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        """One optimizer step; `microbatches` are this rank's share, as many as every other's.

        A GPU is only told what to do: nothing in here waits for it. Counts, norm, and whether the
        update is applied stay with it until somebody reads the result.
        """
        self._begin()
        counts = self._count(microbatches)
        self._count_routed(microbatches)
        # The ranks' gradients are averaged; the sum over label tokens wants no such division.
        scale = (self.peers.size / counts[1].clamp(min=1).double()).float()
        total = self._backward(microbatches, scale)
        self.world.heartbeat.enter("collective")
        self.peers.sum(total)
        self.world.heartbeat.enter("update")
        self._timer.updating()
        rate = self.setup.schedule.at(self.taken)
        norm, applied = self._update(rate)
        self.taken += 1
        figures = [total, norm, applied, *counts]
        return step_result(rate, figures, self._losses, self._timer, self.device)

    def stage(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return [self.forward_pass.staging.send(batch) for batch in microbatches]

    def preflight(self, microbatches: Sequence[MicroBatch]) -> None:
        """Forward and backward with what the optimizer will hold beside it; the gradient is let go.

        The second micro-batch meets the gradient of the first; a third would take no more.
        """
        self._begin()
        moments = future_moments(self.parameters.local_shards.values(), self.setup.optimizer)
        self._backward(self._enough(microbatches), torch.ones((), device=self.device))
        del moments
        reshard(self.model)
        self.parameters.drop_gradients()
        self.model.eval()
        self._timer.restart()

    def _enough(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """As many micro-batches as can be in memory together."""
        return microbatches[:2]

    def _begin(self) -> None:
        self._in_training = False
        if self.graphs is None or not self.graphs.begin():
            self.parameters.drop_gradients()

    def _train(self) -> None:
        """Once a step, and not for graphs: it goes over thousands of modules."""
        if not self._in_training:
            self.model.train()  # all: an adapter's wrapper is in training before what it wraps
            self._in_training = True

    def _count(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Tokens and label tokens of the step over all ranks: one small all-reduce."""
        self.world.heartbeat.enter("collective")
        tokens, labels = sum(b.tokens for b in microbatches), sum(b.labels for b in microbatches)
        counts = sent(torch.tensor([tokens, labels]), self.device)
        self.peers.sum(counts)
        return counts

    def _count_routed(self, microbatches: Sequence[MicroBatch]) -> None:
        """Counts where the step's tokens go, for routers' load-balancing loss. A single micro-batch
        is counted in its own forward pass; several take one more each, of the same random numbers.
        The z-loss alone takes none."""
        losses = self.forward_pass.router_losses
        if losses is None:
            return
        losses.begin_step(sum(map(routed_tokens, microbatches)), self.peers)
        losses.scale = self.scaler.scale(torch.full((), float(self.peers.size)).to(self.device))
        if losses.counting and len(microbatches) > 1:
            self._train()
            for index, batch in enumerate(microbatches):
                torch.manual_seed(self._seed_of(index))
                with self.forward_pass.autocast():
                    self.forward_pass.count_routed(batch)
            losses.end_counting(self.peers)
            reshard(self.model)

    def _backward(self, microbatches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        """Gradient accumulation: forward and backward of this rank's micro-batches, one after
        another, whose gradients autograd adds up. Returns the sum of their losses."""
        self._losses = []
        for index, batch in enumerate(microbatches):
            torch.manual_seed(self._seed_of(index))
            self.world.heartbeat.forward(*batch.input_ids.shape)
            with self._timer.running():
                loss = self._replayed(batch, scale)
                if loss is None:
                    loss = self._pass(batch, scale, last=index == len(microbatches) - 1)
            self._losses.append(loss)
        total = torch.zeros((), device=self.device)
        for loss in self._losses:
            total += loss
        return total

    def _replayed(self, batch: MicroBatch, scale: Tensor) -> Tensor | None:
        """The summed loss of a micro-batch whose passes are recorded, or can be now."""
        if self.graphs is None:
            return None
        here = self.forward_pass.staging.receive(batch)
        self._timer.received()
        loss = self.graphs.replay(here, scale)
        if loss is None and self.graphs.is_known(here):
            self._train()
            if self.graphs.record(here):
                loss = self.graphs.replay(here, scale)
        return loss

    def _forward_here(self, here: Staged) -> Tensor:
        """The forward pass of a micro-batch on the device."""
        with self.forward_pass.autocast():
            return self.forward_pass.loss_here(here)

    def _pass(self, batch: MicroBatch, scale: Tensor | float, *, last: bool) -> Tensor:
        """Forward and backward of one micro-batch; returns the summed loss."""
        self._train()
        forward_pass, graphs = self.forward_pass, self.graphs
        with self._synchronising(last=last):
            with forward_pass.autocast(), forward_pass.saving():
                here = forward_pass.staging.receive(batch)
                self._timer.received()
                with contextlib.nullcontext() if graphs is None else graphs.measured(here):
                    loss = forward_pass.loss_here(here)
            if forward_pass.router_losses is not None and forward_pass.router_losses.counting:
                forward_pass.router_losses.end_counting(self.peers)
            self.world.heartbeat.enter("backward")
            self.scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
        if forward_pass.activation_offload is not None:
            forward_pass.activation_offload.done()
        return loss.detach()

    def _synchronising(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        """Whether the ranks' gradients meet in this backward pass."""
        return contextlib.nullcontext()

    def _update(self, rate: float) -> tuple[Tensor, Tensor]:
        """Clips and applies the gradient; returns its norm, and whether it was applied."""
        if self.graphs is not None:
            return self.graphs.update(rate)
        return self.optimizer_update.apply(rate)

    def _seed_of(self, index: int, taken: int | None = None) -> int:
        """Dropout is keyed by step and micro-batch, so that a resumed run draws the same."""
        taken = self.taken if taken is None else taken
        key = f"{self.setup.seed}/{taken}/{self.peers.rank}/{index}"
        return int.from_bytes(sha256(key.encode()).digest()[:8], "big") >> 1

    # Evaluation, and what went wrong ----------------------------------------------------------

    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        return evaluate_loss(name, microbatches, self.forward_pass, self.world, self.peers)

    def offending_samples(
        self, step: int, microbatches: Sequence[MicroBatch], result: StepResult
    ) -> tuple[str, ...]:
        return nonfinite_samples(
            microbatches, result, self.world, lambda: self._overflowing(step, microbatches)
        )

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
            gradients = self.parameters.gradients().values()
            found.append(not all(bool(gradient.isfinite().all()) for gradient in gradients))
        self._begin()
        return found

    def nonfinite_weights(self) -> tuple[str, ...]:
        return self.parameters.nonfinite()

    # What it holds and saves ------------------------------------------------------------------

    def module(self) -> nn.Module:
        return self.model

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.training_state.weights()

    def held(self) -> Held:
        gradients, moments = self.parameters.gradients().values(), moment_tensors(self.optimizer)
        home = self._home()
        return Held(
            {
                ("params", home): sum(size_of(p) for p in self.model.parameters() if not p.is_meta),
                ("grads", home): sum(size_of(gradient) for gradient in gradients),
                ("optim", home): sum(size_of(moment) for moment in moments),
            }
        )

    def _home(self) -> Home:
        return "gpu"

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        return self.training_state.tensors(), self._numbers()

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        """Every rank has everything: each saves some of the tensors."""
        tensors, numbers = self.state()
        return round_robin(tensors, self.world.rank, self.world.size), numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        reshard(self.model)
        self.training_state.load(tensors)
        if self.graphs is not None:
            self.graphs.forget_update()
        self.taken = int(numbers["taken"])
        self.optimizer_update.load_numbers(numbers)

    def _numbers(self) -> dict[str, float]:
        return {"taken": float(self.taken), **self.optimizer_update.numbers()}

    def __enter__(self) -> NativeEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass
