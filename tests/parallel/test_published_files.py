"""DeepSpeed files in the shapes in which they are published: each trains two steps on two ranks as
it is, or what the machine lacks is named before any rank starts.

The shapes are those of Hugging Face's DeepSpeed guide (`auto`) and of DeepSpeed's own documentation
(numbers). All files that can run share one group of ranks.
"""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardtune.cli.resolve_job import resolve_here
from shardtune.config.job import Job
from shardtune.config.job_file import load_job
from shardtune.core.world import World
from shardtune.errors import JobError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel.deepspeed.limits import fp16_on_this_cpu
from shardtune.training.engine_setup import make_plan
from tests import async_io
from tests.jobs import write_job
from tests.parallel.test_deepspeed_engine import batches
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs shardtune[deepspeed]")

STEPS = 2
SCALING = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": {"enabled": True, **SCALING}},
    "fp16-auto": {"fp16": {"enabled": "auto", **SCALING}},
    "bf16-auto": {"bf16": {"enabled": "auto"}},
}
CPU = {"device": "cpu", "pin_memory": True}
ZERO: dict[int, dict[str, Any]] = {
    1: {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 5e8},
    2: {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    3: {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
OFFLOADS = {"none": (1, 2, 3), "cpu": (1, 2, 3), "nvme": (3,)}
"""Which stages can; DeepSpeed's documentation has files of stage 3 only."""
AUTO = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
NUMBERS = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
    },
    "zero_optimization": {
        "stage": 2,
        "cpu_offload": False,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_scatter": False,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
        "load_from_fp32_weights": True,
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "first"},
    "wall_clock_breakdown": False,
}  # fmt: skip


def published(stage: int, precision: str, offload: str, folder: Path) -> dict[str, Any]:
    """A file of Hugging Face's guide."""
    zero = dict(ZERO[stage])
    if offload == "cpu":
        zero["offload_optimizer"] = CPU
        if stage == 3:
            zero["offload_param"] = CPU
    if offload == "nvme":
        path = str(folder / "local_nvme")
        zero["offload_optimizer"] = {
            "device": "nvme", "nvme_path": path, "pin_memory": True, "buffer_count": 4,
            "fast_init": False,
        }  # fmt: skip
    aio = {
        "block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
        "overlap_events": True,
    }  # fmt: skip
    blocks = {"aio": aio} if offload == "nvme" else {}
    return {**PRECISIONS[precision], **AUTO, "zero_optimization": zero, **blocks}


def files(folder: Path) -> dict[str, dict[str, Any]]:
    found = {
        f"zero{stage}-{precision}-{offload}": published(stage, precision, offload, folder)
        for offload, stages in OFFLOADS.items()
        for stage in stages
        for precision in PRECISIONS
    }
    for stage in (1, 3):  # cheap beside the group that is there anyway
        found[f"zero{stage}-numbers"] = {
            **NUMBERS,
            "zero_optimization": {**NUMBERS["zero_optimization"], "stage": stage},  # type: ignore[dict-item]
        }
    return {**found, "zero2-numbers": NUMBERS}


FEW = ("zero1-fp16-none", "zero2-fp16-auto-cpu", "zero3-bf16-auto-none", "zero2-numbers")
"""Those of every `make test`: each stage and each precision once."""


def resolved(folder: Path, name: str, content: dict[str, Any]) -> Job | JobError:
    """The job as `train` would hand it to its ranks, or why it doesn't. It says nothing that a file
    might say."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(content, indent=2))
    path = write_job(
        folder,
        train=f"{{steps: {STEPS}, schedule: constant}}",
        launch="{processes: 2}",
        strategy=f"{{type: deepspeed, config: {file}}}",
        data="{train: [{path: good.jsonl, format: completion}], sequence_length: 16}",
        save=f"{{directory: {folder / 'run'}}}",
    )
    try:
        return resolve_here(load_job(path), runs_here=True).job
    except JobError as error:
        return error


def train(world: World, jobs: dict[str, str]) -> dict[str, list[float]]:
    """The losses of each job, one job after another in the same processes."""
    found = {}
    for name, text in jobs.items():
        job = Job.model_validate_json(text)
        plan = make_plan(job, world.size, STEPS)
        builder = PretrainedModelBuilder(ModelFiles(job.model), job.adapter, job.train)
        with job.strategy.build(builder, plan.setup, world) as engine:
            results = [engine.step(batches(n, world.size)[world.rank]) for n in range(STEPS)]
            assert engine.engine.zero_optimization_stage() == int(name[len("zero")])  # type: ignore[attr-defined]
            found[name] = [result.loss for result in results]
    return found


def run(folder: Path, names: list[str]) -> None:
    contents = files(folder)
    jobs: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in names:
        job = resolved(folder, name, contents[name])
        if isinstance(job, JobError):
            refused[name] = str(job)
        else:
            jobs[name] = job.model_dump_json()
    for name, words in refused.items():
        assert contents[name]["fp16"]["enabled"] is True, words
        assert not fp16_on_this_cpu()
        assert "train.precision: DeepSpeed computes in fp16 only on CPUs with" in words
        assert words.count("fix:") == 1
    assert len(jobs) >= len(names) / 2
    one, other = on_ranks(2, train, jobs, timeout=600)
    assert one == other
    assert one.keys() == jobs.keys()
    for losses in one.values():
        assert all(map(math.isfinite, losses))
        # bf16 where the machine is fast in it; else all of them are the same numbers.
        assert losses == pytest.approx(next(iter(one.values())), rel=1e-2)


def test_published_files_train_or_name_what_is_missing(tmp_path: Path) -> None:
    run(tmp_path, list(FEW))


@pytest.mark.long
def test_every_published_file_trains_or_names_what_is_missing(tmp_path: Path) -> None:
    without_files = bool(async_io.missing())
    run(tmp_path, [name for name in files(tmp_path) if not ("nvme" in name and without_files)])


def test_without_libaio_a_file_with_nvme_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardtune.parallel.deepspeed.limits.find_library", lambda name: None)
    name = "zero3-bf16-auto-nvme"
    told = str(resolved(tmp_path, name, files(tmp_path)[name]))
    assert "nvme needs libaio, which this machine doesn't have" in told
