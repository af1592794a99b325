"""Attention by boundaries with the GPU's own kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from shardtune.core.model.document_boundaries import document_ends, takes_boundaries, varlen_inputs
from shardtune.engine.host_to_device import sent
from shardtune.kernels import flash_attention as flash
from shardtune.models import packed_attention as attention
from shardtune.models.packed_attention import describe_attention, use_varlen_attention
from shardtune.models.packing_check import require_document_isolation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # compilers warn of what they meet on their way
]

FLASH = "FlashAttention 4"


@pytest.fixture(autouse=True, params=["torch's kernels", FLASH])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs with both, where there are both."""
    if request.param == FLASH:
        why = flash.why_unavailable("cuda", torch.bfloat16, 4, 2, 64)
        if why is not None:
            pytest.skip(why)
    else:
        monkeypatch.setattr(flash, "why_unavailable", lambda *_, **__: "a test wants it so")
    return str(request.param)


@pytest.fixture
def attend(kernels: str) -> Callable[..., tuple[Tensor, None]]:
    return (
        attention.deterministic_varlen_attention if kernels == FLASH else attention.varlen_attention
    )


LENGTHS = ((100, 28, 384), (512,), (1, 255, 256))
"""Of the documents in each row."""


def positions_of(rows: tuple[tuple[int, ...], ...] = LENGTHS) -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def exact(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """`[rows, heads, length, dim]` in float64 with a dense mask."""
    document = (positions == 0).cumsum(1).cuda()
    seen = (document[:, :, None] == document[:, None, :]).tril()
    key, value = (
        each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value)
    )
    found = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
    return found.transpose(1, 2)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_as_float64_with_a_dense_mask(attend, dim: int):
    torch.manual_seed(0)
    positions = positions_of()
    given = [
        torch.randn(3, 512, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads in (8, 2, 2)
    ]
    ours = [each.clone().requires_grad_() for each in given]
    right = [each.double().requires_grad_() for each in given]
    ends = document_ends(positions).cuda()
    found, _ = attend(torch.nn.Identity(), *ours, None, cu_seq_lens_q=ends, max_length_q=512)
    expected = exact(*right, positions)
    outer = torch.randn_like(found)
    pairs = [
        (found, expected),
        *zip(
            torch.autograd.grad(found, ours, outer),
            torch.autograd.grad(expected, right, outer.double()),
            strict=True,
        ),
    ]
    for near, value in pairs:
        distance = (near.double() - value).norm() / value.norm()
        assert distance < 0.01  # a bf16 number is within 0.004 of what it stands for


def test_rows_of_one_document(attend):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 300, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    layer = torch.nn.Identity()
    layer.num_key_value_groups = 4  # type: ignore[assignment]
    found, _ = attend(layer, query, key, value, None, max_length_q=512, scaling=0.2)
    repeated = (each.double().repeat_interleave(4, 1) for each in (key, value))
    expected = functional.scaled_dot_product_attention(
        query.double(), *repeated, is_causal=True, scale=0.2
    ).transpose(1, 2)
    assert (found.double() - expected).norm() / expected.norm() < 0.01


@pytest.fixture
def model() -> Iterator[LlamaForCausalLM]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    made = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    yield made
    torch._dynamo.reset()


def logits(model: LlamaForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    send = partial(sent, device=torch.device("cuda"))
    told = varlen_inputs(positions, send) if takes_boundaries(model) else {}
    there = send(positions)
    return model(input_ids=ids, position_ids=there, use_cache=False, **told).logits


def test_a_model_gives_what_it_gives_with_a_mask(model: LlamaForCausalLM, kernels: str):
    ids = torch.randint(0, 500, (3, 512), device="cuda")
    expected = logits(model, ids, positions_of()).double()
    use_varlen_attention(model, "cuda", torch.bfloat16)
    assert takes_boundaries(model)
    assert describe_attention(model).startswith(f"attention: {kernels}")
    found = logits(model, ids, positions_of()).double()
    assert (found - expected).norm() / expected.norm() < 0.02
    require_document_isolation(model, rows=3, device="cuda", precision="bf16")


def test_weights_in_fp32_under_autocast(model: LlamaForCausalLM):
    """Rotary embeddings make fp32 of queries and keys there, which the kernel doesn't take."""
    model.float()
    use_varlen_attention(model, "cuda", torch.bfloat16)
    require_document_isolation(model, rows=3, device="cuda", precision="bf16")


def test_nothing_waits_for_the_gpu(model: LlamaForCausalLM):
    use_varlen_attention(model, "cuda", torch.bfloat16)
    ids = torch.randint(0, 500, (3, 512), device="cuda")
    rows = (positions_of(), torch.arange(512).expand(3, -1))
    for positions in rows:  # kernels are loaded
        logits(model, ids, positions).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for positions in rows:
            logits(model, ids, positions).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_layers_are_compiled_once(model: LlamaForCausalLM):
    use_varlen_attention(model, "cuda", torch.bfloat16)
    ids = torch.randint(0, 500, (3, 512), device="cuda")
    expected = logits(model, ids, positions_of()).double()
    counter = CompileCounterWithBackend("inductor")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    found = logits(model, ids, positions_of())
    assert (found.double() - expected).norm() / expected.norm() < 0.02
    found.float().logsumexp(-1).sum().backward()
    made = counter.frame_count
    for rows in (((512,), (256, 256), (5, 507)), tuple((8,) * 64 for _ in range(3))):
        logits(model, ids, positions_of(rows)).sum().backward()
    assert counter.frame_count <= 2 * made  # once more, with a list of boundaries of any size
