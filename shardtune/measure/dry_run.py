"""Replays one rank's steps of a run without its memory: the real engine on fake tensors.

Nothing is estimated here. The model is the one that a run would build, the engine the one that it
would use, and every tensor that they make is counted, for any number of ranks. It takes seconds.

What it can't see is memory that a GPU's kernels take inside one operation, and CUDA's own. Without
a GPU the fake tensors lie on the CPU, because PyTorch's autograd refuses to record for a device
that its build doesn't know; then the operations are those which PyTorch chooses for a CPU. Most
keep what the GPU's keep (fused attention: its result and one number a query, but with dropout or a
trained bias scores, too, which a GPU's kernel doesn't keep); autocast differs a little (on a GPU it
computes layer norms in fp32). Nothing is compiled, so what
`train.kernels: compiled` saves isn't seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from shardtune.core.capabilities import Refusal
from shardtune.core.engine import Engine
from shardtune.core.footprint import Held
from shardtune.core.layout import State
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.engine.dtensor import local
from shardtune.errors import JobError, ModelError, Problem
from shardtune.measure.allocation_ledger import AllocationLedger
from shardtune.measure.fake_world import fake_world
from shardtune.parallel import Strategy
from shardtune.plan.estimate.memory_timeline import MemoryClass, MemoryPhase

DRY_RUN_STEPS = 2  # with the second, the optimizer's states are there from the start

_CLASS_OF: dict[State, MemoryClass] = {
    "params": "params",
    "grads": "gradients",
    "optim": "optimizer",
}


@dataclass(frozen=True)
class DryRun:
    """One rank's memory in bytes, as torch's allocator would count what is allocated."""

    peak: int
    moment: MemoryPhase
    """When that is."""
    classes: dict[MemoryClass, int]
    """What the peak is made of. Logits are apart from the other activations; buffers are gathered,
    cast and unpacked weights, what collectives send, and tables."""
    moments: dict[MemoryPhase, int]
    """The peak of each moment, building the model included."""
    held: Held
    """What the engine says that it holds between two steps."""
    kept: int
    """What a forward pass leaves for the backward pass, without logits."""


def dry_run(
    builder: ModelBuilder,
    strategy: Strategy,
    setup: EngineSetup,
    *,
    ranks: int,
    rows: int,
    length: int,
    microbatches: int = 1,
    packed: bool = False,
    vocabulary: int = 0,
    target: int | None = None,
) -> DryRun:
    """Two steps of the first of `ranks` ranks, with `rows` rows of `length` tokens at a time; a
    model with an encoder reads those and writes `target` tokens.

    `packed` rows hold two documents each, which takes another way through attention. `vocabulary`
    lets logits be told from other activations. More than two micro-batches take no more memory
    than two.
    """
    mesh = strategy.mesh(ranks)
    mesh.require(ranks)
    if not (can := strategy.capabilities.dry_run):
        fact, fix = f"{strategy.type} has no dry run", "estimate without --dry-run"
        if isinstance(can, Refusal):
            fact, fix = f"{mesh}: {can.fact}", f"{fix}; or {can.fix}" if can.fix else fix
        raise JobError(Problem("strategy", fact, fix))
    batch = micro_batch(rows, length, packed=packed)
    if target is not None:
        batch = pair_batch(rows, length, target)
    batches = [batch] * min(microbatches, 2)
    world = World(0, ranks, 0, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        with fake_world(ranks):
            return replay(builder, strategy, setup, world, batches, vocabulary=vocabulary)
    except RuntimeError as error:
        # Somebody else's code under fake tensors: an operation without a fake form, a branch that
        # depends on numbers which aren't there. torch says which.
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        fact = f"this model can't be run dry: {reason}"
        raise ModelError(Problem("model.name", fact, "estimate without --dry-run")) from error


def replay(
    builder: ModelBuilder,
    strategy: Strategy,
    setup: EngineSetup,
    world: World,
    batches: list[MicroBatch],
    *,
    vocabulary: int = 0,
) -> DryRun:
    """Builds the engine and takes its steps, and keeps book. On real tensors it does so too."""
    ledger = AllocationLedger(world.device, vocabulary=vocabulary)
    with ledger, strategy.build(builder, setup, world) as engine:
        model = engine.module()
        # Some are older than the ledger, and transformers loads weights in other threads.
        ledger.adopt((*_shares(model.parameters()), *model.buffers()))
        ledger.classify(_shares(model.parameters()), (), _beside(engine))
        hook = model.register_forward_pre_hook(lambda *_: ledger.begin_forward())
        built = len(ledger.events)
        for _ in range(DRY_RUN_STEPS):
            engine.step(batches)
            ledger.classify(_shares(model.parameters()), _shares(_gradients(model)))
        hook.remove()
        return _summary(ledger, built, engine.held())


def _beside(engine: Engine) -> list[Tensor]:
    """What the optimizer has before its first step."""
    places = getattr(getattr(engine, "optimizer", None), "places", {})
    return [*getattr(engine, "lower_halves", {}).values(), *chain.from_iterable(places.values())]


def micro_batch(rows: int, length: int, *, packed: bool) -> MicroBatch:
    """Rows in which every token is trained on."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    targets = ids.clone()
    targets[:, -1] = IGNORED
    positions = torch.arange(length)
    if packed:
        positions[length // 2 :] -= length // 2
    labels = rows * (length - 1)
    return MicroBatch(ids, positions.repeat(rows, 1), targets, (), rows * length, labels)


def pair_batch(rows: int, length: int, target: int) -> MicroBatch:
    """Sources and targets without padding."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    labels = torch.zeros(rows, target, dtype=torch.long)
    tokens = rows * (length + target)
    mask = torch.ones_like(ids)
    return MicroBatch(ids, ids, labels, (), tokens, labels.numel(), source_mask=mask)


def _summary(ledger: AllocationLedger, built: int, held: Held) -> DryRun:
    elsewhere = frozenset(
        _CLASS_OF[state] for state, home in held.bytes if home != "gpu" and state in _CLASS_OF
    )
    building = ledger.peaks(until=built, without=elsewhere)
    peaks = ledger.peaks(since=built, without=elsewhere)
    moment = max(peaks, key=lambda each: sum(peaks[each].values()))
    return DryRun(
        peak=sum(peaks[moment].values()),
        moment=moment,
        classes=peaks[moment],
        moments={each: sum(sizes.values()) for each, sizes in (building | peaks).items()},
        held=held,
        kept=ledger.kept,
    )


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    return (p.grad for p in model.parameters() if p.grad is not None)


def _shares(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    # One at a time: a list of gradients would keep them alive into the next step.
    return (local(tensor) for tensor in tensors)
