"""Guards of a run directory: what is refused before a run is begun, resumed or verified in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardtune.checkpoint.commit_by_rename import checkpoints, run_of
from shardtune.checkpoint.extension import is_extended
from shardtune.checkpoint.manifest import Damaged
from shardtune.checkpoint.near_names import near_folder
from shardtune.checkpoint.overwrite import is_unsettled, require_only_ours
from shardtune.checkpoint.run_dir import OWN_FOLDER, RunDir, holds
from shardtune.checkpoint.run_marker import MARKER_FILE, RUN_FILES, RUN_FOLDERS
from shardtune.checkpoint.seal import files_of, folder_faults
from shardtune.config.job import Job
from shardtune.config.job_file import leaves
from shardtune.core.files.yaml_document import dotted
from shardtune.errors import Problem, RunError

# What a resumed run may change: none of these alters what is computed.
_FREE = {
    *(("train", key) for key in ("micro_batch", "gradient_checkpointing", "keep_layers")),
    *(("train", key) for key in ("memory_gib", "log_every", "preflight", "offload_activations")),
    ("train", "optimizer", "paged"),
    ("train", "early_stop", "patience"),
    ("data", "workers"),
}
_WATCHED = (("train", "early_stop"), ("save", "best"))
"""What decides by its own history: one that goes on by another metric would mix two."""


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


def require_plain(run: RunDir, place: str) -> None:
    """Our files have to be files, and our folders folders: through a link we would write to what
    isn't ours, and for a named pipe we would wait. Only folders may be links, to another disk."""
    files = [run.path / name for name in (MARKER_FILE, *RUN_FILES)]
    folders = [run.path / name for name in RUN_FOLDERS]
    odd = [path for path in files if path.is_symlink() or (path.exists() and not path.is_file())]
    odd += [path for path in folders if path.exists() and not path.is_dir()]
    gone = [path for path in folders if path.is_symlink() and not path.exists()]
    problems = [Problem(place, f"{path} is no file of ours", "move it elsewhere") for path in odd]
    problems += [
        Problem(place, f"{path} leads to {path.readlink()}, which isn't there", "mount that disk")
        for path in gone
    ]
    if problems:
        raise RunError(problems)


def require_safe_place(run: RunDir, job: Job, place: str) -> None:
    """A run isn't begun where a mistake would be dear, even if it is empty."""
    folder, home = run.path.resolve(), Path.home().resolve()
    what = {Path(folder.anchor): "the root of all files", home: "your home directory"}.get(folder)
    if (folder / ".git").exists():
        what = "the root of a repository"
    for source in (*job.data.train, *job.data.eval_sources):
        data = Path(source.path).expanduser().resolve()
        if folder == (data if data.is_dir() else data.parent) and data.exists():
            what = f"the folder of the data ({source.path})"
    if what is not None:
        fix = "set save.directory to a folder of its own, such as runs/mine"
        raise RunError(Problem(place, f"{run.path} is {what}", fix))


def require_unoccupied(run: RunDir, place: str) -> None:
    """A run is begun in a folder that is absent, empty, or ours and without a run. None is ever
    overwritten by accident."""
    require_folder(run, place)
    marker = run.marker()
    if marker is None and (foreign := run.foreign_names()):
        raise RunError(Problem(place, f"{run.path} {holds(foreign)}", OWN_FOLDER))
    if marker is not None and marker.begun:
        raise RunError(
            Problem(
                place,
                f"{run.path} holds a run already",
                "go on with it (--resume), replace it (--overwrite), or set save.directory",
            )
        )


def require_overwritable(run: RunDir, place: str) -> None:
    """What is overwritten is a run of ours, and nothing else lies in it."""
    require_folder(run, place)
    if run.marker() is None and (foreign := run.foreign_names()):
        raise RunError(Problem(place, f"{run.path} {holds(foreign)}", OWN_FOLDER))
    require_only_ours(run)


def require_resumable(run: RunDir, job: Job) -> None:
    """A run goes on with its own job, and only where something is left to do."""
    require_same_job(run, job)
    require_unfinished(run, job)
    require_in_sight(run)


