"""Head and loss in pieces give what they give at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardtune.core.step import IGNORED
from shardtune.core.world import World
from shardtune.kernels import linear_cross_entropy as module
from shardtune.kernels.linear_cross_entropy import FusedLoss, fused_loss
from tests.conformance.guarantees import builder, setup, strategy_of
from tests.conformance.table import ROWS, Row
from tests.numerics.test_factorisations import loader
from tests.ranks import on_ranks

WIDTH, VOCABULARY, TOKENS = 16, 50, 600


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 rows each, so that 600 tokens take three."""
    monkeypatch.setattr(module, "loss_chunk_rows", lambda vocab: 256)


def given(dtype: torch.dtype) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw))
    hidden = torch.randn(2, TOKENS // 2, WIDTH, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (2, TOKENS // 2), generator=draw)
    targets[:, ::3] = IGNORED
    return head, hidden, targets


def plain(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        head(hidden).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_are_those_of_the_whole(dtype: torch.dtype) -> None:
    head, hidden, targets = given(dtype)
    expected = plain(head, hidden, targets)
    leaves = (hidden, head.weight, head.bias)
    wanted = torch.autograd.grad(expected * 0.7, leaves)
    fused = FusedLoss(head)
    with fused.returning_loss(targets):
        loss = head(hidden)
    found = torch.autograd.grad(loss * 0.7, leaves)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for mine, theirs in zip(found, wanted, strict=True):
        # The pieces score in fp32 whatever they are given, as the plain loss does.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert head(hidden).shape == (2, TOKENS // 2, VOCABULARY)  # logits again outside


def test_a_frozen_head_gets_no_gradient() -> None:
    head, hidden, targets = given(torch.float32)
    head.requires_grad_(False)
    with FusedLoss(head).returning_loss(targets):
        head(hidden).backward()
    assert hidden.grad is not None
    assert head.weight.grad is None


def test_judging_counts_what_the_model_would_choose() -> None:
    head, hidden, targets = given(torch.float32)
    logits = head(hidden)
    chosen = ((logits.argmax(-1) == targets) & (targets != IGNORED)).sum().item()
    expected = plain(head, hidden, targets).item()
    with torch.no_grad(), FusedLoss(head).evaluating(targets):
        loss, correct = head(hidden).tolist()
    assert correct == chosen
    assert loss == pytest.approx(expected, rel=1e-6)


SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("gemma3_text", {"final_logit_softcapping": 2.0}),
        ("granite", {"logits_scaling": 0.25}),
        ("cohere", {"logit_scale": 5.0}),
        ("falcon_h1", {"lm_head_multiplier": 0.25, **MAMBA}),
        ("llama", {}),
    ],
)
def test_a_model_that_bends_its_logits_has_the_loss_of_those(
    family: str, more: dict[str, float]
) -> None:
    """Loss, gradients and score of the whole model, beside transformers' own logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **more, **ends))
    model.get_output_embeddings().weight.data.normal_()
    ids = torch.randint(0, 40, (2, TOKENS // 2))
    targets = ids.roll(-1, dims=1)
    targets[:, ::3] = IGNORED
    logits = model(input_ids=ids).logits
    expected = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    wanted = torch.autograd.grad(expected, weights)
    fused = fused_loss(model)
    assert fused is not None
    with fused.returning_loss(targets):
        loss = model(input_ids=ids).logits
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for mine, theirs in zip(torch.autograd.grad(loss, weights), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad(), fused.evaluating(targets):
        score, correct = model(input_ids=ids).logits.tolist()
    assert score == pytest.approx(expected.item(), rel=1e-6)
    assert correct == ((logits.argmax(-1) == targets) & (targets != IGNORED)).sum().item()
    torch.testing.assert_close(model(input_ids=ids).logits, logits)  # bent again outside


def test_a_model_that_does_something_else_to_its_logits_is_left_alone() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert fused_loss(model) is not None
    model.config.logits_scaling = 2.0  # by a family whose code nobody here has read
    assert fused_loss(model) is None


def test_a_family_whose_forward_pass_ends_in_its_own_way_is_left_alone() -> None:
    """Nothing in its config has a name that is known: its code says so."""
    from transformers import AutoModelForCausalLM, RecurrentGemmaConfig

    model = AutoModelForCausalLM.from_config(RecurrentGemmaConfig(**SIZES))
    assert fused_loss(model) is None


def run(world: World, row: Row, loss: str) -> list[float]:
    data = loader(True, world.rank, world.size, 2)
    settings = replace(setup(world.size), loss=loss)
    with strategy_of(row).build(builder("tiny", row.adapter), settings, world) as engine:
        results = [engine.step(given) for given in data.steps(0, 3)]
        found = engine.evaluate("d", next(data.steps(0, 1)))
    figures = [each for r in results for each in (r.loss, r.grad_norm)]
    return [*figures, found.loss, found.accuracy]


@pytest.mark.parametrize(
    "name",
    [
        *("ddp-full", "ddp-lora", "fsdp-full", "fsdp-qlora"),
        pytest.param("zero3-full", marks=pytest.mark.long),
    ],
)
def test_a_step_is_the_same_under(name: str) -> None:
    row = next(row for row in ROWS if row.id == name)
    if row.needs:
        pytest.importorskip(row.needs)
    expected = on_ranks(row.ranks, run, row, "plain")
    assert on_ranks(row.ranks, run, row, "fused") == [
        pytest.approx(each, rel=2e-6) for each in expected
    ]
