"""The native engine: precisions, clipping, state, and what it sends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardtune.config.job import LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup, Precision
from shardtune.core.step import IGNORED, MicroBatch, StepResult
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.parallel.ddp.engine import DDPEngine, native_engine
from tests.ranks import on_ranks


def batch(seed: int, rows: int = 2, length: int = 16) -> MicroBatch:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (rows, length), generator=draw)
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -1] = IGNORED
    positions = torch.arange(length).expand(rows, length)
    names = tuple(f"s:{seed}.{row}" for row in range(rows))
    return MicroBatch(ids, positions, targets, names, rows * length, rows * (length - 1))


def make(
    world: World | None = None,
    *,
    precision: Precision = "fp32",
    adapter: LoRA | NoAdapter | None = None,
    optimizer: str = "adamw",
    clip: float | None = 1.0,
    rate: float = 1e-2,
    checkpointing: str = "none",
) -> NativeEngine:
    train = TrainSection(precision=precision, gradient_checkpointing=checkpointing)
    model = PretrainedModelBuilder(
        ModelFiles(ModelSection(name="tiny")), adapter or NoAdapter(), train
    ).whole("cpu")
    setup = EngineSetup(
        precision, OptimizerSetup(optimizer), Schedule("constant", rate, 0, 100), clip, 0
    )
    return native_engine(model, setup, world or World())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("adapter", [NoAdapter(), LoRA(rank=4)], ids=["all", "lora"])
def test_a_repeated_batch_is_learnt(precision: Precision, adapter: LoRA | NoAdapter) -> None:
    engine = make(precision=precision, adapter=adapter)
    losses = [engine.step([batch(1)]).loss for _ in range(12)]
    assert losses[-1] < 0.95 * losses[0]
    assert all(weight.dtype == torch.float32 for _, weight in engine.trained_weights())


def test_16_bit_losses_stay_near_those_of_fp32() -> None:
    def losses(precision: Precision) -> list[float]:
        engine = make(precision=precision, optimizer="sgd")
        return [engine.step([batch(n)]).loss for n in range(5)]

    # bf16 has 8 bits of mantissa, fp16 11: their rounding, summed over two layers.
    assert losses("bf16") == pytest.approx(losses("fp32"), rel=5e-3)
    assert losses("fp16") == pytest.approx(losses("fp32"), rel=5e-4)


@pytest.mark.parametrize("adapter", [NoAdapter(), LoRA(rank=4)], ids=["all", "lora"])
def test_checkpointing_computes_twice_and_changes_nothing(adapter: LoRA | NoAdapter) -> None:
    """From the first step on, which the model enters as it was built: for answering."""
    plain, recomputed = (
        make(adapter=adapter, optimizer="sgd", checkpointing=what) for what in ("none", "full")
    )
    passed = [0, 0]
    for number, engine in enumerate((plain, recomputed)):
        for module in engine.model.modules():
            if type(module).__name__.endswith("Attention"):
                module.register_forward_pre_hook(lambda *_, n=number: _count(passed, n))
    for n in range(3):
        one, other = plain.step([batch(n)]), recomputed.step([batch(n)])
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
        assert passed[1] == 2 * passed[0] > 0
        assert all(module.training for module in plain.model.modules())
        plain.evaluate("some", [batch(9)])
        passed[0] = passed[1] = 0


def _count(passed: list[int], number: int) -> None:
    passed[number] += 1


def test_clipping_shortens_the_update_and_reports_the_norm_before() -> None:
    free, clipped = make(optimizer="sgd", clip=None), make(optimizer="sgd", clip=0.01)
    before = {name: weight.clone() for name, weight in clipped.trained_weights()}
    one, other = free.step([batch(1)]), clipped.step([batch(1)])
    assert one.grad_norm == pytest.approx(other.grad_norm)
    moved = math.sqrt(
        sum((w - before[n]).square().sum().item() for n, w in clipped.trained_weights())
    )
    assert moved == pytest.approx(0.01 * 1e-2, rel=1e-3)  # the limit times the learning rate


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    engine = make(optimizer="sgd")
    engine.step([batch(1)])
    weight = next(iter(engine.trained.values()))
    before = {name: weight.clone() for name, weight in engine.trained_weights()}
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    result = engine.step([batch(2)])
    handle.remove()
    assert not result.applied
    assert math.isnan(result.grad_norm)
    for name, value in engine.trained_weights():
        assert torch.equal(value, before[name])
    assert engine.step([batch(3)]).applied


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_state_goes_on_exactly(precision: Precision) -> None:
    adapter = LoRA(rank=4, dropout=0.1)  # dropout, so that the random numbers matter too
    whole = make(precision=precision, adapter=adapter)
    expected = [whole.step([batch(n)]) for n in range(6)]
    first = make(precision=precision, adapter=adapter)
    for n in range(3):
        first.step([batch(n)])
    tensors, numbers = first.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.manual_seed(12345)  # whatever was drawn elsewhere must not matter
    second = make(precision=precision, adapter=adapter)
    second.load_state(tensors, numbers)
    assert [second.step([batch(n)]) for n in range(3, 6)] == expected[3:]


def interrupted(world: World) -> list[bool]:
    """After each step: whether a run that was begun anew in its middle is where it should be."""

    def step(engine: NativeEngine, number: int) -> dict[str, torch.Tensor]:
        engine.step([batch(100 * number + 10 * n + world.rank) for n in range(2)])
        return {name: weight.clone() for name, weight in engine.trained_weights()}

    whole, first, second = (make(world, adapter=LoRA(rank=4, dropout=0.1)) for _ in range(3))
    expected = [step(whole, number) for number in range(4)]
    found = [step(first, number) for number in range(2)]
    tensors, numbers = first.state()
    second.load_state(tensors, numbers)
    found += [step(second, number) for number in range(2, 4)]
    pairs = zip(found, expected, strict=True)
    return [all(torch.equal(one[n], other[n]) for n in one) for one, other in pairs]


def test_state_goes_on_exactly_on_many_ranks() -> None:
    """Three numbers have several sums, by their order: two ranks would show nothing."""
    for found in on_ranks(4, interrupted):
        assert found == [True] * 4


def halves(world: World) -> dict[str, Any]:
    """Six steps in fp16, the last three also after a save and a load. The scale falls in the third
    step, so that neither it nor the count of good steps is what a new engine has."""

    def steps(engine: NativeEngine, first: int, last: int) -> list[StepResult]:
        return [engine.step([batch(10 * world.rank + n)]) for n in range(first, last)]

    adapter = LoRA(rank=4, dropout=0.1)
    with make(world, precision="fp16", adapter=adapter) as engine:
        steps(engine, 0, 2)
        weight = next(iter(engine.trained.values()))
        handle = weight.register_hook(lambda gradient: gradient * float("inf"))
        (left_out,) = steps(engine, 2, 3)
        handle.remove()
        steps(engine, 3, 5)
        tensors, numbers = engine.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        expected = steps(engine, 5, 8)
        after = {name: each.clone() for name, each in engine.trained_weights()}
    torch.manual_seed(12345)
    with make(world, precision="fp16", adapter=adapter) as engine:
        fresh = engine.state()[1]["scale"]
        engine.load_state(tensors, numbers)
        again, same_numbers = engine.state()
        same = all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
        resumed = steps(engine, 5, 8)
        ended = dict(engine.trained_weights())
        return {
            "applied": left_out.applied,
            "numbers": numbers,
            "same": same and same_numbers == numbers and again.keys() == tensors.keys(),
            "fresh": fresh,
            "resumed": resumed == expected,
            "weights": all(torch.equal(after[name], each) for name, each in ended.items()),
        }


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp16_goes_on_with_its_loss_scale(ranks: int) -> None:
    for found in on_ranks(ranks, halves):
        assert not found["applied"]
        assert found["numbers"] == {"taken": 5.0, "scale": found["fresh"] / 2, "growth": 2.0}
        assert found["same"]
        assert found["resumed"]
        assert found["weights"]


def test_the_output_head_runs_only_where_there_are_labels() -> None:
    engine = make()
    seen: list[torch.Size] = []
    head = engine.model.get_output_embeddings()
    head.register_forward_hook(lambda module, given, output: seen.append(output.shape))
    full = batch(1)
    targets = full.targets.clone()
    targets[:, :-5] = IGNORED  # 5 positions remain, of which the last is never trained
    engine.step([MicroBatch(full.input_ids, full.position_ids, targets, (), 32, 8)])
    assert seen == [torch.Size([2, 4, 260])]


def sent_in_a_step(world: World, microbatches: int) -> dict[str, int]:
    engine = make(world)
    engine.step([batch(world.rank)])
    trained = sum(weight.numel() for _, weight in engine.trained_weights())
    bytes_sent: list[int] = []

    def hook(state, bucket):  # DDP reads annotations, and can't read postponed ones
        bytes_sent.append(bucket.buffer().numel())
        future = dist.all_reduce(bucket.buffer().div_(world.size), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    assert isinstance(engine, DDPEngine)
    assert engine._ddp is not None
    engine._ddp.register_comm_hook(None, hook)
    engine.step([batch(10 * world.rank + n) for n in range(microbatches)])
    return {"sent": sum(bytes_sent), "trained": trained}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_travel_once_per_step(microbatches: int) -> None:
    for found in on_ranks(2, sent_in_a_step, microbatches):
        assert found["sent"] == found["trained"]
