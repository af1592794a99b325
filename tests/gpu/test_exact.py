"""The same steps twice, on a GPU: to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardtune.config.job import NoAdapter
from shardtune.core.model.document_boundaries import takes_boundaries
from shardtune.core.step import MicroBatch
from shardtune.core.world import World
from shardtune.kernels import flash_attention as flash
from shardtune.models.fused.apply import LayerSetup, apply_fused_layers
from shardtune.models.materialize import decoder_layers
from shardtune.models.packed_attention import use_varlen_attention
from shardtune.parallel.ddp.engine import native_engine
from tests.engine.test_activation_offload import SETUP
from tests.synthetic import batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch.compile warns of what it meets on its way
]
DEVICE = "cuda:0"
SHAPES = {
    "short rows": (128, 8, 2048, False),
    "long rows": (128, 2, 8192, False),
    "narrow heads": (64, 8, 2048, False),
    "packed": (128, 4, 2048, True),
}
"""Width of a head, rows, their length, and whether they hold several documents."""


def micro_batch(seed: int, rows: int, length: int, *, packed: bool) -> MicroBatch:
    given = batch(seed, rows=rows, length=length)
    if not packed:
        return given
    return replace(given, position_ids=given.position_ids % (length // 3))


def run(wide: int, rows: int, length: int, *, packed: bool) -> tuple[list[float], list[Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048, num_hidden_layers=2, num_attention_heads=2048 // wide,
        num_key_value_heads=512 // wide, intermediate_size=2048, vocab_size=1024,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(DEVICE)
    use_varlen_attention(model, DEVICE, torch.bfloat16)
    assert takes_boundaries(model)
    apply_fused_layers(model, decoder_layers(model), NoAdapter(), LayerSetup(compiled=True))
    setup = replace(SETUP, precision="bf16", loss="fused", split_fp32=True)
    made = native_engine(model, setup, World(device=DEVICE))
    losses = [made.step([micro_batch(step, rows, length, packed=packed)]).loss for step in range(3)]
    return losses, [weight.cpu() for _, weight in made.trained_weights()]


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_the_same_to_the_bit(shape: str) -> None:
    """As far as the kernels are: cuDNN's for long rows are not, nor torch's own for packed ones."""
    wide, rows, length, packed = SHAPES[shape]
    why = flash.why_unavailable(DEVICE, torch.bfloat16, 2048 // wide, 512 // wide, wide)
    if why is not None:
        pytest.skip(why)
    losses, weights = run(wide, rows, length, packed=packed)
    for _ in range(2):
        again, others = run(wide, rows, length, packed=packed)
        assert again == losses
        assert all(map(torch.equal, others, weights))
