"""Activations that wait in CPU memory come back as they were. On a CPU the copies are plain ones;
everything else is what runs on a GPU, but for the streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from shardtune.config.job import LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.lr_schedule import Schedule
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.world import World
from shardtune.engine import activation_offload as module
from shardtune.engine.activation_offload import Offload
from shardtune.engine.native import NativeEngine
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.materialize import decoder_layers
from shardtune.models.model_files import ModelFiles
from shardtune.parallel.ddp.engine import native_engine
from tests.ranks import on_ranks
from tests.synthetic import batch

CPU = torch.device("cpu")
SETUP = EngineSetup("fp32", OptimizerSetup(), Schedule("constant", 1e-2, 0, 100), 1.0, 0)


class Stack(nn.Module):
    """Layers that save what they read and what they make of it."""

    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    @property
    def config(self) -> Stack:
        return self

    def get_text_config(self) -> Stack:
        return self

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


class Watched(module._InlineCopies):
    """Notes what goes out and comes back, and how much of it is there at a time."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.fetched: list[int] = []

    def send(self, here: Tensor, host: Tensor) -> Any:
        self.sent.append(here.numel())
        super().send(here, host)

    def fetch(self, host: Tensor, copied: Any, device: torch.device) -> tuple[Tensor, Any]:
        self.fetched.append(host.numel())
        return super().fetch(host, copied, device)


@pytest.fixture(autouse=True)
def small_things_move(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "SMALLEST_OFFLOADED", 1 << 10)
    monkeypatch.setattr(module, "UNTOLD", 1 << 12)
    monkeypatch.setattr(module, "SLAB", 1 << 16)
    yield
    torch._dynamo.reset()


def watched(model: nn.Module) -> tuple[Offload, Watched]:
    offload = Offload(model, CPU)
    offload._copies = copies = Watched()
    return offload, copies


def gradients(model: nn.Module, x: Tensor, offload: Offload | None = None) -> list[Tensor]:
    model.zero_grad()
    if offload is None:
        loss = model(x)
    else:
        with offload.saving():
            loss = model(x)
    loss.backward()
    if offload is not None:
        offload.done()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def test_gradients_are_the_same_to_the_bit() -> None:
    model, x = Stack(), torch.randn(64, 32)
    offload, copies = watched(model)
    for _ in range(3):
        assert same(gradients(model, x, offload), gradients(model, x))
    assert copies.sent
    assert copies.fetched


def test_a_pass_sends_each_storage_once_and_no_weight() -> None:
    model, x = Stack(), torch.randn(64, 32)
    offload, copies = watched(model)
    gradients(model, x, offload)
    # The input, and each tanh's result, which the next layer reads too; 64 x 32 x 4 bytes.
    assert copies.sent == [8192] * 5


def test_what_the_last_layer_saves_stays_from_the_second_pass_on() -> None:
    model, x = Stack(), torch.randn(64, 32)
    offload, copies = watched(model)
    gradients(model, x, offload)
    copies.sent.clear()
    gradients(model, x, offload)
    # Five storages over four layers: 1.25 of them stay, of which one is whole.
    assert copies.sent == [8192] * 4


def test_a_longer_pass_leaves_no_more_behind() -> None:
    """A batch after a shorter one must not fill the device with what was taken for its end."""
    model = Stack()
    offload, copies = watched(model)
    gradients(model, torch.randn(64, 32), offload)
    copies.sent.clear()
    gradients(model, torch.randn(256, 32), offload)
    assert copies.sent == [4 * 8192] * 5


def test_little_is_on_the_device_at_a_time() -> None:
    model, x = Stack(layers=16), torch.randn(64, 32, requires_grad=True)
    offload, _ = watched(model)
    gradients(model, x, offload)
    there: list[int] = []

    def look(*_: Any) -> None:
        assert offload._pass is not None
        there.append(sum(kept.here is not None for kept in offload._pass._kept))

    for layer in model.layers:
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
    gradients(model, x, offload)
    assert len(there) == 2 * 16
    assert max(there) <= 2  # of 17: one at work and one on its way


def test_it_comes_back_before_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(layers=8), torch.randn(64, 32)
    offload, copies = watched(model)
    late: list[int] = []
    original = module._Pass.unpack

    def unpack(self: Any, packed: Any) -> Tensor:
        if not isinstance(packed, Tensor) and packed.kept.here is None:
            late.append(packed.kept.index)
        return original(self, packed)

    monkeypatch.setattr(module._Pass, "unpack", unpack)
    gradients(model, x, offload)
    late.clear()  # nobody knew what a layer saves
    copies.fetched.clear()
    gradients(model, x, offload)
    # Of nine storages one stays, and one is still there when the backward pass begins.
    assert len(copies.fetched) == 7
    assert not late


def test_buffers_are_used_again() -> None:
    model, x = Stack(), torch.randn(64, 32)
    offload, _ = watched(model)
    gradients(model, x, offload)
    slabs = [slab.data_ptr() for slab in offload._pool._slabs]
    for _ in range(3):
        gradients(model, x, offload)
    assert [slab.data_ptr() for slab in offload._pool._slabs] == slabs
    assert len(slabs) == 1  # 5 x 8 KiB in 64 KiB


def test_views_come_back_with_their_strides() -> None:
    """Transposed, with gaps, expanded: compiled graphs look at the strides of what was saved."""
    model = Stack()
    offload, copies = watched(model)
    base = torch.randn(64, 32)
    views = [base.T, base[:, 4:20], base[:1].expand(64, 32), base.view(-1)[::2]]
    with offload.saving():
        assert offload._pass is not None
        packed = [offload._pass.pack(view) for view in views]
        offload._pass.pack(torch.randn(64, 32))  # and so the first has left
    for view, each in zip(views, packed, strict=True):
        found = offload._pass.unpack(each)
        assert torch.equal(found, view)
        assert found.stride() == view.stride()
        assert found.data_ptr() != view.data_ptr()
    assert copies.sent == [8192] * 2


