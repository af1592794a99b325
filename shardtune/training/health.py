"""What is wrong with a step's numbers, said with the rank and the samples: gradients and weights
that are no numbers, losses out of line, memory that didn't suffice."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shardtune.config.job import TrainSection
from shardtune.core.progress import Progress
from shardtune.core.runs.loss_spikes import LossSpikes
from shardtune.core.runs.metrics import LossSpike, NonfiniteGradient
from shardtune.core.step import MicroBatch, StepResult
from shardtune.core.world import World
from shardtune.errors import BrokenWeights, OutOfMemory, Problem, RunError
from shardtune.training.run import Run

MOST_SKIPPED_IN_A_ROW = 20  # steps without a finite gradient; fp16 seeks its loss scale in some
SAMPLES_SHOWN = 12  # samples that a line in the terminal names; the metrics name all
OOM_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")


@dataclass(frozen=True)
class Health:
    """Checks each step once it is done. Every rank checks, and all come to the same view."""

    run: Run
    spikes: LossSpikes = field(default_factory=LossSpikes)

    def check(
        self,
        progress: Progress,
        result: StepResult,
        microbatches: Sequence[MicroBatch],
        samples: Sequence[str],
    ) -> None:
        """`progress` counts the step already; `samples` are those of all ranks. `microbatches` are
        only looked at if the step was not applied."""
        if not result.applied:
            self._not_finite(progress, result, microbatches)
        elif math.isfinite(result.loss) and (usual := self.spikes.see(result.loss)) is not None:
            times = result.loss / usual
            fact = f"the loss is {result.loss:.4g}, {times:.3g} times the usual {usual:.4g}"
            self.run.log.note(
                LossSpike(
                    kind="spike",
                    step=progress.step,
                    fact=fact,
                    usual=usual,
                    samples=tuple(samples),
                )
            )

    def _not_finite(
        self, progress: Progress, result: StepResult, microbatches: Sequence[MicroBatch]
    ) -> None:
        engine, world = self.run.engine, self.run.world
        samples = engine.offending_samples(progress.step, microbatches, result)
        mine = {"samples": samples, "weights": engine.nonfinite_weights()}
        said = [json.loads(text) for text in world.all_gather(json.dumps(mine))]
        blamed = {rank: found["samples"] for rank, found in enumerate(said) if found["samples"]}
        broken = {rank: found["weights"] for rank, found in enumerate(said) if found["weights"]}
        fact = "the gradient is not finite; the update was left out on every rank"
        for rank, ids in blamed.items():
            more = f" and {len(ids) - SAMPLES_SHOWN} more" if len(ids) > SAMPLES_SHOWN else ""
            fact += f"; rank {rank}, samples {', '.join(ids[:SAMPLES_SHOWN])}{more}"
        self.run.log.note(
            NonfiniteGradient(
                kind="not_finite", step=progress.step, fact=fact, ranks=blamed, weights=broken
            )
        )
        if broken:
            raise _broken_weights(progress.step, broken, self.run.job.train.learning_rate)
        if self.run.job.train.on_nan == "stop":
            raise RunError(Problem(f"step {progress.step}", fact, "inspect these samples"))
        if progress.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            raise _hopeless(progress)


@contextmanager
def explain_oom(
    world: World, when: str, microbatches: Sequence[MicroBatch], train: TrainSection
) -> Iterator[None]:
    """Turns a want of memory inside the block into OutOfMemory, which names the batch."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(
            words in str(error) for words in OOM_MESSAGES
        ):
            raise
        shapes = [tuple(batch.input_ids.shape) for batch in microbatches]
        rows, width = max(shapes, key=math.prod)
        fact = (
            f"out of memory {when}; its largest micro-batch is {rows} "
            f"row{'s' * (rows > 1)} of up to {width} tokens ({error or type(error).__name__})"
        )
        raise OutOfMemory(Problem(f"rank {world.rank}", fact, _cheapest_change(train))) from error


def _cheapest_change(train: TrainSection) -> str:
    """What to try first: what costs least time and leaves the result as it is."""
    rows = int(train.micro_batch)
    if rows > 1:
        by_itself = "train.on_oom: reduce_micro_batch does so automatically"
        return f"set train.micro_batch: {rows // 2}; the result stays the same ({by_itself})"
    level = train.gradient_checkpointing
    if train.keep_layers and level in ("mlp", "most"):
        return f"set train.keep_layers: {train.keep_layers // 2}; the result stays the same"
    if level == "none" and train.kernels == "compiled":
        more = "`full` where that doesn't suffice"
        return f"set train.gradient_checkpointing: mlp; the result stays the same ({more})"
    if level != "full":
        return "set train.gradient_checkpointing: full; the result stays the same"
    return "divide more over the ranks (strategy), or shorten data.sequence_length"


def _broken_weights(step: int, broken: dict[int, list[str]], rate: float) -> BrokenWeights:
    """They were numbers when the model was loaded, which was looked at."""
    fix = (
        f"lower train.learning_rate ({rate:g}) if that is more than others use; else go on from an "
    )
    fix += "earlier checkpoint (--resume), and if it comes back, the machine may be faulty"
    facts = {
        rank: f"at step {step} {len(names)} weights are not finite, {names[0]} among them"
        for rank, names in broken.items()
    }
    return BrokenWeights([Problem(f"rank {rank}", fact, fix) for rank, fact in facts.items()])


def _hopeless(progress: Progress) -> RunError:
    """A run that no longer learns must not end as if it had."""
    fact = f"the last {progress.skipped_in_a_row} gradients were not finite; nothing was learnt"
    fix = "lower train.learning_rate, or set train.precision: fp32 to see whether it is a matter of"
    return RunError(Problem(f"step {progress.step}", fact, fix + " range"))
