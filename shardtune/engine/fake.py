"""An engine without a model, so that the training loop can be tested without processes.

It remembers what it was given, and its figures follow from that and from how often it stepped, so a
test sees a micro-batch that is lost, added or out of order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from shardtune.core.footprint import Held
from shardtune.core.step import EvalResult, MicroBatch, StepResult
from shardtune.core.tensor_shards import TensorShard, round_robin


class FakeEngine:
    """Counts instead of computing."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.seen: list[tuple[str, ...]] = []
        self.preflighted: list[tuple[int, ...]] = []

    def step(self, microbatches: Sequence[MicroBatch]) -> StepResult:
        self.seen.append(tuple(sample for batch in microbatches for sample in batch.samples))
        tokens, labels = sum(b.tokens for b in microbatches), sum(b.labels for b in microbatches)
        return StepResult(1.0 / len(self.seen), float(labels), 1e-3, tokens, labels)

    def stage(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return microbatches

    def preflight(self, microbatches: Sequence[MicroBatch]) -> None:
        self.preflighted = [tuple(batch.input_ids.shape) for batch in microbatches]

    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        labels = sum(batch.labels for batch in microbatches)
        return EvalResult(name, labels / (1 + len(self.seen)), labels // 2, labels)

    def offending_samples(
        self, step: int, microbatches: Sequence[MicroBatch], result: StepResult
    ) -> tuple[str, ...]:
        return tuple(sample for batch in microbatches for sample in batch.samples)

    def nonfinite_weights(self) -> tuple[str, ...]:
        return ()

    def module(self) -> nn.Module:
        return self.model

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.model.weight.detach()

    def held(self) -> Held:
        return Held({})

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        return {"weight.weight": torch.ones(1, 1)}, {"taken": float(len(self.seen))}

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        tensors, numbers = self.state()
        return round_robin(tensors, 0, 1), numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        self.seen = [()] * int(numbers["taken"])

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass
