"""Activations that wait in pinned memory, with the streams of a real GPU."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardtune.core.step import MicroBatch
from shardtune.core.world import World
from shardtune.engine.activation_offload import SMALLEST_OFFLOADED, Offload
from shardtune.engine.native import NativeEngine
from shardtune.kernels import flash_attention as flash
from shardtune.models.fused.activation_checkpointing import checkpoint_whole_layers
from shardtune.models.packed_attention import use_varlen_attention
from tests.engine.test_activation_offload import SETUP, Stack
from tests.synthetic import batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch.compile warns of what it meets on its way
]
DEVICE = "cuda:0"
LAYERS, HIDDEN, TOKENS = 12, 1024, 8192
INPUT = TOKENS * HIDDEN * 2  # bytes that flow between two layers, in bf16
CYCLES = 2_000_000_000  # about a second of any GPU of today


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def llama(*, checkpointing: bool, compiled: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=4096, vocab_size=1024, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)
    use_varlen_attention(model, DEVICE, torch.bfloat16)
    model.requires_grad_(False)
    for layer in model.model.layers:  # as adapters do: little is trained, in every layer
        layer.input_layernorm.weight.requires_grad_(True)
    if checkpointing:
        checkpoint_whole_layers(model)
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    return model  # type: ignore[no-any-return]


def engine(*, offload: bool, checkpointing: bool, compiled: bool) -> NativeEngine:
    model = llama(checkpointing=checkpointing, compiled=compiled)
    setup = replace(SETUP, precision="bf16", loss="fused", offload_activations=offload)
    return NativeEngine(model, setup, World(device=DEVICE))


def rows(seed: int) -> MicroBatch:
    return batch(seed, rows=4, length=TOKENS // 4)


def run(made: NativeEngine, steps: int = 4) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights, and the most that was allocated once what is saved is known."""
    losses = []
    for step in range(steps):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        losses.append(made.step([rows(2 * step), rows(2 * step + 1)]).loss)
    torch.cuda.synchronize()
    weights = {name: weight.cpu() for name, weight in made.trained_weights()}
    return losses, weights, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["all", "inputs"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_steps_are_the_same_to_the_bit_in_less_memory(checkpointing: bool, compiled: bool) -> None:
    why = flash.why_unavailable(DEVICE, torch.bfloat16, 8, 8, HIDDEN // 8)
    if why is not None:
        pytest.skip(f"no attention that gives the same gradient twice: {why}")
    settings = {"checkpointing": checkpointing, "compiled": compiled}
    losses, weights, most = run(engine(offload=False, **settings))
    torch._dynamo.reset()  # which knows the model
    gc.collect()
    torch.cuda.empty_cache()
    found, mine, least = run(engine(offload=True, **settings))
    assert found == losses
    assert all(torch.equal(mine[name], weights[name]) for name in weights)
    # Of twelve layers three or four are there at a time; a layer keeps its input at the least.
    assert most - least > 6 * INPUT


def test_gradients_survive_memory_that_is_used_again_at_once() -> None:
    """Large tensors, little computing: copies lag behind, and freed blocks are in demand."""
    torch.manual_seed(0)
    model = Stack(layers=24, width=512).to(DEVICE)
    offload = Offload(model, torch.device(DEVICE))
    for step in range(6):
        x = torch.randn(16384 * (1 + step % 2), 512, device=DEVICE)  # 32 MiB, then 64
        assert x.nbytes > SMALLEST_OFFLOADED
        expected = torch.autograd.grad(model(x), tuple(model.parameters()))
        with offload.saving():
            loss = model(x)
        found = torch.autograd.grad(loss, tuple(model.parameters()))
        offload.done()
        assert all(map(torch.equal, found, expected))


def test_the_host_does_not_wait() -> None:
    """The whole pass is enqueued while the GPU is held up before its first operation."""
    model = Stack(layers=16, width=512).to(DEVICE)
    offload = Offload(model, torch.device(DEVICE))
    x = torch.randn(8192, 512, device=DEVICE)

    def passed() -> None:
        with offload.saving():
            loss = model(x)
        loss.backward()
        offload.done()

    for _ in range(3):  # pinned memory is asked for, kernels are loaded
        passed()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    since = time.perf_counter()
    passed()
    enqueued = time.perf_counter() - since
    torch.cuda.synchronize()
    assert enqueued < 0.5 * (time.perf_counter() - since)
