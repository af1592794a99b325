"""DeepSpeed's engine on real gloo ranks, beside the native engine on one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune.config.job import LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup, Precision
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel.deepspeed.limits import fp16_on_this_cpu
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs shardtune[deepspeed]")

STEPS = 10
ADAPTERS = {"all": NoAdapter(), "lora": LoRA(rank=4)}
SMALL: dict[str, Any] = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
CPU = {"device": "cpu"}


def batch(seed: int, labels: int) -> MicroBatch:
    """Two rows, of which only the last `labels` positions are trained."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (2, 16), generator=draw)
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -1] = IGNORED
    targets[:, : 15 - labels] = IGNORED
    positions = torch.arange(16).expand(2, 16)
    return MicroBatch(ids, positions, targets, (f"s:{seed}",), 32, 2 * labels)


def batches(step: int, ranks: int) -> list[list[MicroBatch]]:
    """Four micro-batches of a step with 0 to 15 labels a row, dealt to the ranks."""
    labels = (15, 3, 0, 8)
    dealt = [batch(4 * step + n, (labels[n] + step) % 16) for n in range(4)]
    return [dealt[rank::ranks] for rank in range(ranks)]


def setup(
    precision: Precision = "fp32",
    optimizer: OptimizerSetup | None = None,
    accumulation: int = 2,
    clip: float | None = 1.0,
) -> EngineSetup:
    optimizer = optimizer or OptimizerSetup("sgd", momentum=0.9)
    schedule = Schedule("cosine", 0.05, 2, STEPS)
    return EngineSetup(precision, optimizer, schedule, clip, 0, 2, accumulation)


def builder(adapter: str, precision: Precision = "fp32") -> PretrainedModelBuilder:
    train = TrainSection(precision=precision)
    return PretrainedModelBuilder(ModelFiles(ModelSection(name="tiny")), ADAPTERS[adapter], train)


@cache
def reference(adapter: str, clip: float | None = 1.0, precision: Precision = "fp32") -> Any:
    """Loss and norm of each step, and the weights at the end, of one process without DeepSpeed."""
    model = builder(adapter, precision).whole("cpu")
    engine = NativeEngine(model, setup(precision, clip=clip), World())
    results = [engine.step(batches(step, 1)[0]) for step in range(STEPS)]
    curve = [(result.loss, result.grad_norm) for result in results]
    return curve, {name: weight.clone() for name, weight in engine.trained_weights()}


