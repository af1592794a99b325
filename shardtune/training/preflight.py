"""The first minute of a run: what it will come to in its hours is tried before its first step.

The largest micro-batch, an evaluation and a save. None of it leaves a trace in what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile

import torch

from shardtune.core.files.atomic_write import DISK_FULL
from shardtune.data.loader import Loader
from shardtune.errors import Problem, RunError
from shardtune.training.health import explain_oom
from shardtune.training.run import Run

WRITTEN = 1 << 20  # bytes that show whether a folder can be written to


def preflight(run: Run, data: Loader) -> None:
    """Raises what the run would raise later: want of memory, a disk that can't be written to.

    Whether the disk has room for all checkpoints is looked at when the run begins.
    """
    job, world = run.job, run.world
    if not job.train.preflight:
        return
    if world.is_main:
        require_writable(run.files.path)
    largest = data.largest()
    with (
        randomness_kept(world.device),
        explain_oom(world, "in the preflight, before the first step", largest, job.train),
    ):
        run.engine.preflight(largest)
        for each in run.evaluator.sets:
            run.engine.evaluate(each.name, islice(data.evaluation(each.name), 1))
    rows, width = largest[0].input_ids.shape
    run.view.say(
        f"preflight: {rows} row{'s' * (rows > 1)} of {width} tokens, an evaluation, the disk"
    )


def require_writable(folder: Path) -> None:
    """RunError if a file can't be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(WRITTEN))
            file.flush()
    except OSError as error:
        fact = f"{folder} can't be written to: {error.strerror}"
        fix = "set it to a folder of yours"
        if error.errno in DISK_FULL:
            fix = "make room there, or set it to a folder on a larger disk"
        raise RunError(Problem("save.directory", fact, fix)) from None


@contextmanager
def randomness_kept(device: str) -> Iterator[None]:
    """Whatever draws random numbers inside, those after it are as if it had not."""
    devices = [torch.device(device)] if device != "cpu" else []
    with torch.random.fork_rng(devices):
        yield
