"""Every `auto`, what becomes of it, and the reason that is printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardtune.config.auto import ResolvedJob, resolve
from shardtune.config.job import Job
from shardtune.config.rules import check
from shardtune.core.files.yaml_document import dotted
from shardtune.core.host.machine import Machine
from shardtune.core.host.matmul_speed import MatmulSpeed, gpu_matmul_speed
from shardtune.errors import JobError
from tests.jobs import make_job

LAPTOP = Machine(cores=8, gpus=0)
SERVER = Machine(cores=96, gpus=4)


def reason(resolved: ResolvedJob, key: str) -> str | None:
    return resolved.reasons.get(tuple(key.split(".")))


def test_one_process_per_gpu() -> None:
    resolved = resolve(make_job(), SERVER)
    assert (resolved.job.launch.processes, resolved.job.launch.threads) == (4, 24)
    assert reason(resolved, "launch.processes") == "one per GPU, 4 found"
    assert reason(resolved, "launch.threads") == "96 cores / 4 processes"


def test_one_process_where_there_is_no_gpu() -> None:
    resolved = resolve(make_job(), LAPTOP)
    assert (resolved.job.launch.processes, resolved.job.launch.threads) == (1, 8)
    assert reason(resolved, "launch.processes") == "no GPU found: one process"


def test_activations_stay_where_there_is_no_gpu_to_leave() -> None:
    job = make_job(train={"offload_activations": True})
    here, there = resolve(job, LAPTOP), resolve(job, SERVER)
    assert not here.job.train.offload_activations
    assert reason(here, "train.offload_activations") == "no GPU was found"
    assert there.job.train.offload_activations
    assert reason(there, "train.offload_activations") is None


def test_states_are_not_paged_where_all_memory_is_one() -> None:
    job = make_job(train={"optimizer": {"type": "adamw", "paged": True}})
    one = Machine(cores=96, gpus=1)
    here, there = resolve(job, LAPTOP), resolve(job, one)
    assert not here.job.maps_states_to_host(1)
    assert reason(here, "train.optimizer.paged") == "no GPU was found"
    assert there.job.maps_states_to_host(1)
    assert not there.job.maps_states_to_host(2)


def test_more_processes_than_cores_have_a_thread_each() -> None:
    resolved = resolve(make_job(launch={"processes": 16}), LAPTOP)
    assert resolved.job.launch.threads == 1


def test_omp_num_threads_of_the_environment_counts() -> None:
    """Where our own launcher starts the ranks: torchrun sets it to 1 where nobody says more."""
    asked = replace(SERVER, omp_threads=3)
    resolved = resolve(make_job(), asked)
    assert resolved.job.launch.threads == 3
    assert reason(resolved, "launch.threads") == "OMP_NUM_THREADS of the environment"
    assert resolve(make_job(launch={"threads": 7}), asked).job.launch.threads == 7
    assert resolve(make_job(), asked, ranks=4).job.launch.threads == 24


def test_processes_started_from_outside_are_taken_as_they_are() -> None:
    for asked in ("auto", 2):
        resolved = resolve(make_job(launch={"processes": asked}), SERVER, ranks=3)
        assert (resolved.job.launch.processes, resolved.job.launch.threads) == (3, 32)
        assert reason(resolved, "launch.processes") == "3 processes were started from outside"
    agreed = resolve(make_job(launch={"processes": 3}), SERVER, ranks=3)
    assert reason(agreed, "launch.processes") is None


@pytest.mark.parametrize(
    ("length", "global_batch", "processes", "expected"),
    [
        (1024, 16, 1, 4),  # 4096 tokens
        (1024, 16, 8, 2),  # all rows of a rank
        (512, 7, 2, 3),  # 7 rows on 2 ranks: 3 and 4
        (8192, 16, 1, 1),  # longer than the budget: still one row
        (64, 2, 4, 1),  # fewer rows than ranks, which a rule refuses later
    ],
)
def test_the_micro_batch(length: int, global_batch: int, processes: int, expected: int) -> None:
    job = make_job(
        data={"sequence_length": length},
        train={"global_batch": global_batch},
        launch={"processes": processes},
    )
    resolved = resolve(job, LAPTOP)
    assert resolved.job.train.micro_batch == expected
    told = reason(resolved, "train.micro_batch")
    assert told is not None
    assert f"x {length} tokens stay within 4096" in told


@pytest.mark.parametrize(
    ("file", "expected", "told"),
    [
        ('{\n"train_micro_batch_size_per_gpu": 3}', 3, "ds.json:2"),
        (
            '{"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": "auto"}',
            4,
            "ds.json:1: global_batch(16) / (gradient_accumulation_steps(2) x ranks(2))",
        ),
        (
            '{"train_micro_batch_size_per_gpu": "auto"}',
            8,
            "a rank has 8 rows a step; 64 x 64 tokens stay within 4096",
        ),
    ],
)
def test_a_deepspeed_file_decides_the_micro_batch_that_the_job_leaves_open(
    tmp_path: Path, file: str, expected: int, told: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(file)
    sections: dict[str, Any] = {
        "strategy": {"type": "deepspeed", "config": str(path)},
        "data": {"sequence_length": 64},
        "launch": {"processes": 2},
    }
    resolved = resolve(make_job(**sections), LAPTOP)
    assert resolved.job.train.micro_batch == expected
    assert reason(resolved, "train.micro_batch") == told
    if expected == 3:
        with pytest.raises(JobError, match=r"is 3, but the job's train.micro_batch makes it 5"):
            resolve(make_job(**sections, train={"micro_batch": 5}), LAPTOP)


def test_one_pass_where_nothing_is_said() -> None:
    resolved = resolve(make_job(), LAPTOP)
    assert (resolved.job.train.steps, resolved.job.train.epochs) == (None, 1.0)
    assert reason(resolved, "train.epochs") == "neither steps nor epochs is given: one pass"
    for given in ({"steps": 3}, {"epochs": 2.0}):
        resolved = resolve(make_job(train=given), LAPTOP)
        assert resolved.job.train.model_dump(include=set(given)) == given
        assert reason(resolved, "train.epochs") is None


def test_evaluation_follows_the_checkpoints() -> None:
    resolved = resolve(make_job(save={"every": 20}), LAPTOP)
    assert resolved.job.evaluate.every == 20
    assert reason(resolved, "evaluate.every") == "as often as save.every"
    assert resolve(make_job(evaluate={"every": 3}), LAPTOP).job.evaluate.every == 3


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/code.jsonl", "code"),
        ("code", "code"),
        ("org/code-set", "code-set"),
        ("data/my code (1).jsonl", "my-code--1-"),
        ("data/.hidden.jsonl", "hidden"),
        ("データ.jsonl", "data"),
        ("/", "data"),
        ("x" * 100 + ".csv", "x" * 64),
    ],
)
def test_a_data_set_is_called_as_its_file(path: str, name: str) -> None:
    job = make_job(data={"train": [{"path": path, "format": "chat"}]})
    resolved = resolve(job, LAPTOP)
    assert resolved.job.data.train[0].name == name
    assert resolved.reasons["data", "train", 0, "name"] == "the file's name"
    again = Job.model_validate_json(resolved.job.model_dump_json())  # the name is a valid one
    assert again == resolved.job


def test_names_that_are_given_stay() -> None:
    sources = [{"path": "a.jsonl", "format": "chat", "name": "mine"}]
    resolved = resolve(make_job(data={"train": sources, "eval": sources}), LAPTOP)
    assert [source.name for source in resolved.job.data.eval] == ["mine"]
    assert not any("name" in key for key in resolved.reasons)


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(make_job(save={"every": 5}), SERVER)
    twice = resolve(once.job, LAPTOP)
    assert twice.job == once.job
    assert twice.reasons == {}


def test_the_job_itself_is_left_alone() -> None:
    job = make_job()
    resolve(job, SERVER)
    assert job == make_job()


def test_stages_get_micro_batches_enough() -> None:
    job = make_job(
        strategy={"type": "pipeline", "stages": 2},
        train={"global_batch": 64},
        data={"sequence_length": 256},
    )
    found = resolve(job, Machine(cores=2, gpus=0), ranks=4)
    assert found.job.train.micro_batch == 4  # 64 / 2 rows of a pipeline, in 4 x 2 micro-batches
    assert found.reasons["train", "micro_batch"] == (
        "32 rows a step make 8 micro-batches, so that 2 stages wait little for each other"
    )


SLOW_BF16 = MatmulSpeed(("fp32",), "bf16 is slow here")
FAST_BF16 = MatmulSpeed(("fp32", "bf16"), "bf16 is fast here")
OLD_GPU = gpu_matmul_speed("T4", bf16=False)
NEW_GPU = gpu_matmul_speed("A100", bf16=True)
NO_BF16 = "T4 is older than Ampere and has no bf16: fp16 with loss scaling"
FP8 = {"model": {"name": "tiny", "quantization": "fp8"}, "adapter": {"type": "lora"}}
T5 = {"model": {"name": "google/flan-t5-xl"}}
NF4 = {"model": {"name": "tiny", "quantization": "nf4"}, "adapter": {"type": "lora"}}


@pytest.mark.parametrize(
    ("matmul", "gpus", "sections", "expected", "told"),
    [
        (SLOW_BF16, 0, {}, "fp32", "bf16 is slow here"),
        (FAST_BF16, 0, {}, "bf16", "bf16 is fast here"),
        (OLD_GPU, 1, {}, "fp16", NO_BF16),
        (NEW_GPU, 1, {}, "bf16", "A100 is fast in bf16"),
        (None, 1, {}, "bf16", "what the device is fast in isn't known here"),
        (SLOW_BF16, 0, NF4, "fp32", "bf16 is slow here"),
        (SLOW_BF16, 0, FP8, "bf16", "matmuls with fp8 weights need bf16"),
        (OLD_GPU, 1, NF4, "fp16", NO_BF16),
        (SLOW_BF16, 0, {"strategy": {"type": "deepspeed"}}, "fp32", "bf16 is slow here"),
        (OLD_GPU, 2, {"strategy": {"type": "tensor", "degree": 2}}, "fp32",
         f"{NO_BF16}, which strategy tensor doesn't take"),
        (OLD_GPU, 1, T5, "fp32", f"{NO_BF16}, in which published T5 weights overflow"),
        (NEW_GPU, 1, T5, "bf16", "A100 is fast in bf16"),
    ],
)  # fmt: skip
def test_the_precision_is_what_the_device_is_fast_in(
    matmul: MatmulSpeed | None, gpus: int, sections: dict[str, Any], expected: str, told: str
) -> None:
    machine = Machine(cores=2, gpus=gpus, matmul=matmul)
    found = resolve(make_job(**sections), machine)
    assert found.job.train.precision == expected
    assert reason(found, "train.precision") == told
    for given in ("bf16", "fp32", "fp16"):  # what the job says is obeyed, fast or not
        found = resolve(make_job(**sections, train={"precision": given}), machine)
        assert found.job.train.precision == given
        assert reason(found, "train.precision") is None


def test_a_run_that_goes_on_keeps_its_precision() -> None:
    begun = resolve(make_job(), Machine(cores=2, gpus=0, matmul=FAST_BF16)).job
    elsewhere = Machine(cores=2, gpus=0, matmul=SLOW_BF16)
    found = resolve(make_job(), elsewhere, begun=begun)
    assert found.job.train.precision == "bf16"
    assert reason(found, "train.precision") == "as the run was begun"
    told = resolve(make_job(train={"precision": "fp32"}), elsewhere, begun=begun)
    assert told.job.train.precision == "fp32"  # which a guard refuses, naming both


def test_states_are_not_paged_without_a_gpu_whatever_the_precision() -> None:
    job = make_job(train={"optimizer": {"type": "adamw", "paged": True}})
    found = resolve(job, Machine(cores=2, gpus=0, matmul=SLOW_BF16))
    assert reason(found, "train.optimizer.paged") == "no GPU was found"
    check(found.job, dotted)
