"""`gradient_checkpointing: auto`: the least recomputation that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.budget import at_level, has_room, least, levels_of
from shardtune.core.cluster import parse_cluster
from shardtune.core.known_models import known_model
from shardtune.core.machine import Machine
from shardtune.errors import JobError
from shardtune.fit import planned, require_fit
from shardtune.forecast import GIB, Forecast, forecast
from shardtune.job import Job, TrainSection
from shardtune.resolve import resolve
from tests.jobs import make_job
from tests.test_fit import write_config

NAME = "meta-llama/Llama-3.1-8B"
SHAPE, H200 = known_model(NAME), parse_cluster("1xH200")
MACHINE = Machine(cores=16, gpus=1, gpu_name="NVIDIA H200", memory=1 << 38)


def job(**train: Any) -> Job:
    """LoRA on 8 x 2048 tokens: 67 GiB if nothing is computed again, 25 if all is."""
    settings = {"micro_batch": 8, "global_batch": 8, "steps": 10, "kernels": "compiled"}
    document = {
        "model": {"name": NAME},
        "adapter": {"type": "lora"},
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": 2048},
        "train": settings | {"loss": "fused", "gradient_checkpointing": "auto"} | train,
        "launch": {"processes": 1},
    }
    return Job.model_validate_json(json.dumps(document))


def chosen(memory_gib: float | None) -> Forecast:
    return least(job(memory_gib=memory_gib), SHAPE, H200)


def test_nothing_is_computed_again_where_all_fits() -> None:
    assert chosen(None).job.train.gradient_checkpointing == "none"
    assert chosen(None).job.train.keep_layers == 0


@pytest.mark.parametrize("memory_gib", [30, 36, 44, 50, 60])
def test_memory_that_is_left_buys_time(memory_gib: float) -> None:
    found = chosen(memory_gib)
    train = found.job.train
    assert train.gradient_checkpointing in ("mlp", "most")
    assert found.fits
    assert found.memory.required < memory_gib * GIB
    more = at_level(found.job, train.recompute, train.keep_layers + 1)
    assert not has_room(forecast(more, SHAPE, H200))


def test_less_memory_never_makes_it_faster() -> None:
    found = [chosen(gib) for gib in (22, 26, 30, 36, 44, 50, 60, 80)]
    times = [each.speed.step.total for each in found]
    assert times == sorted(times, reverse=True)
    assert [each.job.train.gradient_checkpointing for each in found][-1] == "none"


def test_the_leanest_is_taken_where_nothing_fits() -> None:
    found = chosen(10)
    assert not found.fits
    assert found.job.train.gradient_checkpointing == "full"
    with pytest.raises(JobError, match=r"there are 10\.0 \(train\.memory_gib\)"):
        require_fit(found)


def test_activations_wait_elsewhere_only_where_that_is_asked_for() -> None:
    assert not chosen(30).job.train.offload_activations
    found = least(job(memory_gib=24, offload_activations=True), SHAPE, H200)
    assert found.fits
    assert found.job.train.offload_activations


def test_engines_that_work_inside_layers_know_all_or_nothing() -> None:
    assert levels_of(job(), 1) == ("none", "mlp", "most", "full")
    sliced = job().model_copy(
        update={"strategy": make_job(strategy={"type": "tensor", "degree": 2}).strategy}
    )
    assert levels_of(sliced, 2) == ("none", "full")


def test_the_reason_names_the_numbers(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", NAME)
    train = {"gradient_checkpointing": "auto", "memory_gib": 44, "micro_batch": 8}
    given = make_job(
        model={"name": str(folder)},
        adapter={"type": "lora"},
        data={"sequence_length": 2048},
        train=train | {"global_batch": 8},
    )
    found = planned(resolve(given, MACHINE), MACHINE)
    assert found.job.train.gradient_checkpointing == "mlp"
    assert 0 < found.job.train.keep_layers < 32
    reason = found.reasons["train", "gradient_checkpointing"]
    assert reason.startswith("the least that fits: it takes 4")
    assert "of 44.0 GiB, where none would take 6" in reason
    assert found.reasons["train", "keep_layers"] == "of 32 layers, as many as fit"
    assert planned(found, MACHINE) is found


def test_what_nobody_knows_takes_least(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of-my-own"}', encoding="utf-8")
    given = make_job(model={"name": str(tmp_path)}, train={"gradient_checkpointing": "auto"})
    found = planned(resolve(given, MACHINE), MACHINE)
    assert found.job.train.gradient_checkpointing == "full"
    assert "there is no forecast" in found.reasons["train", "gradient_checkpointing"]


def test_the_default_is_to_keep_everything() -> None:
    assert TrainSection().gradient_checkpointing == "none"
    assert TrainSection().memory_gib is None
