"""What a job becomes before a run is started or goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.checkpoint.run_dir import RunDir
from shardtune.cli.train_command import _policy, resolve_here
from shardtune.config.auto import ResolvedJob
from shardtune.config.job_file import load_job
from shardtune.core.machine import Machine
from shardtune.core.matmul_speed import FAST_PRECISIONS
from shardtune.core.yaml_document import dump_document
from shardtune.launch.restart_policy import RestartPolicy
from shardtune.plan.this_machine import forecast_here
from tests.jobs import write_job
from tests.plan.test_this_machine import write_config

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


def read(job: Path, *overrides: str, resume: bool = False) -> ResolvedJob:
    return resolve_here(load_job(job, overrides), resume=resume)


def policy(job: Path, *overrides: str, resume: bool = False) -> RestartPolicy:
    """How a run is started again."""
    asked, chosen = load_job(job, overrides).job, read(job, *overrides, resume=resume).job
    return _policy(asked, chosen, forecast_here(chosen, GPU), resume=resume)


def begin(resolved: ResolvedJob, rows: int) -> None:
    """Leaves a run that was begun with so many rows at once."""
    document = resolved.job.model_dump(mode="json")
    document["train"]["micro_batch"] = rows
    run = RunDir(Path(resolved.job.save.directory))
    run.path.mkdir()
    run.job.write_text(dump_document(document), encoding="utf-8")


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
