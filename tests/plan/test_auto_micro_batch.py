"""`gradient_checkpointing: auto` and `micro_batch: auto`: what the memory is spent on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.config.auto import ResolvedJob, memory_decides
from shardtune.config.job import Job, TrainSection
from shardtune.core.host.machine import Machine
from shardtune.core.model.known_models import known_model
from shardtune.core.units import GIB
from shardtune.data.micro_batches import micro_batches
from shardtune.data.sampler import DocumentRef
from shardtune.errors import JobError
from shardtune.plan.auto_micro_batch import (
    ABOUT_AS_FAST,
    at_level,
    best_rows,
    has_room,
    least,
    levels_of,
)
from shardtune.plan.cluster import Cluster, parse_cluster
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.this_machine import cluster_here, profile_path, require_fit
from tests.jobs import make_job
from tests.plan.test_this_machine import planned, write_config

NAME = "meta-llama/Llama-3.1-8B"
SHAPE, H200 = known_model(NAME), parse_cluster("1xH200")
LONG = {"sequence_length": 1024}
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


def test_more_layers_than_there_are_keep_no_more_than_all() -> None:
    found = [forecast(at_level(job(), "mlp", kept), SHAPE, H200) for kept in (SHAPE.layers, 1000)]
    assert found[0].memory == found[1].memory
    assert found[0].speed == found[1].speed


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
    assert levels_of(job()) == ("none", "mlp", "most", "full")
    sliced = job().model_copy(
        update={"strategy": make_job(strategy={"type": "tensor", "degree": 2}).strategy}
    )
    assert levels_of(sliced) == ("none", "full")


def test_the_reason_names_the_numbers(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", NAME)
    train = {"gradient_checkpointing": "auto", "memory_gib": 44, "micro_batch": 8}
    given = make_job(
        model={"name": str(folder)},
        adapter={"type": "lora"},
        data={"sequence_length": 2048},
        train=train | {"global_batch": 8},
    )
    found = planned(given, MACHINE)
    assert found.job.train.gradient_checkpointing == "mlp"
    assert 0 < found.job.train.keep_layers < 32
    reason = found.reasons["train", "gradient_checkpointing"]
    assert reason.startswith("the fastest that leaves 3% free: it takes 4")
    assert "of 44.0 GiB" in reason
    assert "more time than none, which would take 6" in reason
    assert found.reasons["train", "keep_layers"] == "of 32 layers, as many as fit"
    assert planned(found.job, MACHINE) == ResolvedJob(found.job, {})  # nothing is left to decide


def test_what_nobody_knows_takes_least(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of-my-own"}', encoding="utf-8")
    given = make_job(model={"name": str(tmp_path)}, train={"gradient_checkpointing": "auto"})
    found = planned(given, MACHINE)
    assert found.job.train.gradient_checkpointing == "full"
    assert "there is no forecast" in found.reasons["train", "gradient_checkpointing"]


def test_the_default_is_to_keep_everything() -> None:
    assert TrainSection().gradient_checkpointing == "none"
    assert TrainSection().memory_gib is None


# The micro-batch ----------------------------------------------------------------------------------


def open_job(**train: Any) -> Job:
    """LoRA on a whole model, with a micro-batch that nobody has given."""
    settings = {"micro_batch": "auto", "global_batch": 16, "gradient_checkpointing": "none"}
    return job(**(settings | train))


@pytest.mark.parametrize(
    ("memory_gib", "rows", "told"),
    [
        (None, 8, "a rank has 16 rows a step; 8 x 2048 tokens take 67.0 of 139.8 GiB, and more"),
        (60, 4, "a rank has 16 rows a step; 4 x 2048 tokens take 42.1 of 60.0 GiB, 8 rows would"),
        (31, 2, "a rank has 16 rows a step; 2 x 2048 tokens take 29.7 of 31.0 GiB, 4 rows would"),
        (24, 1, "a rank has 16 rows a step; 1 x 2048 tokens take 23.0 of 24.0 GiB, 2 rows would"),
        (12, 1, "a rank has 16 rows a step; 1 x 2048 tokens take 23.0 of 12.0 GiB, and nothing"),
    ],
)
def test_memory_decides_the_micro_batch(
    tmp_path: Path, memory_gib: float | None, rows: int, told: str
) -> None:
    folder = write_config(tmp_path / "model", NAME)
    given = open_job(memory_gib=memory_gib)
    given = given.model_copy(update={"model": given.model.model_copy(update={"name": str(folder)})})
    found = planned(given, MACHINE)
    assert found.job.train.micro_batch == rows
    assert found.reasons["train", "micro_batch"].startswith(told)
    assert planned(found.job, MACHINE) == ResolvedJob(found.job, {})  # nothing is left to decide


def as_shared_out(given: Job, rows: int, where: Cluster) -> float | None:
    """Seconds of a step with micro-batches of `rows`, each as large as ranks really get it; None
    where it has no room."""
    ranks = where.gpus
    order = [(DocumentRef(0, number, 2048),) for number in range(given.train.global_batch)]
    dealt = micro_batches(order, ranks, rows)
    rounds, largest = len(dealt[0]), max(len(each) for rank in dealt for each in rank)
    whole = {"micro_batch": largest, "global_batch": largest * rounds * ranks}
    train = given.train.model_copy(update=whole)
    found = forecast(given.model_copy(update={"train": train}), SHAPE, where)
    assert found.work.microbatches == rounds
    return found.speed.step.total if has_room(found) else None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("batch", [16, 24, 60, 96, 100])
@pytest.mark.parametrize("cluster", ["1xH200", "1xA100-80GB", "1xA100-40GB", "8xH100"])
def test_no_micro_batch_with_room_is_much_faster_and_no_smaller_one_as_fast(
    cluster: str, batch: int
) -> None:
    where = parse_cluster(cluster)
    given = open_job(global_batch=batch)
    taken = int(best_rows(given, SHAPE, where).job.train.micro_batch)
    most = batch // where.gpus
    seconds = {rows: as_shared_out(given, rows, where) for rows in range(1, most + 1)}
    mine = seconds.pop(taken)
    assert mine is not None
    assert all(mine <= 1.04 * other for other in seconds.values() if other is not None)
    smaller = [other for rows, other in seconds.items() if rows <= taken / 2 and other is not None]
    assert all(other > mine for other in smaller)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_what_is_gathered_for_each_micro_batch_wants_larger_ones(strategy: str) -> None:
    where = parse_cluster("2x8xH100@100Gbps")
    section = make_job(strategy={"type": strategy}).strategy
    given = open_job(global_batch=1024, gradient_checkpointing="full")
    found = best_rows(given.model_copy(update={"strategy": section}), SHAPE, where)
    rows = int(found.job.train.micro_batch)
    assert rows > 16 if strategy == "fsdp" else rows <= 8


def test_levels_are_tried_with_each_micro_batch() -> None:
    found = best_rows(open_job(gradient_checkpointing="auto", memory_gib=44), SHAPE, H200)
    assert has_room(found)
    assert found.job.train.gradient_checkpointing in ("none", "mlp")
    for level in ("none", "full"):
        other = best_rows(open_job(gradient_checkpointing=level, memory_gib=44), SHAPE, H200)
        assert found.speed.step.total <= other.speed.step.total * (1 + ABOUT_AS_FAST)


def test_nodes_with_and_without_a_profile_come_to_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = write_config(tmp_path / "model", NAME)
    given = open_job()
    given = given.model_copy(update={"model": given.model.model_copy(update={"name": str(folder)})})

    def rows() -> int | str:
        return planned(given, MACHINE).job.train.micro_batch

    without = rows()
    profile_path().parent.mkdir(parents=True)
    slow = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "tflops": 1.0}
    profile = {"gpu": "H200-141GB", "nodes": 1, "gpus_per_node": 1, "measured": {"matmul": [slow]}}
    profile_path().write_text(json.dumps(profile), encoding="utf-8")
    assert forecast(job(), SHAPE, cluster_here(MACHINE, 1)).speed.step.total > 60  # it is read
    assert rows() == without == 8


@pytest.mark.parametrize(
    ("sections", "machine", "rows"),
    [
        ({"train": {"micro_batch": 3}}, MACHINE, 3),
        ({"model": {"attention": "flash_attention_2"}}, MACHINE, 1),
        ({"strategy": {"type": "tensor", "degree": 2}, "launch": {"processes": 2}}, MACHINE, 4),
        ({}, Machine(cores=16, gpus=0, memory=1 << 38), 4),
    ],
    ids=["given", "one row only", "cut layers", "no GPU"],
)
def test_where_memory_does_not_decide(
    tmp_path: Path, sections: dict[str, Any], machine: Machine, rows: int
) -> None:
    folder = write_config(tmp_path / "model", NAME)
    model = {"name": str(folder)} | sections.get("model", {})
    train = {"global_batch": 16} | sections.get("train", {})
    given = make_job(**(sections | {"model": model, "train": train}), data=LONG)
    found = planned(given, machine)
    assert found.job.train.micro_batch == rows


def test_a_deepspeed_file_keeps_its_micro_batch(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2}', encoding="utf-8")
    strategy = {"type": "deepspeed", "config": str(tmp_path / "ds.json")}
    given = make_job(strategy=strategy, train={"global_batch": 16}, launch={"processes": 1})
    assert not memory_decides(given, MACHINE)
    assert planned(given, MACHINE).job.train.micro_batch == 2


def test_without_a_forecast_tokens_decide(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of-my-own"}', encoding="utf-8")
    given = make_job(model={"name": str(tmp_path)}, train={"global_batch": 16}, data=LONG)
    found = planned(given, MACHINE)
    assert found.job.train.micro_batch == 4
    assert found.job.train.gradient_checkpointing == "none"
    assert found.reasons["train", "micro_batch"].endswith("stay within 4096")
