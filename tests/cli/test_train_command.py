"""What a job becomes before a run is started or goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_resumable
from shardtune.cli.resolve_job import resolve_here
from shardtune.cli.start.local_ranks import restart_policy
from shardtune.config.auto import ResolvedJob
from shardtune.config.job import Job
from shardtune.config.job_file import load_job
from shardtune.core.files.yaml_document import dump_document
from shardtune.core.host.machine import Machine
from shardtune.core.host.matmul_speed import FAST_PRECISIONS
from shardtune.errors import JobError, RunError
from shardtune.launch.restart_policy import RestartPolicy
from shardtune.plan.this_machine import forecast_here
from tests.jobs import ENVIRONMENT, write_job
from tests.plan.test_this_machine import write_config
from tests.reports import step_line

GPU = Machine(cores=16, gpus=1, gpu_name="NVIDIA H200", memory=1 << 38)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """LoRA on an 8 B model, 16 rows of 1,024 tokens a step, on a machine with one GPU."""
    monkeypatch.setattr(Machine, "here", lambda: GPU)
    monkeypatch.delenv(FAST_PRECISIONS, raising=False)
    folder = write_config(tmp_path / "model", "meta-llama/Llama-3.1-8B")
    return write_job(
        tmp_path,
        model=f"{{name: {folder}}}",
        adapter="{type: lora}",
        data="{train: [{path: good.jsonl, format: completion}], sequence_length: 1024}",
        train="{steps: 2, global_batch: 16}",
        save=f"{{directory: {tmp_path / 'run'}}}",
    )


def read(job: Path, *overrides: str, resume: bool = False, anew: bool = False) -> ResolvedJob:
    return resolve_here(load_job(job, overrides), resume=resume, restart_schedule=anew)


def policy(job: Path, *overrides: str, resume: bool = False) -> RestartPolicy:
    """How a run is started again."""
    asked, chosen = load_job(job, overrides).job, read(job, *overrides, resume=resume).job
    return restart_policy(asked, chosen, forecast_here(chosen, GPU), resume=resume)


def begin(resolved: ResolvedJob, rows: int) -> None:
    """Leaves a run that was begun with so many rows at once."""
    document = resolved.job.model_dump(mode="json")
    document["train"]["micro_batch"] = rows
    run = RunDir(Path(resolved.job.save.directory))
    run.path.mkdir()
    run.job.write_text(dump_document(document), encoding="utf-8")
    (run.path / "environment.json").write_text(ENVIRONMENT, encoding="utf-8")


def test_a_run_goes_on_with_the_rows_that_it_was_begun_with(job: Path) -> None:
    fresh = read(job)
    assert fresh.job.train.micro_batch == 16
    assert "tokens take" in fresh.reasons["train", "micro_batch"]
    begin(fresh, rows=3)
    again = read(job, resume=True)
    assert again.job.train.micro_batch == 3
    assert again.reasons["train", "micro_batch"] == "as the run was begun"
    assert read(job).job.train.micro_batch == 16  # another run
    assert read(job, "train.micro_batch=2", resume=True).job.train.micro_batch == 2


def test_on_other_ranks_rows_are_chosen_again(job: Path) -> None:
    begin(read(job, "launch.processes=2", "strategy.type=fsdp"), rows=3)
    assert read(job, resume=True).job.train.micro_batch == 16


def test_only_rows_that_we_chose_are_halved_unasked(job: Path) -> None:
    asked = "train.on_oom=reduce_micro_batch"
    found = [
        policy(job, *overrides)
        for overrides in ([], [asked], ["train.micro_batch=8"], ["train.micro_batch=8", asked])
    ]
    assert [(each.halvings, each.halvings_at_start) for each in found] == [
        (0, 4), (4, 4), (0, 0), (3, 0),
    ]  # fmt: skip
    assert policy(job, resume=True).halvings_at_start == 0  # steps have been taken with it


def test_rows_that_do_not_fit_any_more_are_chosen_again(job: Path) -> None:
    begin(read(job), rows=16)
    assert read(job, resume=True).job.train.micro_batch == 16
    less = read(job, "train.memory_gib=40", resume=True)
    assert less.job.train.micro_batch == 4
    assert "tokens take" in less.reasons["train", "micro_batch"]


# A run that is extended --------------------------------------------------------------------------


def extend(job: Path, *overrides: str, anew: bool = False) -> Job:
    """What `--resume` goes on with, if it may; the run then has its length."""
    found = read(job, *overrides, resume=True, anew=anew).job
    run = RunDir(Path(found.save.directory))
    require_resumable(run, found)
    before = run.read_job()
    assert before is not None
    run.extend(before, found)
    return found


def reach(resolved: Job, step: int) -> None:
    """Leaves a checkpoint after so many steps, and a later one of another run."""
    run = RunDir(Path(resolved.save.directory))
    for number, whose in ((step, run.run_id()), (step + 100, "another")):
        folder = run.checkpoints / f"step-{number:06}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(f'{{"run":"{whose}"}}', encoding="utf-8")


def test_a_schedule_that_began_anew_goes_on_after_an_interruption(job: Path) -> None:
    longer = ("train.steps=48", "train.micro_batch=4")
    begin(read(job, "train.steps=12"), rows=4)
    reach(read(job).job, 12)
    assert extend(job, *longer, anew=True).train.schedule_start == 12
    reach(read(job).job, 30)  # and there it was preempted
    assert extend(job, *longer, anew=True).train.schedule_start == 12, "the same command again"
    assert extend(job, *longer).train.schedule_start == 12, "a plain --resume"
    again = read(job, *longer, resume=True)
    assert again.reasons["train", "schedule_start"] == "as the run went on"
    assert extend(job, "train.steps=96", *longer[1:], anew=True).train.schedule_start == 30
    with pytest.raises(
        RunError, match=r"train.schedule_start: is 7, but the run was begun with 30"
    ):
        extend(job, "train.steps=96", "train.schedule_start=7")


@pytest.mark.parametrize(
    ("length", "fact", "fix"),
    [
        ("train.steps=12", "the run has 12 steps already", "(train.steps=24)"),
        ("train.epochs=1.5", "the run has 1.5 epochs already", "(train.epochs=3)"),
    ],
)
def test_a_schedule_begins_anew_in_another_length_only(
    job: Path, length: str, fact: str, fix: str
) -> None:
    begin(read(job, length), rows=4)
    reach(read(job).job, 6)
    with pytest.raises(JobError, match=f"--restart-schedule: {fact}") as caught:
        read(job, length, resume=True, anew=True)
    assert fix in caught.value.problems[0].fix
    assert read(job, fix.strip("()"), resume=True, anew=True).job.train.schedule_start == 6


@pytest.mark.parametrize(("behind", "ends"), [(0.98, ()), (1.0, (1.0,))])
def test_the_end_that_a_run_had_come_to_is_kept(
    job: Path, behind: float, ends: tuple[float, ...]
) -> None:
    once = read(job, "train.epochs=1.0")
    begin(once, rows=4)
    run = RunDir(Path(once.job.save.directory))
    run.jsonl.log(step_line(7, epoch=behind))
    for length in ("train.epochs=2.0", "train.epochs=2.0", "train.steps=40", "train.epochs=3.0"):
        assert extend(job, length, "train.micro_batch=4").train.earlier_ends == ends
