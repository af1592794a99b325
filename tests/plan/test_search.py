"""The planner's choices, and the reasons that it gives."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from shardtune.config.job import Job
from shardtune.core.model.known_models import catalogue, known_model
from shardtune.core.model.row_length import longest_row
from shardtune.core.units import GIB
from shardtune.plan.auto_micro_batch import has_room
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.forecast import forecast
from shardtune.plan.on_cluster import as_planned
from shardtune.plan.remedies import overrides, smallest_change, smallest_cluster
from shardtune.plan.search import may_fit, rank

CHAT = {"path": "a.jsonl", "format": "chat"}


def job(name: str, *, length: int = 2048, **sections: Any) -> Job:
    train = {"global_batch": 64, "steps": 100, "micro_batch": 1, "loss": "fused"}
    document: dict[str, Any] = {
        "model": {"name": name, **sections.pop("model", {})},
        "data": sections.pop("data", {"train": [CHAT], "sequence_length": length}),
        "train": train | {"kernels": "compiled"} | sections.pop("train", {}),
        **sections,
    }
    return Job.model_validate_json(json.dumps(document))


LORA = {"type": "lora", "rank": 16}
H200 = parse_cluster("1xH200")


def test_a_small_model_needs_no_sharding() -> None:
    ranking = rank(
        job("qwen2.5-0.5b", adapter=LORA), known_model("qwen2.5-0.5b"), parse_cluster("4xA100-80GB")
    )
    assert ranking.best is not None
    assert ranking.best.name in ("ddp", "zero1", "zero2")


def test_weights_that_do_not_fit_are_sharded() -> None:
    name = "llama-3.1-70b"
    ranking = rank(job(name), known_model(name), parse_cluster("4x8xH100-80GB@3200Gbps"))
    assert ranking.best is not None
    assert ranking.best.name.startswith(("fsdp", "zero3"))
    ddp = next(each for each in ranking.candidates if each.name == "ddp")
    assert not ddp.fits
    assert "GiB over at micro-batch" in ddp.why


def test_every_loser_says_why() -> None:
    name = "llama-2-7b"
    for spec in ("2xA100-80GB", "8xRTX3090:pcie", "1xRTX4090"):
        ranking = rank(job(name), known_model(name), parse_cluster(spec))
        assert all(each.why for each in ranking.candidates)
        fitting = [c.found for c in ranking.candidates if c.fits and c.found]
        assert fitting == sorted(fitting, key=has_room, reverse=True)
        steps = [each.speed.step.total for each in fitting if has_room(each)]
        assert steps == pytest.approx(sorted(steps), rel=0.02)  # alike within what a forecast says


def test_the_result_of_training_is_never_changed() -> None:
    what = job("llama-2-7b")
    for each in rank(what, known_model("llama-2-7b"), parse_cluster("8xRTX3090:pcie")).candidates:
        assert each.found is not None
        found = each.found.job
        assert found.train.global_batch == what.train.global_batch
        assert (found.adapter, found.data) == (what.adapter, what.data)
        assert found.train.precision == what.train.precision


def test_memory_can_be_what_matters() -> None:
    shape, cluster = known_model("llama-2-7b"), parse_cluster("8xA100-80GB")
    least = rank(job("llama-2-7b"), shape, cluster, "memory").best
    fastest = rank(job("llama-2-7b"), shape, cluster, "time").best
    assert least is not None
    assert fastest is not None
    assert least.found is not None
    assert fastest.found is not None
    assert least.found.memory.peak < fastest.found.memory.peak
    assert least.found.speed.step.total >= fastest.found.speed.step.total


def test_a_thousand_gpus_are_planned_in_two_seconds() -> None:
    begun = time.process_time()
    cluster = parse_cluster("128x8xH100-80GB@3200Gbps")
    what = job("llama-3.1-405b", train={"global_batch": 1024})
    ranking = rank(what, known_model("llama-3.1-405b"), cluster)
    assert time.process_time() - begun < 2
    assert ranking.best is not None


@pytest.mark.slow
@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.long)])
def test_every_model_of_the_catalogue_gets_a_useful_answer_on_one_small_card(every: int) -> None:
    cluster = parse_cluster("1xRTX4090")
    silent = []
    for model in list(catalogue())[::every]:
        shape = model.shape
        length = min(2048, longest_row(shape) or 2048)
        what = job(model.name, length=length, adapter=LORA)
        ranking = rank(what, shape, cluster)
        if ranking.best is None and smallest_cluster(what, shape, cluster) is None:
            silent.append(model.name)
    assert silent == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "precision", "larger"), [("1xT4", "fp16", True), ("1xRTX4090", "bf16", False)]
)
def test_a_layer_that_is_too_large_for_a_card_wants_a_larger_one(
    spec: str, precision: str, larger: bool
) -> None:
    """A layer of DeepSeek-V3 has 11.5 B weights, 21 GiB in 16 bits. Its experts can be divided, but
    not in fp16: there it has to be gathered."""
    name, cluster = "deepseek-v3", parse_cluster(spec)
    what = job(name, adapter=LORA, train={"precision": precision})
    found = smallest_cluster(what, known_model(name), cluster)
    assert found is not None
    assert found.found is not None
    assert (found.found.cluster.gpu.name == "A100-80GB") == larger
    assert ("expert" in found.name) == (not larger)


@pytest.mark.slow
def test_a_layer_that_can_be_cut_needs_no_larger_card() -> None:
    """A layer of Llama-3.1-405B gathered twice takes 12 GiB, an eighth of it 0.8."""
    name = "llama-3.1-405b"
    found = smallest_cluster(job(name, adapter=LORA), known_model(name), parse_cluster("1xRTX4090"))
    assert found is not None
    assert found.found is not None
    assert found.found.cluster.gpu.name == "RTX4090"
    assert "tensor(8)" in found.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["2xA40:nvlink", "1xRTX3090:nvlink", "4xA100-40GB:pcie", "1xA6000:display", "2xMI300X"]
)
def test_a_larger_cluster_is_the_one_that_its_name_describes(spec: str) -> None:
    """NVLink bridges connect two cards: four of them talk over PCIe."""
    name, cluster = "llama-3.1-405b", parse_cluster(spec)
    found = smallest_cluster(job(name), known_model(name), cluster)
    assert found is not None
    assert found.found is not None
    larger = found.found.cluster
    named = parse_cluster(larger.name)
    for each in ("gpu", "nodes", "gpus_per_node", "link", "inter_node_gbps"):
        assert getattr(named, each) == getattr(larger, each)


def test_models_are_cut_where_somebody_has_said_how() -> None:
    cluster = parse_cluster("2x4xA100-80GB@400Gbps")
    llama = rank(job("llama-2-7b"), known_model("llama-2-7b"), cluster).candidates
    names = {each.name.split("(")[0] for each in llama}
    assert {"tensor", "pipeline", "fsdp + tensor", "fsdp + pipeline"} <= names
    degrees = {name: each.found.mesh for each in llama if (name := each.name) and each.found}
    sliced = next(mesh for name, mesh in degrees.items() if name.startswith("tensor("))
    assert sliced.size_of("tensor") <= 4  # slices stay inside a node
    other = rank(job("mixtral-8x7b-v0.1"), known_model("mixtral-8x7b-v0.1"), cluster).candidates
    refused = next(each for each in other if each.found is None)
    assert "'mixtral'" in refused.why


def test_any_number_of_gpus_has_its_stages() -> None:
    cluster = parse_cluster("3xA40")
    found = rank(job("llama-3.1-8b", adapter=LORA), known_model("llama-3.1-8b"), cluster).candidates
    whys = {each.name: each.why for each in found}
    assert "pipeline(3)" in whys
    assert whys["tensor(3)"] == "can't be had: 32 heads / tensor(3) = 10.67"


def test_a_candidate_is_what_would_run() -> None:
    """DeepSpeed and cut layers take them as transformers writes them; others are compiled."""
    shape, cluster = known_model("llama-2-7b"), parse_cluster("8xA100-80GB")
    for each in rank(job("llama-2-7b"), shape, cluster).candidates:
        assert each.found is not None
        train = each.found.job.train
        native = each.name.startswith(("ddp", "fsdp")) and "+" not in each.name
        expected = ("compiled", "fused") if native else ("eager", "plain")
        assert (train.kernels, train.loss) == expected, each.name


def test_more_gpus_than_rows_take_more_rows() -> None:
    what = job("llama-3.1-70b", train={"global_batch": 8})
    found = smallest_cluster(what, known_model("llama-3.1-70b"), parse_cluster("8xA100-80GB"))
    assert found is not None
    assert found.found is not None
    assert found.found.cluster.gpus > 8
    assert found.found.job.train.global_batch == found.found.cluster.gpus


@pytest.mark.parametrize(
    ("name", "spec", "sections"),
    [
        ("llama-3.1-8b", "1xRTX4090", {}),
        ("llama-3.1-8b", "1xRTX4090", {"train": {"micro_batch": 16, "loss": "plain"}}),
        ("llama-2-13b", "4xA40", {"strategy": {"type": "fsdp"}}),
        ("qwen2.5-0.5b", "1xRTX4090", {"train": {"micro_batch": 64, "loss": "plain"}}),
        ("llama-2-70b", "2xRTX4090", {"adapter": LORA}),
    ],
)
def test_the_change_that_is_offered_fits(name: str, spec: str, sections: dict[str, Any]) -> None:
    shape, cluster = known_model(name), parse_cluster(spec)
    what = job(name, **sections)
    assert not forecast(what, shape, cluster).fits
    change = smallest_change(what, shape, cluster)
    assert change is not None
    changed = change.found.job
    if changed.strategy.type != what.strategy.type:
        assert change.values["strategy.type"] == changed.strategy.type  # or it can't be written
    again = forecast(changed, shape, cluster)
    assert again.fits
    assert again.memory.peak <= cluster.gpu.memory_gib * GIB


def test_the_smallest_change_leaves_the_result_alone_where_it_can() -> None:
    what = job("qwen2.5-0.5b", train={"micro_batch": 64, "loss": "plain"})
    change = smallest_change(what, known_model("qwen2.5-0.5b"), parse_cluster("1xRTX4090"))
    assert change is not None
    assert change.same_result
    assert list(change.values) == ["train.micro_batch"]


def test_what_sharding_spares_need_not_be_recomputed() -> None:
    what, shape = job("llama-3.1-8b"), known_model("llama-3.1-8b")
    change = smallest_change(what, shape, parse_cluster("8xA40"))
    assert change is not None
    assert str(change) == "strategy.type=fsdp"


def test_a_change_that_leaves_the_reserve_comes_before_one_that_does_not() -> None:
    """Paged states alone would leave 1.6 of 79.2 GiB."""
    train = {"global_batch": 64, "loss": "plain", "kernels": "eager"}
    source = {"train": [{"path": "a.jsonl", "format": "source_target"}], "sequence_length": 512}
    what = job("t5-11b", train=train, data=source)
    change = smallest_change(what, known_model("t5-11b"), parse_cluster("1xA100-80GB"))
    assert change is not None
    assert change.same_result
    assert has_room(change.found)
    assert change.values["train.optimizer.paged"] is True


def test_rows_are_shortened_only_where_nothing_else_is_left() -> None:
    what = job("llama-3.1-70b", length=4096, adapter=LORA, train={"precision": "fp16"})
    change = smallest_change(what, known_model("llama-3.1-70b"), parse_cluster("8xT4"))
    assert change is not None
    assert not change.same_result
    assert change.values["data.sequence_length"] == 2048
    assert change.values["strategy.offload"] == "cpu"


def test_all_weights_of_8_b_fit_into_80_gb_where_the_states_lie_elsewhere() -> None:
    """By themselves: nothing has to be computed again, and no row taken off."""
    what = job("llama-3.1-8b", train={"micro_batch": 1, "global_batch": 1, "loss": "fused"})
    shape, cluster = known_model("llama-3.1-8b"), parse_cluster("1xA100-80GB")
    change = smallest_change(what, shape, cluster)
    assert change is not None
    assert str(change) == "train.optimizer.type=adamw train.optimizer.paged=true"
    assert change.same_result
    whole, found = forecast(what, shape, cluster), change.found
    assert found.memory.gpu["optimizer"] == 0
    assert found.memory.host - whole.memory.host == pytest.approx(10 * shape.parameters)
    assert found.speed.step.offload > 10 * whole.speed.step.optimizer


def test_with_paged_states_the_batch_may_stay_what_it_is() -> None:
    """Of several micro-batches gradients would be added up in fp32."""
    what = job(
        "llama-3.1-8b",
        train={"micro_batch": 8, "global_batch": 8, "loss": "fused", "kernels": "compiled"},
    )
    change = smallest_change(what, known_model("llama-3.1-8b"), parse_cluster("1xA40"))
    assert change is not None
    assert change.values["train.optimizer.paged"] is True
    assert "train.micro_batch" not in change.values


def test_paged_states_are_looked_for_and_told_wherever_a_strategy_is_planned() -> None:
    """One GPU holds them in no other way, so nothing else of it can fit."""
    name, cluster = "llama-3.1-8b", parse_cluster("1xA100-80GB")
    what = job(name, train={"global_batch": 1})
    assert may_fit(what, known_model(name), cluster)
    ranking = rank(what, known_model(name), cluster)
    assert ranking.best is not None
    assert ranking.best.found is not None
    told = overrides(what, ranking.best.found.job)
    assert told["train.optimizer.type"] == "adamw"
    assert told["train.optimizer.paged"] is True
    planned = as_planned(what, ranking)
    assert planned is not None
    assert ("train", "optimizer", "paged") in planned.reasons


def test_a_paged_job_that_does_not_fit_is_offered_what_cannot_be_paged() -> None:
    paged = {"type": "adamw", "paged": True}
    what = job("llama-3.1-8b", train={"micro_batch": 1, "loss": "fused", "optimizer": paged})
    change = smallest_change(what, known_model("llama-3.1-8b"), parse_cluster("1xRTX4090"))
    assert change is not None
    assert change.values["train.optimizer.paged"] is False
    assert change.values["strategy.type"] == "fsdp"
    assert "train.optimizer.paged=false" in str(change)


def test_what_is_loaded_is_counted() -> None:
    """Weights come in fp32, and the largest is there in halves, too, before it goes."""
    shape = known_model("gemma-2-9b")
    largest = shape.vocab * shape.hidden
    for paged, halves in ((True, 2), (False, 4)):
        what = job("gemma-2-9b", train={"optimizer": {"type": "adamw", "paged": paged}})
        found = forecast(what, shape, H200).memory.moments["building"]
        assert found == 4 * shape.parameters + halves * largest


def test_8_bit_weights_that_do_not_fit_are_given_up_for_others() -> None:
    """Only whole weights are held so; what divides or packs them stores them otherwise."""
    what = job(
        "llama-2-13b",
        adapter=LORA,
        model={"quantization": "fp8"},
        train={"micro_batch": 1, "gradient_checkpointing": "full"},
    )
    change = smallest_change(what, known_model("llama-2-13b"), parse_cluster("2xRTX4090"))
    assert change is not None
    assert change.values["model.quantization"] == "none"
    assert change.values["strategy.type"] == "fsdp"
    assert not change.same_result


def test_some_products_are_computed_again_before_all_are() -> None:
    """A row of 2048 tokens takes 22 GiB with all products kept, 19 without the wide ones."""
    name = "llama-3.1-8b"
    lean = {"global_batch": 8, "micro_batch": 1, "memory_gib": 20}
    what, shape = job(name, adapter=LORA, train=lean), known_model(name)
    change = smallest_change(what, shape, H200)
    assert change is not None
    assert change.values["train.gradient_checkpointing"] in ("mlp", "most")
    best = rank(job(name, adapter=LORA, train=lean | {"memory_gib": 30}), shape, H200).best
    assert best is not None
    assert best.found is not None
    assert best.found.fits
    assert best.found.memory.required <= 30 * GIB


def test_fewer_layers_keep_all_before_more_is_computed_again() -> None:
    name = "llama-3.1-8b"
    train = {"gradient_checkpointing": "mlp", "keep_layers": 30, "micro_batch": 8}
    what = job(name, adapter=LORA, train=train | {"global_batch": 8, "memory_gib": 44})
    changed = dict(smallest_change(what, known_model(name), H200).values)  # type: ignore[union-attr]
    assert changed == {"train.micro_batch": 4}
    one = job(name, adapter=LORA, train=train | {"micro_batch": 1, "memory_gib": 20})
    changed = dict(smallest_change(one, known_model(name), H200).values)  # type: ignore[union-attr]
    assert changed == {"train.keep_layers": 0}