def run(
    world: World,
    zero: Mapping[str, Any],
    adapter: str,
    clip: float | None = 1.0,
    precision: Precision = "fp32",
) -> dict[str, Any]:
    strategy = DeepSpeed.model_validate({"zero_optimization": {**SMALL, **zero}})
    ours = setup(precision, accumulation=4 // world.size, clip=clip)
    with strategy.build(builder(adapter, precision), ours, world) as engine:
        results = [engine.step(batches(s, world.size)[world.rank]) for s in range(STEPS)]
        evaluated = engine.evaluate("held-out", [batch(1000 + world.rank, 15)])
        return {
            "curve": [(result.loss, result.grad_norm) for result in results],
            "weights": {name: w.numpy() for name, w in engine.trained_weights()},
            "held": engine.held().bytes,
            "evaluated": evaluated.loss,
        }


def total(adapter: str) -> tuple[int, int]:
    """Elements of the model, and of what is trained."""
    model = builder(adapter).whole("cpu")
    counts = [(p.numel(), p.numel() * p.requires_grad) for p in model.parameters()]
    return sum(count for count, _ in counts), sum(count for _, count in counts)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (2, {"stage": 0}),
    "zero1": (2, {"stage": 1}),
    "zero2": (2, {"stage": 2}),
    "zero3": (2, {"stage": 3}),
    "zero2-offload": (2, {"stage": 2, "offload_optimizer": CPU}),
    "zero3-offload": (2, {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
    "zero3-hpz": (4, {"stage": 3, "zero_hpz_partition_size": 2}),
}


def check(found: dict[str, Any], adapter: str, clip: float | None = 1.0) -> None:
    curve, weights = reference(adapter, clip)
    for (loss, norm), (wanted, wanted_norm) in zip(found["curve"], curve, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
    assert found["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        mine = torch.from_numpy(found["weights"][name])
        torch.testing.assert_close(mine, weight, rtol=1e-4, atol=1e-5)


# tests/conformance has these too, but for the weights that come out.
AGAIN = ("zero2-offload", "zero3-offload", "zero3-hpz")


@pytest.mark.parametrize("adapter", ["all", "lora"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case in AGAIN)) for case in CASES]
)
def test_equals_one_process_and_holds_its_share(case: str, adapter: str) -> None:
    ranks, zero = CASES[case]
    stage = zero["stage"]
    model, trained = (4 * count for count in total(adapter))  # bytes of fp32
    offloaded = "offload_optimizer" in zero
    for found in on_ranks(ranks, run, zero, adapter):
        check(found, adapter)
        held = {key: size for key, size in found["held"].items() if size}
        # With momentum each weight has one moment; stages 1 to 3 also keep an fp32 master.
        optim = 2 * trained // ranks if stage else trained
        home = "cpu" if offloaded else "gpu"
        assert held.pop(("optim", home)) == pytest.approx(optim, rel=0.02)
        params = model // ranks if stage == 3 else model
        if "zero_hpz_partition_size" in zero:
            params += model // 2
        home = "cpu" if "offload_param" in zero else "gpu"
        assert held.pop(("params", home)) == pytest.approx(params, rel=0.02)
        gradients = held.pop(("grads", "cpu" if offloaded else "gpu"))
        if not offloaded:
            divided = trained // ranks if stage >= 2 else trained
            # A tensor that lies across the border between two ranks is kept whole by both.
            across = 4 * 260 * 64 if stage == 2 else 0  # the largest: tiny's embedding
            assert 0.98 * divided <= gradients <= 1.02 * divided + across
        assert not held


def test_nothing_is_clipped_where_the_job_says_so() -> None:
    # Left out, DeepSpeed's limit would be 1.0; the first norms are above it.
    assert max(norm for _, norm in reference("all", None)[0]) > 1.0
    for found in on_ranks(2, run, {"stage": 2}, "all", None):
        check(found, "all", None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3]
)
def test_16_bits_track_fp32(stage: int, precision: Precision) -> None:
    if precision == "fp16" and not fp16_on_this_cpu():
        pytest.skip("DeepSpeed says that this CPU has no instructions for fp16")
    # 8 and 11 bits of mantissa; weights, too, are computed with in 16 bits here.
    curve, _ = reference("lora")
    for found in on_ranks(2, run, {"stage": stage}, "lora", 1.0, precision):
        for (loss, norm), (wanted, wanted_norm) in zip(found["curve"], curve, strict=True):
            assert loss == pytest.approx(wanted, rel=5e-3)
            assert norm == pytest.approx(wanted_norm, rel=5e-2)


def test_fp16_is_refused_where_the_cpu_has_none() -> None:
    """Before a rank is started, with the same answer that DeepSpeed's accelerator gives there."""
    strategy = DeepSpeed.model_validate({"zero_optimization": {"stage": 2}})
    found = strategy.problems_here(gpu=False, precision="fp16")
    assert [each.place for each in found] == ([] if fp16_on_this_cpu() else ["train.precision"])
    assert all("fp16" in each.fact and "bf16" in each.fix for each in found)
    assert strategy.problems_here(gpu=True, precision="fp16") == []
    assert strategy.problems_here(gpu=False, precision="bf16") == []


def halves(world: World, zero: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """Losses of six steps, and of the last three after a save and a load into a new engine."""
    optimizer = OptimizerSetup("adamw", weight_decay=0.1)
    ours = setup(precision, optimizer)
    strategy = DeepSpeed.model_validate({"zero_optimization": {**SMALL, **zero}})

    def losses(engine: Any, first: int, last: int) -> list[float]:
        given = [batches(step, world.size)[world.rank] for step in range(first, last)]
        return [engine.step(each).loss for each in given]

    with strategy.build(builder("lora", precision), ours, world) as engine:
        losses(engine, 0, 3)
        tensors, numbers = engine.state()
        expected = losses(engine, 3, 6)
        first = {name: tensor.clone() for name, tensor in tensors.items()}
    with strategy.build(builder("lora", precision), ours, world) as engine:
        engine.load_state(first, numbers)
        tensors, _ = engine.state()
        same = all(torch.equal(tensors[name], first[name]) for name in first)
        return {
            "expected": expected,
            "resumed": losses(engine, 3, 6),
            "same": same and tensors.keys() == first.keys(),
            "names": sorted(first),
        }


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.long) for case in ("zero0", "zero2-offload")),
        *("zero1", "zero3"),
        pytest.param("zero3-offload", marks=pytest.mark.long),
    ],
)
def test_state_goes_on_exactly(case: str, precision: Precision) -> None:
    native = NativeEngine(
        builder("lora").whole("cpu"), setup(optimizer=OptimizerSetup("adamw")), World()
    )
    native.step(batches(0, 1)[0])
    for found in on_ranks(2, halves, CASES[case][1], precision):
        assert found["same"]
        assert found["resumed"] == found["expected"]
        assert found["names"] == sorted(native.state()[0])  # any engine can load it


