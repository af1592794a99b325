"""From a job's `data` section to tokenized, checked data sets.

Each data set is tokenized once per machine and kept under a key of everything that decides the
result: the content of the source, the settings, the tokenizer. Ranks that prepare the same thing
meet at a file lock; the first does the work and the others find it done, without any collective.
A data set that is refused leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtune.config.job import EvalShare, TrainSource
from shardtune.core.files.atomic_write import atomic_folder
from shardtune.core.files.cache import file_lock
from shardtune.core.host.machine import Machine
from shardtune.core.host.parent_death import die_with_parent
from shardtune.core.model.kind import ModelKind
from shardtune.data import prepared_cache as store
from shardtune.data.cache_digests import find_cache_damage, mark_checked
from shardtune.data.control_tokens import ControlTokens
from shardtune.data.data_file import OpenedSource
from shardtune.data.dataset import PreparedData, PreparedSet, SourceReport
from shardtune.data.formats import RowFormat, make_format
from shardtune.data.held_out import hold_out
from shardtune.data.pairs import PairFormat, make_pair_format
from shardtune.data.readers import SourcePart
from shardtune.data.sources import open_source
from shardtune.data.tokenize import DocumentIndex, Overflow, ProgressCallback, RowCounts, tokenize
from shardtune.data.validate import (
    CheckedSource,
    bad_row_lines,
    check_leaks,
    check_source,
    check_stops,
    notes,
)
from shardtune.errors import DataError, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    from shardtune.config.job import DataSection, Source

SINGLE_PROCESS_BYTES = 64 << 20  # smaller sources are tokenized here: processes cost more
TASKS_PER_WORKER = 4  # portions of the work for each process, so that none is left with a long one


def prepare(
    section: DataSection,
    tokenizer: Any,
    stop_ids: frozenset[int],
    *,
    cache: Path,
    quiet: bool,
    kind: ModelKind = "decoder",
    own_tokens: tuple[str, ...] = (),
) -> PreparedData:
    """All data sets of the section, ready to be packed and loaded, as a model of `kind` reads them.

    Raises DataError with everything that is wrong with any of them. `cache` is where prepared data
    is kept between runs; `quiet` leaves out the progress bars and the list of skipped rows.
    `own_tokens` are those that the job adds to the tokenizer.
    """
    from rich.console import Console

    # The tokenizers library uses threads, and warns at every later fork of this process unless it
    # was told that they are wanted. No forked process of ours tokenizes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    console = Console(stderr=True, quiet=quiet)
    control = ControlTokens.of(tokenizer, section.control_tokens, own_tokens)
    work = _Work(section, tokenizer, stop_ids, cache / "data", console, kind, control)
    problems: list[Problem] = []
    done: list[_Done] = []
    for source in (*section.train, *section.eval_sources):
        try:
            done.append(work.prepare(source))
        except DataError as error:  # noqa: PERF203 - all of them are to be told at once
            problems += error.problems
    problems += check_leaks(
        [one.checked for one in done if isinstance(one.checked.source, TrainSource)],
        [one.checked for one in done if not isinstance(one.checked.source, TrainSource)],
    )
    if problems:
        raise DataError(problems)
    count = len(section.train)
    trained, held = done[:count], done[count:]
    if isinstance(section.eval, EvalShare):
        trained, held = _divided_sets(trained, section.eval.share)
    return PreparedData(
        train=tuple(one.load(section, stop_ids) for one in trained),
        eval=tuple(one.load(section, stop_ids) for one in held),
    )


def _divided_sets(sets: Sequence[_Done], share: float) -> tuple[list[_Done], list[_Done]]:
    """The training sets without the rows that are held out, and these rows by themselves."""
    masks = hold_out([one.checked for one in sets], share)
    trained = [one.without(mask) for one, mask in zip(sets, masks, strict=True)]
    held = [one.alone(mask) for one, mask in zip(sets, masks, strict=True) if mask.any()]
    return trained, held


@dataclass(frozen=True)
class _Done:
    """A data set that was prepared and found good, and where it lies."""

    checked: CheckedSource
    folder: Path
    digests: tuple[str, ...]
    """Its own, then those of other versions (`prepared_cache.data_digests`)."""
    kept: NDArray[np.bool_] | None = None
    """Which of its documents are meant, where not all are."""
    weight: float = 1.0
    notes: tuple[str, ...] = ()

    def without(self, held: NDArray[np.bool_]) -> _Done:
        """What is trained of it when some documents are held out."""
        numbers = self.checked.index.numbers
        out, rows = (len(np.unique(each)) for each in (numbers[held], numbers))
        note = f"{out:,} of {rows:,} rows are held out for evaluation, drawn by their content"
        return replace(self._part(~held), notes=(note,))

    def alone(self, held: NDArray[np.bool_]) -> _Done:
        """What is held out of it. The other rows, and what became of them, are the other side's."""
        part = self._part(held)
        rows = len(np.unique(part.checked.index.numbers))
        opened = replace(part.checked.opened, note="")
        checked = replace(part.checked, tally=RowCounts(rows=rows), opened=opened)
        return replace(part, checked=checked, weight=1.0)

    def _part(self, kept: NDArray[np.bool_]) -> _Done:
        checked = replace(self.checked, index=self.checked.index.where(kept))
        return replace(self, checked=checked, kept=kept)

    def load(self, section: DataSection, stop_ids: frozenset[int]) -> PreparedSet:
        source, tally, index = self.checked.source, self.checked.tally, self.checked.index
        report = SourceReport(
            name=source.label,
            path=source.path,
            format=source.format,
            rows_read=tally.rows,
            documents=len(index.lengths),
            tokens=int(index.lengths.sum()),
            labels=int(index.labels.sum()),
            truncated=tally.truncated,
            truncated_tokens=tally.truncated_tokens,
            split=tally.split,
            dropped=tally.dropped,
            untrained=tally.untrained,
            bad=tally.bad,
            stops_trained=self.checked.stops_trained(stop_ids),
            unit=self.checked.opened.unit,
            notes=(*notes(self.checked, section, stop_ids), *self.notes),
        )
        rows = store.load(self.folder, report.documents if self.kept is None else len(self.kept))
        part = ""
        if self.kept is not None:
            rows = rows.select(np.flatnonzero(self.kept))
            part = hashlib.sha256(self.kept.tobytes()).hexdigest()[:16]
        digest, *others = (each + part for each in self.digests)
        return PreparedSet(
            name=report.name,
            weight=self.weight,
            rows=rows,
            lengths=index.lengths,
            labels=index.labels,
            report=report,
            digest=digest,
            other_digests=tuple(others),
            folder=self.folder,
            checks=index.checks,
            paired=isinstance(self.checked.format, PairFormat),
        )


