"""All weights on one rank: upper halves in the model, lower ones with the optimizer."""

from __future__ import annotations

import gc
import weakref
from mmap import PAGESIZE
from typing import Any

import pytest
import torch
from torch import Tensor

from shardtune.checkpoint.export import probe_logits
from shardtune.checkpoint.snapshot import Snapshot
from shardtune.config.job import ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup, Precision
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.engine.optim.adamw_split_bf16 import SplitAdamW
from shardtune.engine.optim.build_optimizer import future_moments
from shardtune.engine.optim.host_mapped import Pages, host_mapped_zeros
from shardtune.errors import JobError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.fused.full_finetune import fuse_full
from shardtune.models.materialize import decoder_layers
from shardtune.models.model_files import ModelFiles
from shardtune.parallel.ddp.engine import native_engine
from shardtune.parallel.ddp.single_gpu import SplitWeightEngine
from tests.engine.test_native import batch
from tests.models.exact import distance

RATE = 1e-2


def make(
    precision: Precision = "bf16",
    *,
    split_fp32: bool = True,
    together: bool = False,
    rate: float = RATE,
    loss: Any = "fused",
    host_mapped: bool = False,
) -> NativeEngine:
    train = TrainSection(precision=precision)
    model: Any = PretrainedModelBuilder(
        ModelFiles(ModelSection(name="tiny")), NoAdapter(), train
    ).whole("cpu")
    if together:
        for layer in decoder_layers(model):
            fuse_full(layer, model.config.model_type)
    rule = OptimizerSetup(betas=(0.9, 0.95), weight_decay=0.1, host_mapped=host_mapped)
    schedule = Schedule("constant", rate, 0, 100)
    setup = EngineSetup(precision, rule, schedule, 1.0, 0, loss=loss, split_fp32=split_fp32)
    return native_engine(model, setup, World())


def steps(count: int) -> list[list[MicroBatch]]:
    """Of one micro-batch and of three, in turn."""
    return [[batch(10 * n + k) for k in range(1 + 2 * (n % 2))] for n in range(count)]


def taken(engine: NativeEngine, count: int) -> list[tuple[float, float]]:
    results = [engine.step(given) for given in steps(count)]
    return [(result.loss, result.grad_norm) for result in results]


def gradients(engine: NativeEngine, *given: MicroBatch) -> dict[str, Tensor]:
    engine._begin()
    engine._backward(given, torch.ones(()))
    return {name: each.clone() for name, each in engine.parameters.gradients().items()}


def rounded(engine: NativeEngine) -> bool:
    """Whether the model computes with what is trained, rounded once; what is in the middle between
    two numbers (one in 65,536) goes either way."""
    inside = dict(engine.module().named_parameters())
    return all(
        ((weight - inside[name].float()).abs() <= weight.abs() / 256).all()
        for name, weight in engine.trained_weights()
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["fused", pytest.param("plain", marks=pytest.mark.long)])
@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_as_near_to_fp32_as_autocasts(together: bool, loss: str) -> None:
    """Weight by weight. Half of the tokens are one: its row is the sum of hundreds."""
    given = batch(3, 8, 128)
    given.input_ids[:, ::2] = 7
    engines = (
        make("fp32", split_fp32=False),
        make(split_fp32=False),
        make(together=together, loss=loss),
    )
    right, autocast, ours = (gradients(engine, given) for engine in engines)
    for name, exact in right.items():
        near = distance(autocast[name], exact.double())
        assert distance(ours[name], exact.double()) < 1.5 * near + 0.004, name


def test_losses_follow_those_of_autocast() -> None:
    ours, theirs = taken(make(), 6), taken(make(split_fp32=False), 6)
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in theirs], rel=0.01)


def test_the_model_has_upper_halves_and_the_names_stay() -> None:
    engine = make()
    assert isinstance(engine, SplitWeightEngine)
    inside = dict(engine.module().named_parameters())
    assert inside.keys() == engine.trained.keys()
    assert {each.dtype for each in inside.values()} == {torch.bfloat16}
    assert {each.dtype for _, each in engine.trained_weights()} == {torch.float32}
    assert rounded(engine)
    taken(engine, 3)
    assert rounded(engine)
    causal: Any = engine.module()
    assert causal.get_output_embeddings().weight is causal.get_input_embeddings().weight


def test_updates_below_the_models_precision_are_not_lost() -> None:
    engine = make(rate=1e-7)
    before = {name: weight.clone() for name, weight in engine.trained_weights()}
    copies = [each.detach().clone() for each in engine.module().parameters()]
    taken(engine, 4)
    assert all(not torch.equal(weight, before[name]) for name, weight in engine.trained_weights())
    after = list(engine.module().parameters())
    same = [(a == b).float().mean() for a, b in zip(copies, after, strict=True)]
    assert min(same) > 0.9


def test_micro_batches_are_added_up_in_fp32() -> None:
    engine = make()
    first, second = gradients(engine, batch(1)), gradients(engine, batch(2))
    assert {each.dtype for each in first.values()} == {torch.bfloat16}
    for name, both in gradients(engine, batch(1), batch(2)).items():
        assert both.dtype == torch.float32
        assert torch.equal(both, first[name].float() + second[name].float()), name


def test_a_step_that_is_left_out_leaves_everything() -> None:
    engine = make()
    taken(engine, 2)
    before = {name: each.clone() for name, each in engine.state()[0].items()}
    weight = next(iter(engine.trained.values()))
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    assert not engine.step([batch(1)]).applied
    handle.remove()
    after = engine.state()[0]
    assert all(torch.equal(after[name], old) for name, old in before.items())
    assert rounded(engine)
    assert engine.step([batch(1)]).applied