def odd_steps(world: World) -> dict[str, Any]:
    """One rank, a step with fewer micro-batches, and a gradient that isn't finite."""
    strategy = DeepSpeed.model_validate({"zero_optimization": {**SMALL, "stage": 0}})
    with strategy.build(builder("all"), setup(accumulation=4), world) as engine:
        full = engine.step(batches(0, 1)[0])
        short = engine.step(batches(1, 1)[0][:2])
        weight = next(iter(engine.trained.values()))
        handle = weight.register_hook(lambda gradient: gradient * float("nan"))
        before = {name: each.clone() for name, each in engine.trained_weights()}
        bad = engine.step(batches(2, 1)[0])
        handle.remove()
        after = dict(engine.trained_weights())
        return {
            "losses": [full.loss, short.loss],
            "applied": [full.applied, short.applied, bad.applied],
            "untouched": all(torch.equal(before[name], after[name]) for name in before),
        }


def test_a_short_step_and_a_step_that_is_left_out() -> None:
    native = NativeEngine(builder("all").whole("cpu"), setup(), World())
    losses = [native.step(batches(0, 1)[0]).loss, native.step(batches(1, 1)[0][:2]).loss]
    (found,) = on_ranks(1, odd_steps)
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["applied"] == [True, True, False]
    assert found["untouched"]


def write_model(folder: Path) -> str:
    """DeepSpeed leaves shares of less than 1 MiB in memory: this model's layers are larger."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def swapped(world: World, model: str, zero: Mapping[str, Any]) -> dict[str, Any]:
    drawing = PretrainedModelBuilder(
        ModelFiles(ModelSection(name=model)), NoAdapter(), TrainSection(precision="fp32")
    )
    strategy = DeepSpeed.model_validate({"zero_optimization": {**SMALL, **zero}})
    with strategy.build(drawing, setup(), world) as engine:
        results = [engine.step(batches(s, world.size)[world.rank]) for s in range(3)]
        return {"losses": [result.loss for result in results], "held": engine.held().bytes}


@pytest.mark.build
@pytest.mark.slow
def test_nvme_holds_states_in_files_and_leaves_none(tmp_path: Path) -> None:
    model, folder = write_model(tmp_path / "model"), tmp_path / "swap"
    swap = {"device": "nvme", "nvme_path": str(folder)}
    zero = {
        "stage": 3,
        "offload_optimizer": {**swap, "buffer_count": 5},
        "offload_param": {**swap, "buffer_count": 12, "buffer_size": 800_000, "max_in_cpu": 0},
    }
    drawing = PretrainedModelBuilder(
        ModelFiles(ModelSection(name=model)), NoAdapter(), TrainSection(precision="fp32")
    )
    native = NativeEngine(drawing.whole("cpu"), setup(), World())
    losses = [native.step(batches(step, 1)[0]).loss for step in range(3)]
    for found in on_ranks(2, swapped, model, zero):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        held, whole = found["held"], native.held()
        # The attention's and the embedding's shares are below 1 MiB and stay in memory.
        assert held["params", "nvme"] + held["params", "cpu"] == pytest.approx(
            whole.of("params") // 2, rel=0.01
        )
        assert held["params", "nvme"] > held["params", "cpu"]
        # Master and momentum; norms are too small a group to be swapped.
        assert held["optim", "nvme"] == pytest.approx(whole.of("params"), rel=0.01)
    assert not list(folder.rglob("*"))
