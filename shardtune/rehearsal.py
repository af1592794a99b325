"""The first minute of a run: what it will come to in its hours is tried before its first step.

The largest micro-batch, an evaluation and a save. None of it leaves a trace in what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import prod
from pathlib import Path
from tempfile import TemporaryFile

import torch

from shardtune.checkpoint.disk import estimate, require_room
from shardtune.core.step import MicroBatch
from shardtune.data.loader import Loader
from shardtune.errors import JobError, Problem, RunError
from shardtune.fit import offer
from shardtune.forecast import Forecast
from shardtune.job import AdamW, Job
from shardtune.run import Run

NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
WRITTEN = 1 << 20  # bytes that show whether a folder can be written to


def rehearse(run: Run, data: Loader) -> None:
    """Raises what the run would raise later: want of memory, a disk that is full or closed."""
    if not run.job.train.rehearse:
        return
    if run.world.is_main:
        steps = run.job.train.steps or data.total_steps(run.job.train.epochs or 1.0)
        rehearse_save(run.files.path, run.job, steps, run.foretold)
    largest = data.largest()
    with randomness_kept(run.world.device), explaining_memory(largest, run.job, run.foretold):
        run.engine.rehearse(largest)
        for each in run.judge.sets:
            run.engine.evaluate(each.name, islice(data.evaluation(each.name), 1))
    rows, width = largest[0].input_ids.shape
    run.view.say(f"rehearsed: {rows} rows of {width} tokens, an evaluation, the disk")


def rehearse_save(folder: Path, job: Job, steps: int, foretold: Forecast | None) -> None:
    """Is there room for checkpoints and the result, and may we write there?"""
    folder.mkdir(parents=True, exist_ok=True)
    if foretold is not None:
        rule, trained = job.train.optimizer, foretold.work.trained(foretold.shape)
        moments = 2 if isinstance(rule, AdamW) else int(rule.momentum > 0)
        saves = -(-steps // job.save.every) if job.save.every else 1
        need = estimate(trained, moments, keep=job.save.keep, saves=saves, result=4 * trained)
        require_room(folder, need)
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(WRITTEN))
            file.flush()
    except OSError as error:
        fact = f"{folder} can't be written to: {error.strerror}"
        raise RunError(Problem("save.directory", fact, "set it to a folder of yours")) from None


@contextmanager
def randomness_kept(device: str) -> Iterator[None]:
    """Whatever draws random numbers inside, those after it are as if it had not."""
    devices = [torch.device(device)] if device != "cpu" else []
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def explaining_memory(
    batches: Sequence[MicroBatch], job: Job, foretold: Forecast | None
) -> Iterator[None]:
    """Turns a want of memory into a sentence with the batch and what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(
            words in str(error) for words in NO_MEMORY
        ):
            raise
        rows, width = max((tuple(batch.input_ids.shape) for batch in batches), key=prod)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fact = f"{rows} rows of {width} tokens, the largest of the run, don't fit: {reason}"
        raise JobError(Problem("train.micro_batch", fact, _change(job, foretold))) from error


def _change(job: Job, foretold: Forecast | None) -> str:
    """The least that helps, by the forecast; it was wrong by something, or we weren't here."""
    if foretold is None:
        return "set train.micro_batch lower, or train.gradient_checkpointing: full"
    return offer(job, foretold.shape, foretold.cluster)