@pytest.mark.parametrize("split_fp32", [True, False])
def test_a_state_goes_on_to_the_bit_and_elsewhere(split_fp32: bool) -> None:
    engine = make()
    taken(engine, 3)
    tensors, numbers = engine.state()
    other = make(split_fp32=split_fp32)
    other.load_state({name: each.clone() for name, each in tensors.items()}, numbers)
    before = dict(engine.trained_weights())
    assert all(torch.equal(weight, before[name]) for name, weight in other.trained_weights())
    mine, theirs = engine.step([batch(7)]), other.step([batch(7)])
    if split_fp32:
        assert (mine.loss, mine.grad_norm) == (theirs.loss, theirs.grad_norm)
        after = dict(engine.trained_weights())
        assert all(torch.equal(weight, after[name]) for name, weight in other.trained_weights())
    else:
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-3)


def test_what_is_held() -> None:
    engine = make()
    numbers = sum(each.numel() for each in engine.trained.values())
    engine.step([batch(1)])
    one = {state: engine.held().of(state) / numbers for state in ("params", "grads", "optim")}
    engine.step([batch(1), batch(2)])
    assert one == {"params": 2, "grads": 2, "optim": 10}
    assert engine.held().of("grads") == 4 * numbers


def test_paged_states_are_the_same_and_lie_elsewhere() -> None:
    """Here on a CPU, where it makes no difference; `tests/gpu/test_paged.py` has a bus."""
    plain, mapped = make(), make(host_mapped=True)
    assert taken(plain, 3) == taken(mapped, 3)
    home: dict[Any, int] = mapped.held().bytes
    assert home["optim", "cpu"] == plain.held().of("optim")
    assert ("optim", "gpu") not in home
    tensors, numbers = mapped.state()
    assert all(torch.equal(each, tensors[name]) for name, each in plain.state()[0].items())
    other = make(host_mapped=True)
    other.load_state({name: each.clone() for name, each in tensors.items()}, numbers)
    assert isinstance(other.optimizer, SplitAdamW)
    for weight, places in other.optimizer.places.items():
        kept = other.optimizer.state[weight]
        found = [kept[key].data_ptr() for key in ("exp_avg", "exp_avg_sq")]
        assert found == [place.data_ptr() for place in places]
    mine, theirs = mapped.step([batch(7)]), other.step([batch(7)])
    assert (mine.loss, mine.grad_norm) == (theirs.loss, theirs.grad_norm)


def test_nothing_on_the_device_is_kept_free_for_what_is_paged() -> None:
    setup = OptimizerSetup(host_mapped=True)
    assert future_moments(make().trained.values(), setup) == []


def test_memory_that_can_not_be_had_is_said_with_its_size() -> None:
    """No machine has addresses for so much. What the driver answers comes the same way."""
    with pytest.raises(JobError, match=r"no 4,503,599,627,370,496 bytes of CPU memory more.*alloc"):
        host_mapped_zeros(torch.empty(1 << 50, device="meta"), torch.float32)


def test_what_is_paged_shares_no_page_with_other_tensors() -> None:
    """The driver is told of whole pages."""
    made = [host_mapped_zeros(torch.empty(count), torch.int16) for count in (3, 2048, 2049)]
    for each in made:
        assert each.data_ptr() % PAGESIZE == 0
        assert torch.equal(each, torch.zeros(each.shape, dtype=torch.int16))
    pages = {each.data_ptr() + at for each in made for at in range(0, each.nbytes, PAGESIZE)}
    assert len(pages) == 4


def test_pages_live_as_long_as_any_view_of_them() -> None:
    made = host_mapped_zeros(torch.empty(4, 1024), torch.float32)
    kept = [each for each in gc.get_objects() if type(each) is Pages]
    watched = [weakref.ref(each) for each in kept]
    kept.clear()
    view = made[3]
    del made
    before = sum(each() is not None for each in watched)
    assert view.sum() == 0
    del view
    assert sum(each() is not None for each in watched) == before - 1


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


def test_pieces_are_the_state() -> None:
    """Weights are put together as they are copied; until then a piece has their form alone."""
    engine = make()
    taken(engine, 2)
    pieces, numbers = engine.shards()
    tensors, same = engine.state()
    assert numbers == same
    assert {piece.key for piece in pieces} == tensors.keys()
    assert all(piece.bytes == tensors[piece.key].nbytes for piece in pieces)
    weights = [piece for piece in pieces if piece.key.startswith("weight.")]
    assert all(piece.tensor.untyped_storage().nbytes() == 4 for piece in weights)
    for copy in Snapshot().take(pieces):
        assert torch.equal(copy.tensor, tensors[copy.key])
        assert copy.value() is copy.tensor


def test_a_model_with_fp32_buffers_answers() -> None:
    """It multiplies them with its weights; only an engine computes under autocast by itself."""
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    config = OpenAIGPTConfig(vocab_size=67, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model = OpenAIGPTLMHeadModel(config)
    schedule = Schedule("constant", RATE, 0, 100)
    setup = EngineSetup("bf16", OptimizerSetup(), schedule, 1.0, 0, split_fp32=True)
    engine = native_engine(model, setup, World())
    given = batch(1)
    probe = MicroBatch(
        given.input_ids % 67, given.position_ids, given.targets % 67, (), given.tokens, given.labels
    )
    assert engine.step([probe]).loss > 0
    assert probe_logits(engine.module(), probe).isfinite().all()