class _Work:
    """Prepares the data sets of a section one after the other."""

    def __init__(
        self,
        section: DataSection,
        tokenizer: Any,
        stop_ids: frozenset[int],
        folder: Path,
        console: Console,
        kind: ModelKind,
        control: ControlTokens,
    ) -> None:
        self._section = section
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._folder = folder
        self._console = console
        self._kind = kind
        self._control = control
        self._fingerprint = ""

    def prepare(self, source: Source) -> _Done:
        """The data set from the cache, or made now; raises DataError if it is refused."""
        format: RowFormat
        if self._kind == "encoder_decoder":
            longest = self._section.longest_target
            format = make_pair_format(source, self._tokenizer, longest, self._control)
        else:
            format = make_format(source, self._tokenizer, self._control)
        opened = open_source(source)
        self._fingerprint = self._fingerprint or store.fingerprint(self._tokenizer)
        length = self._section.sequence_length
        facts = (source, opened, format, length, self._fingerprint)
        target = self._folder / store.cache_key(*facts)
        try:
            with file_lock(target.with_name(f".{target.name}.lock")):
                checked = self._kept_or_made(source, opened, format, target)
        except OSError as error:
            fact = f"preparing {source.path} failed: {error.strerror or error}"
            fix = "free space or fix the permissions there"
            raise DataError(Problem(error.filename or str(target), fact, fix)) from error
        if checked.tally.bad:
            lines = "\n".join(bad_row_lines(checked))
            self._console.print(lines, markup=False, highlight=False, soft_wrap=True)
        weight = source.weight if isinstance(source, TrainSource) else 1.0
        return _Done(checked, target, store.data_digests(*facts), weight=weight)

    def _kept_or_made(
        self, source: Source, opened: OpenedSource, format: RowFormat, target: Path
    ) -> CheckedSource:
        if target.exists():
            if not (damage := find_cache_damage(target)):
                checked = CheckedSource(source, opened, format, *store.read(target))
                self._require_good(checked)
                return checked
            line = f"{source.path}: its prepared data is damaged ({damage}): made anew"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            shutil.rmtree(target)
        with atomic_folder(target) as folder:
            with self._progress(source.label, opened.count) as progress:
                tally, index = self._tokenize(source, opened, format, folder, progress)
            checked = CheckedSource(source, opened, format, tally, index)
            self._require_good(checked)
            store.write(folder, tally, index)
        mark_checked(target)
        return checked

    def _tokenize(
        self,
        source: Source,
        opened: OpenedSource,
        format: RowFormat,
        folder: Path,
        progress: ProgressCallback,
    ) -> tuple[RowCounts, DocumentIndex]:
        length = self._section.sequence_length
        workers = self._workers(opened)
        if workers == 1:
            target = store.documents_file(folder, 0)
            return tokenize(
                opened.parts, format, length=length, overflow=source.overflow, target=target,
                progress=progress,
            )  # fmt: skip
        shares = [
            _Share(parts, length, source.overflow, store.documents_file(folder, number))
            for number, parts in enumerate(_divided(opened.parts, workers * TASKS_PER_WORKER))
        ]
        tally, indices = RowCounts(), []
        # Not forked: this process has threads, of the tokenizers library if of nothing else.
        with ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=_start_worker, initargs=(format, os.getpid())
        ) as pool:
            try:
                for ours, index in pool.map(_run_share, shares):
                    tally.add(ours)
                    indices.append(index)
                    progress(ours.rows, int(index.lengths.sum()))
            except BrokenProcessPool as error:
                fact = f"one of the {workers} processes that tokenize was killed"
                fix = "if the machine ran out of memory, set data.workers: 1"
                raise DataError(Problem(source.path, fact, fix)) from error
        return tally, DocumentIndex.joined(indices)

    def _workers(self, opened: OpenedSource) -> int:
        wanted = self._section.workers
        if wanted == "auto":
            # One process tokenizes with all cores already; more of them parse and render faster.
            wanted = Machine.here().cores if opened.size >= SINGLE_PROCESS_BYTES else 1
        return min(wanted, len(opened.parts) or 1)

    def _require_good(self, checked: CheckedSource) -> None:
        problems = check_source(checked, self._section)
        if not problems and isinstance(checked.source, TrainSource):
            problems = check_stops(checked, self._section, self._tokenizer, self._stop_ids)
        if problems:
            raise DataError(problems)

    @contextmanager
    def _progress(self, name: str, rows: int | None) -> Iterator[ProgressCallback]:
        """A bar on stderr, which takes the rows and tokens that were done since the last time."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("preparing {task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} rows, {task.fields[tokens]:,} tokens"),
            TimeElapsedColumn(),
        )
        shown = self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=not shown) as bar:
            task = bar.add_task(name, total=rows, tokens=0)

            def advance(rows: int, tokens: int) -> None:
                bar.update(task, advance=rows, tokens=bar.tasks[0].fields["tokens"] + tokens)

            yield advance


@dataclass(frozen=True)
class _Share:
    """What a worker process is given at a time."""

    parts: Sequence[SourcePart]
    length: int
    overflow: Overflow
    target: Path


def _divided(parts: Sequence[SourcePart], count: int) -> list[Sequence[SourcePart]]:
    """The parts in order, in at most `count` runs of nearly the same number."""
    count = min(count, len(parts))
    edges = [round(number * len(parts) / count) for number in range(count + 1)]
    return [parts[start:stop] for start, stop in pairwise(edges)]


_worker_format: RowFormat | None = None  # of a worker process: the tokenizer travels only once


def _start_worker(format: RowFormat, parent: int) -> None:
    global _worker_format
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_format = format


def _run_share(share: _Share) -> tuple[RowCounts, DocumentIndex]:
    assert _worker_format is not None
    return tokenize(
        share.parts, _worker_format, length=share.length, overflow=share.overflow,
        target=share.target, progress=lambda rows, tokens: None,
    )  # fmt: skip