def require_in_sight(run: RunDir) -> None:
    """A run that has had a checkpoint doesn't start over because none is in sight: its disk may not
    be mounted. One whose run can't be read is looked at later."""
    marker = run.marker()
    there = [run_of(path) for _, path in checkpoints(run.checkpoints)]
    if marker is None or not marker.saved or {marker.run, None} & set(there):
        return
    where = "holds only those of other runs" if there else "is empty or not there"
    fact = f"the run has saved checkpoints, but {run.checkpoints.name}/ {where}"
    fix = "mount or put them back, then --resume; if they are lost, begin another run in a "
    fix += "directory of its own"
    raise RunError(Problem(str(run.checkpoints), fact, fix))


def require_same_job(run: RunDir, job: Job) -> None:
    """A run is resumed as it was begun: what changes the mathematics may not differ."""
    require_run(run)
    before_job = run.read_job()
    assert before_job is not None
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
        and (key[0] in ("model", "adapter", "data", "train") or key[:2] in _WATCHED)
        and key not in free
        and not (key[:2] in _WATCHED and before.get(key[:2], "") is None)  # it may begin late
    ]
    if problems:
        raise RunError(problems)


def require_same_data(
    run: RunDir, digests: Mapping[str, str], others: Mapping[str, tuple[str, ...]] | None = None
) -> None:
    """The same names in the job don't make the same rows in the files. `others` are digests that
    other versions noted of the same rows."""
    marker = run.marker()
    before = {} if marker is None else marker.data
    known = {name: (digest, *(others or {}).get(name, ())) for name, digest in digests.items()}
    changed = sorted(name for name in before if before[name] not in known.get(name, ()))
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
    patience = wanted.early_stop.patience if wanted.early_stop is not None else 0
    if report.early_stop is not None and patience > report.early_stop.waited:
        return
    longer = is_extended(begun, job) and report.early_stop is None
    if longer and wanted.steps is not None:
        longer = wanted.steps > done
    elif longer and wanted.epochs is not None and begun.train.epochs is not None:
        longer = wanted.epochs > begun.train.epochs
    if not longer and not result_fault(run):
        fact = f"the run is finished: {done} steps, result in result/"
        more = f"train.steps={2 * done}"
        if report.early_stop is not None:
            fact = f"{fact}; it was stopped early, after {report.early_stop.waited} evaluations"
            more = f"train.early_stop.patience={2 * report.early_stop.waited}"
        fix = (
            f"extend it (--resume {more}), replace it (--overwrite), or set "
            "save.directory for another run"
        )
        raise RunError(Problem(str(run.path), fact, fix))


def result_fault(run: RunDir) -> str:
    """What is wrong with the result, if anything is; every byte is read."""
    if not run.result.is_dir():
        return "is missing"
    try:
        return next(folder_faults(run.result, files_of(run.result)), "")
    except Damaged as error:
        return str(error)


def notes_on(run: RunDir) -> list[str]:
    """What a resumed run will do without: files for people that can't be read."""
    notes = [
        f"{run.path / name}: {count} {'line' if count == 1 else 'lines'} can't be read, left out"
        for name, count in run.jsonl.unreadable().items()
    ]
    report, found = run.path / "report.json", run.read_report()
    if found is None and report.exists():
        notes.append(f"{report} can't be read; the run's end writes it again")
    elif found is not None and found.finished and (why := result_fault(run)):
        notes.append(f"{run.result} {why}; it is written again from the last checkpoint")
    return notes


def require_run(run: RunDir) -> None:
    """Refuses a folder that no run was written to."""
    if run.job.is_file():
        return
    near = near_folder(run.path)
    meant = f"did you mean {near}?" if near else "name the `save.directory` of a run"
    fact, fix = "is no run directory: no job.yaml in it", meant
    if not run.path.exists():
        fact = "is no run directory: no such folder"
    elif is_unsettled(run):
        fact = "holds a run that was being overwritten when that was cut short"
        fix = "the next `shardtune train` in this directory puts it back"
    elif (marker := run.marker()) is not None:
        fact = f"holds the run {marker.run}, but not its job.yaml"
        fix = "put it back" if marker.begun else "begin it: it came to no first step"
    raise RunError(Problem(str(run.path), fact, fix))


def require_run_id(run: RunDir) -> str:
    if (found := run.run_id()) is None:
        fact = f"neither {MARKER_FILE} nor environment.json can be read: which run this is, and so "
        fact += "whose checkpoints these are, is unknown"
        fix = "put one of them back, or begin another run in a directory of its own"
        raise RunError(Problem(str(run.path), fact, fix))
    return found
