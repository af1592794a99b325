"""Saves checkpoints beside the training.

Each rank copies its shards and writes the copy in a thread of its own. The threads send nothing:
whether all ranks have finished is asked between two steps, by the thread that trains, and there
rank 0 commits. So the ranks always agree on which step a save succeeded or failed in, and a rank
that dies at any moment leaves at most a folder without a name.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from shardtune.checkpoint import commit_by_rename as store
from shardtune.checkpoint.manifest import Manifest, merge_tensors
from shardtune.checkpoint.rank_files import (
    FILE_SIZE,
    RankFiles,
    decode_answer,
    encode_answer,
    write_rank_files,
)
from shardtune.checkpoint.snapshot import BufferSpec, Snapshot
from shardtune.core.files.atomic_write import DISK_FULL
from shardtune.core.progress import Progress
from shardtune.core.tensor_shards import TensorShard
from shardtune.core.units import MIB
from shardtune.errors import Problem, RunError


class Ranks(Protocol):
    """The ranks of a run, as far as saving and loading speak to them. All of them call alike."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def any(self, flag: bool) -> bool:
        """True on all ranks if `flag` is true on one of them."""
        ...

    def all_gather(self, text: str) -> list[str]:
        """What each rank says, on all of them."""
        ...


@dataclass(frozen=True)
class CheckpointIdentity:
    """What a checkpoint says about the run that it is of."""

    run: str
    step: int
    strategy: str
    job: str


class _Writing(threading.Thread):
    """One rank's part of a save, under way."""

    def __init__(self, saver: AsyncSaver, shards: Sequence[TensorShard], facts: _Facts) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.facts = facts
        self._saver, self._shards = saver, shards
        self._folder, self._rank = saver.folder, saver.ranks.rank
        self.answer: RankFiles | str = ""

    def run(self) -> None:
        if self.answer:  # there is nothing to write
            return
        identity = self.facts.identity
        try:
            self._saver.snapshot.wait()
            self.answer = write_rank_files(
                store.partial_folder(self._folder, identity.step),
                self._shards,
                run=identity.run,
                step=identity.step,
                rank=self._rank,
                file_size=self._saver.file_size,
            )
        except OSError as error:
            self.answer = f"rank {self._rank}: {error.strerror or error}{self._room(error)}"
        except Exception as error:  # noqa: BLE001  it is raised between two steps, on every rank
            self.answer = f"rank {self._rank}: {type(error).__name__}: {error}"

    def _room(self, error: OSError) -> str:
        if error.errno not in DISK_FULL:
            return ""
        need = sum(shard.bytes for shard in self._shards)
        free = shutil.disk_usage(self._folder).free
        return f" (needs {need / MIB:,.1f} MiB; {free / MIB:,.1f} MiB are free)"


@dataclass(frozen=True)
class _Facts:
    identity: CheckpointIdentity
    progress: Progress
    numbers: Mapping[str, float]