def test_changes_in_place_are_told_apart() -> None:
    offload, copies = watched(Stack())
    tensor = torch.zeros(64, 32)
    with offload.saving():
        assert offload._pass is not None
        before = offload._pass.pack(tensor)
        tensor.add_(1)
        after = offload._pass.pack(tensor)
    assert offload._pass.unpack(before).sum() == 0
    assert offload._pass.unpack(after).sum() == 64 * 32
    assert copies.sent == [8192] * 2


def test_memory_that_is_used_again_is_not_mistaken_for_what_was_there() -> None:
    """An allocator gives the same address to the next tensor of that size."""
    offload, copies = watched(Stack())
    with offload.saving():
        assert offload._pass is not None
        packed = [offload._pass.pack(torch.full((64, 32), float(n))) for n in range(20)]
    assert len(copies.sent) == 20
    assert [float(offload._pass.unpack(each)[0, 0]) for each in packed] == list(range(20))


def test_a_dry_run_has_nothing_to_move() -> None:
    """Fake tensors have no memory, and asking for its address is an error."""
    with FakeTensorMode():
        model, x = Stack(), torch.randn(64, 32)
        offload, copies = watched(model)
        gradients(model, x, offload)
    assert not copies.sent


def test_a_saved_tensor_may_be_asked_for_twice() -> None:
    offload, _ = watched(Stack())
    with offload.saving():
        assert offload._pass is not None
        packed = offload._pass.pack(torch.ones(64, 32))
    assert offload._pass.unpack(packed).sum() == 64 * 32
    assert offload._pass.unpack(packed).sum() == 64 * 32


def test_a_backward_pass_after_the_next_forward_pass_is_refused() -> None:
    model, x = Stack(), torch.randn(64, 32)
    offload, _ = watched(model)
    with offload.saving():
        loss = model(x)
    with offload.saving():
        model(x)
    with pytest.raises(AssertionError, match="after the forward pass of another"):
        loss.backward()


# In the engine ------------------------------------------------------------------------------------


def engine(
    *, offload: bool, world: World | None = None, backend: str = "", **train: Any
) -> NativeEngine:
    section = TrainSection(precision="fp32", **train)
    adapter = LoRA(rank=4) if not backend else NoAdapter()
    model = PretrainedModelBuilder(ModelFiles(ModelSection(name="tiny")), adapter, section).whole(
        "cpu"
    )
    if backend:
        for layer in decoder_layers(model):
            layer.compile(backend=backend)
    setup = replace(SETUP, offload_activations=offload)
    return native_engine(model, setup, world or World())


def steps(made: NativeEngine) -> tuple[list[float], dict[str, Tensor]]:
    losses = [made.step([batch(2 * n), batch(2 * n + 1)]).loss for n in range(3)]
    return losses, dict(made.trained_weights())


def alike(mine: NativeEngine, theirs: NativeEngine) -> bool:
    (losses, weights), (others, expected) = steps(mine), steps(theirs)
    return losses == others and all(torch.equal(weights[n], expected[n]) for n in expected)


def watch(made: NativeEngine) -> Watched:
    offload = made.forward_pass.activation_offload
    assert offload is not None
    offload._copies = copies = Watched()
    return copies


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_steps_are_the_same_to_the_bit(checkpointing: str) -> None:
    mine = engine(offload=True, gradient_checkpointing=checkpointing)
    copies = watch(mine)
    assert alike(mine, engine(offload=False, gradient_checkpointing=checkpointing))
    assert copies.fetched


def test_of_a_checkpointed_layer_only_the_input_moves() -> None:
    made = engine(offload=True, gradient_checkpointing="full")
    copies = watch(made)
    hidden = made.model.config.hidden_size * 4 * 2 * 16
    made.step([batch(0)])
    layers = made.model.config.num_hidden_layers
    assert copies.sent[:layers] == [hidden] * layers
    # Behind the layers: norm, head and loss. Nothing that is computed again in the backward pass.
    sent = len(copies.sent)
    plain = engine(offload=True)
    more = watch(plain)
    plain.step([batch(0)])
    assert sent < len(more.sent) - 2 * layers


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what it meets on its way
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.process
def test_compiled_layers_hand_over_what_they_save(backend: str, checkpointing: str) -> None:
    settings = {"backend": backend, "gradient_checkpointing": checkpointing}
    expected = engine(offload=False, **settings)
    losses, weights = steps(expected)
    torch._dynamo.reset()
    counters.clear()
    mine = engine(offload=True, **settings)
    copies = watch(mine)
    first = mine.step([batch(0), batch(1)]).loss
    assert len(copies.sent) > mine.model.config.num_hidden_layers
    compiled = dict(counters["stats"])
    others = [first, *(mine.step([batch(2 * n), batch(2 * n + 1)]).loss for n in (1, 2))]
    assert counters["stats"]["unique_graphs"] == compiled["unique_graphs"]
    assert not counters["graph_break"]
    assert others == losses
    found = dict(mine.trained_weights())
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def _on_rank(world: World, offload: bool) -> list[float]:
    module.SMALLEST_OFFLOADED = 1 << 10  # in a process of its own
    with engine(offload=offload, world=world) as made:
        return [made.step([batch(n + world.rank)]).loss for n in range(2)]


@pytest.mark.long
def test_copies_of_the_model_meet_as_ever() -> None:
    assert on_ranks(2, _on_rank, True) == on_ranks(2, _on_rank, False)
