"""The optimizer's states in CPU memory, which a real GPU reads and writes over its bus."""

from __future__ import annotations

import gc
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardtune.checkpoint.snapshot import Snapshot
from shardtune.core.world import World
from shardtune.engine.native import NativeEngine
from shardtune.engine.optim.host_mapped import host_mapped_zeros
from shardtune.kernels import flash_attention as flash
from shardtune.models.packed_attention import use_varlen_attention
from shardtune.parallel.ddp.single_gpu import SplitWeightEngine
from tests.engine.test_activation_offload import SETUP
from tests.models.exact import distance
from tests.synthetic import batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda:0"
CYCLES = 2_000_000_000  # about a second of any GPU of today


def make(*, host_mapped: bool) -> SplitWeightEngine:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=4096, vocab_size=1024, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(DEVICE)
    use_varlen_attention(model, DEVICE, torch.bfloat16)
    rule = replace(SETUP.optimizer, host_mapped=host_mapped)
    setup = replace(SETUP, precision="bf16", loss="fused", split_fp32=True, optimizer=rule)
    return SplitWeightEngine(model, setup, World(device=DEVICE))


def run(made: NativeEngine) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, all that is trained and remembered, and what stays allocated."""
    losses = [made.step([batch(step, rows=2, length=512)]).loss for step in range(4)]
    tensors = {name: each.cpu().clone() for name, each in made.state()[0].items()}
    for weight in made.trained.values():
        weight.grad = None
    gc.collect()
    torch.cuda.synchronize()
    return losses, tensors, torch.cuda.memory_allocated()


def test_steps_are_the_same_to_the_bit_in_ten_bytes_a_weight_less() -> None:
    why = flash.why_unavailable(DEVICE, torch.bfloat16, 8, 8, 128)
    if why is not None:
        pytest.skip(f"no attention that gives the same gradient twice: {why}")
    losses, tensors, most = run(make(host_mapped=False))
    gc.collect()
    torch.cuda.empty_cache()
    engine = make(host_mapped=True)
    found, mine, least = run(engine)
    assert found == losses
    assert all(torch.equal(mine[name], tensors[name]) for name in tensors)
    numbers = sum(weight.numel() for weight in engine.trained.values())
    assert most - least == pytest.approx(10 * numbers, rel=0.02)
    assert engine.held().bytes["optim", "cpu"] == 10 * numbers
    assert all(each.is_pinned() for each in engine.lower_halves.values())


def test_a_copy_waits_for_the_update_and_the_next_update_for_the_copy() -> None:
    """A GPU that is held up writes late; what is saved is what it wrote."""
    engine = make(host_mapped=True)
    engine.step([batch(0, rows=2, length=512)]).read()  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    engine.step([batch(1, rows=2, length=512)])
    snapshot = Snapshot()
    snapshot._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(snapshot._stream):
        torch.cuda._sleep(CYCLES)
    copies = snapshot.take(engine.shards()[0])
    engine.step([batch(2, rows=2, length=512)])
    snapshot.wait()
    other = make(host_mapped=True)
    states = []
    for number in range(3):
        other.step([batch(number, rows=2, length=512)])
        states.append({name: each.double().cpu() for name, each in other.state()[0].items()})
    before, right, after = states
    matrices = [copy for copy in copies if copy.tensor.ndim == 2]
    assert len(matrices) > 3 * 20
    for copy in matrices:
        near = distance(copy.tensor, right[copy.key])
        assert near < 0.1 * distance(before[copy.key], right[copy.key]), copy.key
        assert near < 0.1 * distance(after[copy.key], right[copy.key]), copy.key


def test_a_state_that_is_read_stays_in_main_memory() -> None:
    engine = make(host_mapped=True)
    for number in range(2):
        engine.step([batch(number, rows=2, length=512)])
    tensors, numbers = engine.state()
    kept = {name: each.cpu().clone() for name, each in tensors.items()}
    other = make(host_mapped=True)
    before = torch.cuda.memory_allocated()
    other.load_state(kept, numbers)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    again = other.state()[0]
    assert all(torch.equal(each, again[name].cpu()) for name, each in kept.items())


def test_memory_is_given_back() -> None:
    """The driver forgets it with the last tensor that lies there, and not before."""
    weight = nn.Parameter(torch.empty(1 << 20, device=DEVICE))
    made = host_mapped_zeros(weight.detach(), torch.float32)
    view = made[1:]
    assert made.is_pinned()
    place = made.data_ptr()
    del made
    assert view.is_pinned()
    del view
    again = mmap.mmap(-1, weight.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(again, dtype=torch.float32)
    assert tensor.data_ptr() != place or not tensor.is_pinned()


def test_neighbours_in_main_memory_can_be_copied() -> None:
    """Though the driver knows whole pages, of which a small tensor fills a part."""
    small = torch.empty(300, device=DEVICE)
    mapped, neighbours = [], []
    for _ in range(200):
        mapped.append(host_mapped_zeros(small, torch.float32))
        neighbours.append(torch.randn(1500))
    assert all(torch.equal(each.cuda().cpu(), each) for each in neighbours)
    assert all(each.is_pinned() for each in mapped)
