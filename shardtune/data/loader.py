"""The loader: the micro-batches of this rank, step by step.

It has no state. Any step can be asked for at any time, so a resumed run needs nothing but the
number of its next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from shardtune.config.job import DataSection
from shardtune.core.phase_clock import ThreadClock
from shardtune.core.step import MicroBatch
from shardtune.data.collate import Collator, PairCollator
from shardtune.data.dataset import PreparedData
from shardtune.data.micro_batches import micro_batches
from shardtune.data.packing import pack
from shardtune.data.sampler import BatchRow, DocumentRef, Sampler

PADDING_STEPS = 8  # steps whose padding is counted
PREFETCH_STEPS = 2  # steps that lie ready before they are asked for


@dataclass(frozen=True)
class CountedBatches:
    """Micro-batches that are made one by one, and of which it is known how many there are."""

    rows: Sequence[Sequence[BatchRow]]
    collate: Callable[[Sequence[BatchRow]], MicroBatch]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.collate, self.rows)


@dataclass(frozen=True)
class LoadingTime:
    """What making micro-batches has taken so far."""

    seconds: float = 0.0
    worked: float = 0.0
    """Of these, at work; in the others the disk was waited for."""


class Loader:
    """This rank's part of each step and of each evaluation set."""

    def __init__(
        self,
        prepared: PreparedData,
        section: DataSection,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        ranks: int,
        pad_id: int,
        epochs: float | None = None,
        earlier_ends: Sequence[float] = (),
    ) -> None:
        """With `epochs` the rows end there and the last step may be short; else they never end. A
        run that was extended had `earlier_ends`, with short steps of their own.

        Pairs of a source and a target are never packed: a row is one of them.
        """
        train = prepared.train
        paired = any(each.paired for each in train)
        self._sets = train + prepared.eval
        self._eval = {each.name: len(train) + n for n, each in enumerate(prepared.eval)}
        self._capacity = section.sequence_length
        self._packing = section.packs and not paired
        self._micro_batch = micro_batch
        self._global_batch = global_batch
        self._rank = rank
        self._ranks = ranks
        if paired:
            target = section.longest_target
            pairs = PairCollator(
                self._sets, capacity=self._capacity, target_capacity=target, pad_id=pad_id
            )
            self._collate: Collator = pairs
            # Sides are padded apart: one pair may have the longest source, another the longest
            # target, and both may come to lie in one micro-batch.
            self._collate_largest: Callable[[Sequence[BatchRow]], MicroBatch] = partial(
                pairs,
                source=max(int((each.lengths - each.labels).max()) for each in train),
                target=max(int(each.labels.max()) for each in train),
            )
            self._capacity += target  # of both sides together
        else:
            self._collate = Collator(self._sets, capacity=self._capacity, pad_id=pad_id)
            self._collate_largest = self._collate
        self._sampler = Sampler(
            [each.lengths for each in train],
            [each.name for each in train],
            [each.weight for each in train],
            capacity=self._capacity,
            packing=self._packing,
            shuffle=section.shuffle,
            seed=seed,
            global_batch=global_batch,
            earlier_ends=earlier_ends,
        )
        self._last = None if epochs is None else self._sampler.count(epochs)
        self.loaded = LoadingTime()

    def total_steps(self, epochs: float) -> int:
        """How many steps so many epochs take."""
        return self._sampler.steps(epochs)

    def epoch(self, step: int) -> float:
        """How many epochs are behind when a step begins."""
        return self._sampler.epoch(step, self._last)

    @property
    def packing(self) -> bool:
        """Whether a row may hold several documents."""
        return self._packing

    def fill(self) -> float:
        """The share of the training rows' space that holds tokens."""
        return self._sampler.fill()

    def padding_share(self, steps: int) -> float:
        """The share of what the first of so many steps compute, over all ranks, that is padding."""
        tokens = computed = 0
        for step in range(min(steps, PADDING_STEPS)):
            rows = self._sampler.rows(step, self._last)
            by_rank = micro_batches(rows, self._ranks, self._micro_batch, turn=step)
            for batch in (batch for batches in by_rank for batch in batches):
                tokens += sum(document.length for row in batch for document in row)
                computed += self._collate.size(batch)
        return 1 - tokens / max(computed, 1)

    def samples(self, step: int) -> tuple[str, ...]:
        """The ids of the documents that a step trains on, over all ranks, in the global order."""
        rows = self._sampler.rows(step, self._last)
        return self._collate.ids([document for row in rows for document in row])

    def steps(
        self,
        start: int,
        stop: int,
        stage: Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]] = lambda ready: ready,
    ) -> Iterator[Sequence[MicroBatch]]:
        """This rank's micro-batches of the steps from `start` to before `stop`.

        A thread prepares the next steps while this one is computed, and hands them to `stage`. It
        ends with the iterator, also when that is closed early, and what goes wrong in it is raised
        here.
        """
        ready: deque[Future[Sequence[MicroBatch]]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
            try:
                for step in range(start, stop):
                    ready.append(thread.submit(self._prepared, step, stage))
                    if len(ready) > PREFETCH_STEPS:
                        yield ready.popleft().result()
                while ready:
                    yield ready.popleft().result()
            finally:
                for step_to_come in ready:
                    step_to_come.cancel()

    def largest(self) -> list[MicroBatch]:
        """A step than whose micro-batches none of the run has more tokens, padding counted.

        Both sides of its pairs are as wide as the longest of all.
        """
        rounds = -(-self._global_batch // (self._ranks * self._micro_batch))
        rows = -(-self._global_batch // (self._ranks * rounds))
        return [self._collate_largest(self._sampler.longest(rows))] * rounds

    def evaluation(self, name: str) -> CountedBatches:
        """This rank's share of an evaluation set; all ranks get as many micro-batches."""
        dataset = self._eval[name]
        lengths = self._sets[dataset].lengths
        groups = (
            pack(lengths, self._capacity) if self._packing else [[n] for n in range(len(lengths))]
        )
        rows = [tuple(DocumentRef(dataset, n, int(lengths[n])) for n in group) for group in groups]
        mine = micro_batches(rows, self._ranks, self._micro_batch)[self._rank]
        return CountedBatches(mine, self._collate)

    def collate(self, rows: Sequence[BatchRow]) -> MicroBatch:
        """Rows of training documents as one micro-batch, padded to the longest."""
        return self._collate(rows)

    def _prepared(
        self, step: int, stage: Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]
    ) -> Sequence[MicroBatch]:
        with closing(ThreadClock()) as clock:
            begun, own = time.perf_counter(), clock.seconds()
            ready = stage(self._step(step))
            seconds, worked = time.perf_counter() - begun, clock.seconds() - own
        self.loaded = LoadingTime(self.loaded.seconds + seconds, self.loaded.worked + worked)
        return ready

    def _step(self, step: int) -> list[MicroBatch]:
        rows = self._sampler.rows(step, self._last)
        mine = micro_batches(rows, self._ranks, self._micro_batch, turn=step)[self._rank]
        return [self._collate(batch) for batch in mine]
