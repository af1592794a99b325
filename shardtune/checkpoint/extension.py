"""Extending a run: what a job takes from the one in its run directory when the run goes on."""

from __future__ import annotations

from dataclasses import replace

from shardtune.checkpoint.commit_by_rename import own_checkpoints
from shardtune.checkpoint.run_dir import RunDir, with_control_tokens
from shardtune.config.auto import ResolvedJob
from shardtune.config.job import Job, TrainSection
from shardtune.errors import JobError, Problem

_ROUNDING = 1e-9  # of a sum of epochs, which are less than a row apart


def is_extended(begun: Job, job: Job) -> bool:
    """Whether `job` is a longer run than the one that was begun, or a shorter one."""
    return (begun.train.steps, begun.train.epochs) != (job.train.steps, job.train.epochs)


def has_more_patience(begun: Job, job: Job) -> bool:
    """Whether `job` waits longer for an improvement than the run that was begun."""
    before, now = begun.train.early_stop, job.train.early_stop
    return before is not None and now is not None and now.patience > before.patience


def length(train: TrainSection) -> str:
    """How long a run is, in the job's own measure."""
    return f"{train.steps} steps" if train.steps else f"{train.epochs:g} epochs"


def continued(resolved: ResolvedJob, run: RunDir, *, restart_schedule: bool = False) -> ResolvedJob:
    """The job that a resumed run goes on with: its schedule and its rows keep their place, however
    often the run is interrupted. With `restart_schedule` a run of another length begins its
    schedule after the newest checkpoint."""
    begun, job = run.read_job(), resolved.job
    if begun is None:  # a guard says so
        return resolved
    start = _schedule_start(begun, job, run, restart_schedule)
    ends = _earlier_ends(begun, job, run)
    train = job.train.model_copy(update={"schedule_start": start, "earlier_ends": ends})
    reasons = dict(resolved.reasons)
    if job.data.control_tokens == "refuse" and run.lacks_control_tokens():
        job = with_control_tokens(job)
        reasons["data", "control_tokens"] = "as the run was begun, before there was a choice"
    if start and start == begun.train.schedule_start:
        reasons["train", "schedule_start"] = "as the run went on"
    return replace(resolved, job=job.model_copy(update={"train": train}), reasons=reasons)


def _schedule_start(begun: Job, job: Job, run: RunDir, restart: bool) -> int:
    before, train = begun.train.schedule_start, job.train
    if restart and is_extended(begun, job):
        own = own_checkpoints(run.checkpoints, run.run_id() or "")
        return max((step for step, _ in own), default=0)
    if restart and not before:
        fact = f"the run has {length(begun.train)} already, and its schedule is that of all of them"
        fix = f"give it another length as well ({_doubled(begun.train)}), or leave the flag out"
        raise JobError(Problem("--restart-schedule", fact, fix))
    if not restart:
        said = "schedule_start" in train.model_fields_set  # a guard compares it
        too_short = train.steps is not None and train.steps <= before
        if said or too_short:
            return train.schedule_start
    return before


def _earlier_ends(begun: Job, job: Job, run: RunDir) -> tuple[float, ...]:
    """With the end that the run has come to, where it is counted in epochs: only there may a step
    have been short."""
    before, end = begun.train.earlier_ends, begun.train.epochs
    if not is_extended(begun, job) or end is None or run.jsonl.epochs() < end - _ROUNDING:
        return before
    return (*before, end)


def _doubled(train: TrainSection) -> str:
    if train.steps is not None:
        return f"train.steps={2 * train.steps}"
    return f"train.epochs={2 * (train.epochs or 1.0):g}"