class AsyncSaver:
    """Writes `folder/step-N`, keeps the latest and the best, and says when one could not be
    written."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        keep: int,
        background: bool,
        file_size: int = FILE_SIZE,
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        """Rank 0 calls `committed` when a checkpoint is there."""
        self.folder = folder
        self.ranks = ranks
        self.keep = keep
        self.background = background
        self.file_size = file_size
        self.committed = committed
        self.failure: RunError | None = None
        """Why the latest save came to nothing; None if it didn't."""
        self.snapshot = Snapshot()
        self._writing: _Writing | None = None
        self._removing: threading.Thread | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, shards: Sequence[TensorShard]) -> None:
        """Gets the memory for a copy of `shards` beside the training, which the first save would
        hold up for it (docs/LOG.md: a first save on a GPU)."""
        places = [BufferSpec.of(shard) for shard in shards]
        make = threading.Thread(target=self.snapshot.preallocate, args=(places,), daemon=True)
        self._preparing = make
        make.start()

    def save(
        self,
        identity: CheckpointIdentity,
        shards: Sequence[TensorShard],
        numbers: Mapping[str, float],
        progress: Progress,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to save what `shards` are now. An earlier save has to be through: see `wait`.

        Rank 0 calls `before` first: what must be on the disk when the checkpoint is.
        """
        assert self._writing is None
        step = identity.step

        def begin() -> None:
            before()
            store.begin(self.folder, step)

        self._on_main(step, begin)
        facts = _Facts(identity, progress, dict(numbers))
        if not self.background:
            writing = self._writing = _Writing(self, shards, facts)
            writing.run()
            self._finish(writing)
            return
        if self._preparing is not None:
            self._preparing.join()
        try:
            writing = _Writing(self, self.snapshot.take(shards), facts)
        except RuntimeError as error:  # no memory; all ranks learn it where they meet
            writing = _Writing(self, (), facts)
            writing.answer = f"rank {self.ranks.rank}: its share can't be copied: {error}"
        self._writing = writing
        writing.start()

    @property
    def busy(self) -> bool:
        """Whether a save is under way that isn't committed yet."""
        return self._writing is not None

    def poll(self) -> None:
        """Commits a save that all ranks have written by now. Call it after each step."""
        writing = self._writing
        if writing is not None and not self.ranks.any(writing.is_alive()):
            self._finish(writing)

    def wait(self) -> None:
        """Returns when nothing is under way; RunError if a save failed."""
        if (writing := self._writing) is not None:
            writing.join()
            self._finish(writing)
        if self._removing is not None:
            self._removing.join()

    def _finish(self, writing: _Writing) -> None:
        self._writing = None
        answers = [
            decode_answer(text) for text in self.ranks.all_gather(encode_answer(writing.answer))
        ]
        step = writing.facts.identity.step
        failures = [answer for answer in answers if isinstance(answer, str)]
        shares = [answer for answer in answers if isinstance(answer, RankFiles)]
        if failures:
            if self.ranks.rank == 0:
                with contextlib.suppress(OSError):  # the next save, or the next start, does it
                    store.abandon(self.folder, step)
            raise self._failed(step, "; ".join(failures))
        self._on_main(step, lambda: self._commit(writing.facts, shares))
        self.failure = None

    def _commit(self, facts: _Facts, shares: Sequence[RankFiles]) -> None:
        files = {name: each for share in shares for name, each in share.files.items()}
        manifest = Manifest(
            **asdict(facts.identity),
            ranks=self.ranks.size,
            progress=facts.progress,
            numbers=facts.numbers,
            files=files,
            tensors=merge_tensors(share.tensors for share in shares),
        )
        if gaps := manifest.gaps():
            raise OSError(f"{len(gaps)} tensors are not whole: {gaps[0]}")
        partial = store.partial_folder(self.folder, manifest.step)
        for name, each in files.items():
            if not (partial / name).is_file() or (partial / name).stat().st_size != each.bytes:
                raise OSError(f"{name} isn't seen by rank 0; nodes have to share save.directory")
        store.commit(self.folder, manifest)
        with contextlib.suppress(OSError):  # the next one notes it, too
            self.committed()
        old = store.rotate(self.folder, self.keep, manifest.run, facts.progress.best_step)
        if self._removing is not None:
            self._removing.join()
        self._removing = threading.Thread(target=_remove_all, args=(old,), daemon=True)
        self._removing.start()

    def _on_main(self, step: int, act: Callable[[], None]) -> None:
        """Rank 0 acts; if it fails, every rank raises its reason."""
        said = ""
        if self.ranks.rank == 0:
            try:
                act()
            except OSError as error:
                said = error.strerror or str(error)
        said = self.ranks.all_gather(said)[0]
        if said:
            raise self._failed(step, said)

    def _failed(self, step: int, reason: str) -> RunError:
        place = str(self.folder / store.checkpoint_name(step))
        self.failure = RunError(Problem(place, f"can't be written: {reason}", _FIX))
        return self.failure


_FIX = "make room, or set save.directory elsewhere; the checkpoints before it are untouched"


def _remove_all(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # it has no name any more: the next start sweeps it away
            store.remove(path)
