"""All weights on one rank: 16-bit copies in the model, fp32 masters with the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardtune.core.schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup, Precision
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.engines.ddp import native_engine
from shardtune.engines.masters import MasterEngine
from shardtune.engines.native import NativeEngine
from shardtune.job import ModelSection, NoAdapter, TrainSection
from shardtune.models.blueprint import ModelBlueprint
from shardtune.models.parts import decoder_layers
from shardtune.models.whole import prepare
from tests.engines.test_native import batch

RATE = 1e-2


def make(
    precision: Precision = "bf16",
    *,
    masters: bool = True,
    together: bool = False,
    rate: float = RATE,
    loss: Any = "fused",
    clip: float | None = 1.0,
) -> NativeEngine:
    train = TrainSection(precision=precision)
    model: Any = ModelBlueprint(ModelSection(name="tiny"), NoAdapter(), train).whole("cpu")
    if together:
        for layer in decoder_layers(model):
            prepare(layer, model.config.model_type)
    rule = OptimizerSetup(betas=(0.9, 0.95), weight_decay=0.1)
    schedule = Schedule("constant", rate, 0, 100)
    setup = EngineSetup(precision, rule, schedule, clip, 0, loss=loss, masters=masters)
    return native_engine(model, setup, World())


def steps(count: int) -> list[list[MicroBatch]]:
    """Of one micro-batch and of three, in turn."""
    return [[batch(10 * n + k) for k in range(1 + 2 * (n % 2))] for n in range(count)]


def taken(engine: NativeEngine, count: int) -> list[tuple[float, float]]:
    results = [engine.step(given) for given in steps(count)]
    return [(result.loss, result.grad_norm) for result in results]


def rounded(engine: NativeEngine) -> bool:
    """Whether the model computes with what is trained, rounded once."""
    inside = dict(engine.module().named_parameters())
    return all(torch.equal(w.to(torch.bfloat16), inside[n]) for n, w in engine.trained.items())


@pytest.mark.parametrize("loss", ["fused", "plain"])
@pytest.mark.parametrize("together", [False, True])
def test_in_fp32_nothing_is_different(loss: str, together: bool) -> None:
    ours = taken(make("fp32", together=together, loss=loss), 6)
    theirs = taken(make("fp32", masters=False, loss=loss), 6)
    assert ours == [pytest.approx(each, rel=2e-5) for each in theirs]


@pytest.mark.parametrize("together", [False, True])
def test_in_bf16_it_is_as_near_to_fp32_as_autocast(together: bool) -> None:
    """The first step, from the same weights; later ones drift apart as any two 16-bit runs do."""
    given = steps(2)[1]
    right = make("fp32", masters=False).step(given)
    results = [make(together=together), make(masters=False)]
    ours, autocast = (engine.step(given) for engine in results)
    assert ours.loss == pytest.approx(right.loss, rel=3e-4)
    assert autocast.loss == pytest.approx(right.loss, rel=3e-4)
    assert ours.grad_norm == pytest.approx(right.grad_norm, rel=0.01)


def test_the_model_has_copies_and_the_names_stay() -> None:
    engine = make()
    assert isinstance(engine, MasterEngine)
    inside = dict(engine.module().named_parameters())
    assert inside.keys() == engine.trained.keys()
    assert {each.dtype for each in inside.values()} == {torch.bfloat16}
    assert {each.dtype for _, each in engine.trained_weights()} == {torch.float32}
    assert rounded(engine)
    taken(engine, 3)
    assert rounded(engine)
    causal: Any = engine.module()
    assert causal.get_output_embeddings().weight is causal.get_input_embeddings().weight


def test_updates_below_the_copies_precision_are_not_lost() -> None:
    engine = make(rate=1e-7)
    before = {name: weight.clone() for name, weight in engine.trained_weights()}
    copies = [each.detach().clone() for each in engine.module().parameters()]
    taken(engine, 4)
    assert all(not torch.equal(weight, before[name]) for name, weight in engine.trained_weights())
    after = list(engine.module().parameters())
    same = [(a == b).float().mean() for a, b in zip(copies, after, strict=True)]
    assert min(same) > 0.9


def test_micro_batches_are_added_up_in_fp32() -> None:
    engine = make(clip=None)
    one = torch.ones(())

    def gradients(*given: MicroBatch) -> dict[str, Tensor]:
        engine._begin()
        engine._backward(given, one)
        return {name: each.clone() for name, each in engine._gradients().items()}

    first, second = gradients(batch(1)), gradients(batch(2))
    assert {each.dtype for each in first.values()} == {torch.bfloat16}
    for name, both in gradients(batch(1), batch(2)).items():
        assert both.dtype == torch.float32
        assert torch.equal(both, first[name].float() + second[name].float()), name


def test_a_step_that_is_left_out_leaves_everything() -> None:
    engine = make()
    taken(engine, 2)
    before = {name: each.clone() for name, each in engine.state()[0].items()}
    weight = next(iter(engine.leaves.values()))
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    assert not engine.step([batch(1)]).applied
    handle.remove()
    after = engine.state()[0]
    assert all(torch.equal(after[name], old) for name, old in before.items())
    assert rounded(engine)
    assert engine.step([batch(1)]).applied


@pytest.mark.parametrize("masters", [True, False])
def test_a_state_goes_on_to_the_bit_and_elsewhere(masters: bool) -> None:
    engine = make()
    taken(engine, 3)
    tensors, numbers = engine.state()
    other = make(masters=masters)
    other.load_state({name: each.clone() for name, each in tensors.items()}, numbers)
    for name, weight in other.trained_weights():
        assert torch.equal(weight, engine.trained[name])
    mine, theirs = engine.step([batch(7)]), other.step([batch(7)])
    if masters:
        assert (mine.loss, mine.grad_norm) == (theirs.loss, theirs.grad_norm)
        assert all(torch.equal(w, engine.trained[n]) for n, w in other.trained_weights())
    else:
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-3)


def test_what_is_held() -> None:
    engine = make()
    numbers = sum(each.numel() for each in engine.trained.values())
    engine.step([batch(1)])
    one = {state: engine.held().of(state) / numbers for state in ("params", "grads", "optim")}
    engine.step([batch(1), batch(2)])
    assert one == {"params": 2, "grads": 2, "optim": 12}
    assert engine.held().of("grads") == 4 * numbers


def test_a_micro_batch_without_labels_is_nothing() -> None:
    given = batch(1)
    empty = MicroBatch(
        given.input_ids,
        given.position_ids,
        torch.full_like(given.targets, IGNORED),
        given.samples,
        given.tokens,
        0,
    )
    result = make().step([empty])
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
