"""A run's checkpoints: the room for them, writing them beside training, and going back to one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardtune.checkpoint.async_saver import AsyncSaver, CheckpointIdentity
from shardtune.checkpoint.commit_by_rename import checkpoint_name, quarantine, remove_partial
from shardtune.checkpoint.disk_space import estimate_disk, require_disk_space
from shardtune.checkpoint.latest import LatestCheckpoint, latest_checkpoint, read_together
from shardtune.checkpoint.manifest import Manifest
from shardtune.checkpoint.overwrite import size_aside
from shardtune.checkpoint.reader import Reader
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_in_sight, require_run_id
from shardtune.config.job import AdamW, Job, NoAdapter
from shardtune.core.engine import Engine
from shardtune.core.progress import Progress
from shardtune.errors import RunError
from shardtune.launch.process_group import JoinedWorld
from shardtune.models.load import result_dtype
from shardtune.models.model_files import ModelFiles
from shardtune.report.live import RunView


@dataclass(frozen=True)
class RunCheckpoints:
    """Every rank calls the same methods in the same order."""

    job: Job
    world: JoinedWorld
    model: ModelFiles
    engine: Engine
    files: RunDir
    view: RunView
    saver: AsyncSaver

    def require_disk_space(self) -> None:
        """Refuses a disk on which the run's checkpoints and result will not fit."""
        shards, _ = self.engine.shards()
        mine = sum(shard.region.size for shard in shards if shard.key.startswith("weight."))
        trained = sum(map(int, self.world.all_gather(str(mine))))
        rule, save = self.job.train.optimizer, self.job.save
        adapted = not isinstance(self.job.adapter, NoAdapter)
        written = result_dtype(self.model, self.job.train.compute_precision)
        saves = save.every or save.best is not None
        need = estimate_disk(
            trained,
            2 if isinstance(rule, AdamW) else int(rule.momentum > 0),
            keep=save.keep + (save.best is not None),
            saves=-(-self.view.steps // (1 if save.best else save.every)) if saves else 1,
            result=trained * (4 if adapted else written.itemsize),
        )
        require_disk_space(self.files.path, need, size_aside(self.files))

    def prepare(self) -> None:
        """Gets memory for the first checkpoint while training goes on, if one comes before the end.
        Call it after a step, when there is all that it will have."""
        if (self.job.save.every or self.job.save.best) and self.job.save.background:
            self.saver.prepare(self.engine.shards()[0])

    def save(self, progress: Progress) -> None:
        """Begins a checkpoint that a run goes on from, when an earlier one is through."""
        with self._failing_softly():
            self.saver.wait()
        job = hashlib.sha256(self.job.model_dump_json().encode()).hexdigest()
        run = require_run_id(self.files)
        identity = CheckpointIdentity(run, progress.step, self.job.strategy.type, job)
        with self._failing_softly():
            shards, numbers = self.engine.shards()
            self.saver.save(identity, shards, numbers, progress, self.files.jsonl.sync)

    def poll(self) -> None:
        """Completes a checkpoint that all ranks have written meanwhile. Call it after each step."""
        with self._failing_softly():
            self.saver.poll()

    def wait(self) -> None:
        """Returns when the last checkpoint is complete; RunError if it can't be."""
        with self._failing_softly():
            self.saver.wait()
        if self.saver.failure is not None:
            raise self.saver.failure

    @contextmanager
    def _failing_softly(self) -> Iterator[None]:
        """A checkpoint that failed costs no training, unless the job says so. Every rank knows."""
        try:
            yield
        except RunError as error:
            if self.job.save.on_failure == "stop":
                raise
            self.view.warn(f"{error}\n    training goes on; the next is tried when due", "red")

    def latest(self) -> LatestCheckpoint:
        """What to go on from. Damaged checkpoints are named, and put where none is looked for;
        those of other runs are named and left alone."""
        folder = self.files.checkpoints
        if self.world.is_main:
            remove_partial(folder)
        self.world.barrier()
        found = latest_checkpoint(folder, require_run_id(self.files), self.world)
        for path, why in found.others:
            self.view.warn(f"{path}: {why}; left alone")
        if found.checkpoint is None:
            require_in_sight(self.files)
        for path, why in found.damaged:
            aside = quarantine(path).name if self.world.is_main else path.name
            self.view.warn(f"{path} is damaged: {why}; set aside as {aside}")
        self.world.barrier()
        return found

    def restore(self, path: Path, manifest: Manifest) -> None:
        """Puts weights, optimizer states and random numbers of a checkpoint into the engine;
        refuses one of another model."""
        state = Reader(path, manifest)
        shards, _ = self.engine.shards()
        state.refuse_other_weights({p.key: p for p in shards if p.key.startswith("weight.")})
        self.engine.load_state(state, manifest.numbers)

    def restore_best(self, progress: Progress) -> Progress:
        """Puts the weights of the best step back into the engine; returns how far the run was when
        it had the weights that it has now. A checkpoint that is lost costs the result no more than
        being the best."""
        step = progress.best_step
        if self.job.save.best is None or step is None or step == progress.step:
            return progress
        path = self.files.checkpoints / checkpoint_name(step)
        found = read_together(path, require_run_id(self.files), self.world)
        if isinstance(found, str):
            last = f"the result is written from step {progress.step}"
            self.view.say(f"{path}, the best, can't be used: {found}; {last}", "red")
            return progress
        self.engine.load_state(Reader(path, found), found.numbers)
        best = f"{self.job.save.best.metric} {progress.best_value:.6g}"
        self.view.say(f"writing the result from step {step}, the best ({best})")
        return found.progress
