"""Guards of a run directory: what is refused before a run is begun, resumed or verified in it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shardtune.checkpoint.extension import is_extended
from shardtune.checkpoint.run_dir import RUN_FOLDERS, RunDir
from shardtune.config.job import Job
from shardtune.config.job_file import leaves, load_job
from shardtune.core.yaml_document import dotted
from shardtune.errors import Problem, RunError

# What a resumed run may change: none of these alters what is computed.
_FREE = {
    *(("train", key) for key in ("micro_batch", "gradient_checkpointing", "keep_layers")),
    *(("train", key) for key in ("memory_gib", "log_every", "preflight", "offload_activations")),
    ("train", "optimizer", "paged"),
    ("data", "workers"),
}


# What may change with the length of a run. A shorter try may have had less warmup.
_LENGTH = {
    *(("train", key) for key in ("steps", "epochs", "earlier_ends")),
    *(("train", key) for key in ("schedule_start", "warmup_steps", "warmup_ratio")),
}


def require_folder(run: RunDir, place: str) -> None:
    """A run needs a folder."""
    there = next(path for path in (run.path, *run.path.parents) if path.exists())
    if not there.is_dir():
        fact = f"{there} is a file"
        raise RunError(Problem(place, fact, "name a folder, or one that doesn't exist yet"))


def require_unoccupied(run: RunDir, place: str) -> None:
    """A run is never overwritten by accident."""
    require_folder(run, place)
    foreign = [name for name in RUN_FOLDERS if (run.path / name).exists()]
    if foreign and not run.job.exists() and foreign != ["logs"]:
        fact = f"{run.path} has {', '.join(foreign)}, which no run of ours wrote"
        raise RunError(Problem(place, fact, "set save.directory to a folder of its own"))
    if run.job.exists():
        raise RunError(
            Problem(
                place,
                f"{run.path} holds a run already",
                "go on with it (--resume), replace it (--overwrite), or set save.directory",
            )
        )


def require_resumable(run: RunDir, job: Job) -> None:
    """A run goes on with its own job, and only where something is left to do."""
    require_same_job(run, job)
    require_unfinished(run, job)


def require_same_job(run: RunDir, job: Job) -> None:
    """A run is resumed as it was begun: what changes the mathematics may not differ."""
    require_run(run)
    before_job = load_job(run.job).job
    before = dict(leaves(before_job.model_dump(mode="json")))
    now = dict(leaves(job.model_dump(mode="json")))
    # Dropout draws its numbers by micro-batch.
    free = _FREE - ({("train", "micro_batch")} if now.get(("adapter", "dropout")) else set())
    if is_extended(before_job, job):
        free |= _LENGTH
    problems = [
        Problem(
            dotted(key),
            f"is {now.get(key)!r}, but the run was begun with {before.get(key)!r}",
            "set it back, or begin another run in a directory of its own",
        )
        for key in sorted(before.keys() | now.keys(), key=dotted)
        if before.get(key) != now.get(key)
        and key[0] in ("model", "adapter", "data", "train")
        and key not in free
    ]
    if problems:
        raise RunError(problems)


def require_same_data(run: RunDir, digests: Mapping[str, str]) -> None:
    """The same names in the job don't make the same rows in the files."""
    text = (run.path / "environment.json").read_text(encoding="utf-8")
    before: dict[str, str] = json.loads(text).get("data", {})
    changed = sorted(name for name in before if before[name] != digests.get(name))
    if changed:
        fact = f"{', '.join(changed)}: the rows are others than those the run was begun with"
        fix = "put the old files back, or begin another run in a directory of its own"
        raise RunError(Problem("data", fact, fix))


def require_unfinished(run: RunDir, job: Job) -> None:
    """A run that came to its end has nothing left to do, unless `job` makes it longer."""
    report, begun = run.read_report(), run.read_job()
    if report is None or not report.finished or begun is None:
        return
    done, wanted = report.training.step, job.train
    longer = is_extended(begun, job)
    if longer and wanted.steps is not None:
        longer = wanted.steps > done
    elif longer and wanted.epochs is not None and begun.train.epochs is not None:
        longer = wanted.epochs > begun.train.epochs
    if not longer:
        fact = f"the run is finished: {done} steps, result in result/"
        fix = (
            f"extend it (--resume train.steps={2 * done}), replace it (--overwrite), or set "
            "save.directory for another run"
        )
        raise RunError(Problem(str(run.path), fact, fix))


def require_run(run: RunDir) -> None:
    """Refuses a folder that no run was written to."""
    if not run.job.is_file():
        fix = "name the `save.directory` of a run"
        raise RunError(Problem(str(run.path), "is no run directory: no job.yaml in it", fix))


def require_run_id(run: RunDir) -> str:
    if (found := run.run_id()) is None:
        fact = "environment.json can't be read: whose checkpoints these are is unknown"
        raise RunError(Problem(str(run.path), fact, "put it back, or begin again"))
    return found
