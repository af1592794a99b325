"""What layers keep for the backward pass, counted; and that what is computed twice is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from shardtune.config.job import Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.core.model.document_boundaries import VARLEN_DETERMINISTIC, varlen_inputs
from shardtune.core.setup import Recompute
from shardtune.kernels import flash_attention as flash
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.fused.activation_checkpointing import checkpoint_activations
from shardtune.models.fused.lora import fuse_lora
from shardtune.models.materialize import decoder_layers
from shardtune.models.model_files import ModelFiles
from shardtune.models.packed_attention import register
from tests.adapting import add_adapter
from tests.conftest import Logged
from tests.kernels.test_flash_attention import ByHand
from tests.models.families import write
from tests.models.test_fused_lora import base_of

IDS = torch.arange(32).view(2, 16) * 2
TOKENS = IDS.numel()
HIDDEN, INNER, HEADS, KEYS, RANK = 64, 176, 4, 32, 4


def gradients(model: Any, **more: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False, **more).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [NoAdapter(), LoRA(rank=4)], ids=["all", "lora"])
def test_gradients_are_the_same_to_the_bit(tmp_path: Path, adapter: Adapter) -> None:
    write(tmp_path, "llama", intermediate_size=96)  # wide enough for `mlp` to drop it
    section, found = ModelSection(name=str(tmp_path)), {}
    levels: tuple[Recompute, ...] = ("none", "mlp", "most", "full")
    for level in levels:
        train = TrainSection(precision="fp32", gradient_checkpointing=level)
        model: Any = (
            PretrainedModelBuilder(ModelFiles(section), adapter, train).whole("cpu").train()
        )
        found[level] = gradients(model)
    for level in levels[1:]:
        assert all(torch.equal(found[level][n], right) for n, right in found["none"].items())


@pytest.mark.parametrize("level", ["none", "mlp", "most"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {}),  # its router changes in place what topk gives
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("gpt_oss", {}),  # its experts add biases in place
    ],
    ids=["mixtral", "qwen3_moe", "gpt_oss"],
)
def test_what_mixtures_change_in_place_is_saved_before(
    family: str, changes: dict[str, Any], level: Recompute
) -> None:
    sizes = {"vocab_size": 64, "intermediate_size": 64, **changes}
    plain, saving = (base_of(family, **sizes).train() for _ in range(2))
    for layer in decoder_layers(saving):
        checkpoint_activations(layer, level)
    right = gradients(plain)
    assert all(torch.equal(each, right[name]) for name, each in gradients(saving).items())


def test_in_evaluation_nothing_is_wrapped(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    train = TrainSection(precision="fp32", gradient_checkpointing="most")
    model: Any = PretrainedModelBuilder(
        ModelFiles(ModelSection(name=str(tmp_path))), NoAdapter(), train
    ).whole("cpu")
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):
        model.train()(input_ids=IDS, use_cache=False)
        training = len(saved)
        model.eval()(input_ids=IDS, use_cache=False)
    assert len(saved) - training > training


# Compiled ----------------------------------------------------------------------------------------


def compiled(level: Recompute, layers: int, attention: str = "sdpa") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config)
    adapted = add_adapter(model, LoRA(rank=RANK), seed=0)
    for layer in decoder_layers(model):
        fuse_lora(layer, "llama")
        checkpoint_activations(layer, level)
        layer.compile(backend="aot_eager_decomp_partition")
    return adapted.train()


def kept_by(layer: nn.Module, model: nn.Module, run: Callable[[], object]) -> int:
    """Numbers a token that `layer` saves while the model runs, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage().data_ptr()
        if memory not in weights:
            saved.setdefault(memory, tensor)
        return tensor

    inside: Any = layer._compiled_call_impl

    def watched(*given: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return inside(*given, **named)

    layer._compiled_call_impl = watched  # type: ignore[assignment]
    run()
    layer._compiled_call_impl = inside
    return sum(tensor.numel() for tensor in saved.values()) // TOKENS


def expected(level: Recompute, hidden: int, keys: int, inner: int, heads: int, rank: int) -> int:
    """Numbers a token that a layer with LoRA on all its linear layers keeps, counted by hand."""
    if level == "full":
        return hidden
    attention = hidden + heads  # the result, and the logarithm of each row's sum
    narrow = (3 + 1 + 1) * rank  # what adapters make of qkv, o and down
    products = {
        "none": (hidden + 2 * keys) + hidden + 2 * (inner + rank) + narrow,  # qkv, o, gate and up
        "mlp": (hidden + 2 * keys) + hidden + narrow,
        "most": 0,
    }
    norms = 2  # a number for each
    return hidden + attention + norms + products[level]


POSITIONS = 2 * (HIDDEN // HEADS) // len(IDS)  # sines and cosines of a row, which all layers share


def test_the_table_in_the_docs() -> None:
    """For the sizes of an 8 B Llama."""
    page = (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
    levels: tuple[Recompute, ...] = ("none", "mlp", "most", "full")
    begins = tuple(f"| `{level}` | " for level in levels)
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith(begins)]
    found = {row[0].strip("| `"): int(row[2].replace(",", "")) for row in rows}
    assert found == {level: expected(level, 4096, 1024, 14336, 32, 16) for level in levels}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what it meets on its way
def test_what_layers_keep(logged: Logged) -> None:
    for level, layers, graphs in (("none", 12, 2), ("mlp", 1, 1), ("most", 1, 1)):
        torch._dynamo.reset()
        counters.clear()
        model = compiled(level, layers)
        if layers == 1:
            model.get_base_model().enable_input_require_grads()
        last = decoder_layers(model.get_base_model())[-1]
        kept = kept_by(last, model, lambda model=model: gradients(model))
        assert kept == POSITIONS + expected(level, HIDDEN, KEYS, INNER, HEADS, RANK)
        # The first layer's input needs no gradient; all others are alike.
        assert counters["stats"]["unique_graphs"] == graphs
        assert not counters["graph_break"]
        gradients(model)
        assert counters["stats"]["unique_graphs"] == graphs
    assert "context_fn" not in logged.text  # torch's warning is for others


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["none", "mlp", "most"])
def test_what_layers_keep_of_attention_that_writes_scores_down(level: Recompute) -> None:
    """Two matmuls like any others: rows of 16 tokens aren't wider than a head of 16."""
    torch._dynamo.reset()
    model = compiled(level, 2, "eager")
    last = decoder_layers(model.get_base_model())[-1]
    kept = kept_by(last, model, lambda: gradients(model))
    length = IDS.shape[1]
    fused = POSITIONS + expected(level, HIDDEN, KEYS, INNER, HEADS, RANK)
    scores = -HIDDEN if level == "most" else HEADS * length
    assert kept == fused - HEADS + scores + length  # the mask, which all layers share


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
@pytest.mark.parametrize("level", ["none", "mlp"])
def test_they_keep_no_more_for_a_length_that_is_not_known(
    level: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in every run with packed documents: two short rows show first that those are kept apart,
    and tell the compiler that lengths vary. It once kept the joint product to ask for its size."""
    monkeypatch.setattr(flash, "_kernels", ByHand())
    register()

    def told(length: int) -> dict[str, Any]:
        places = torch.arange(length).expand(len(IDS), -1)
        return {"position_ids": places, **varlen_inputs(places, lambda tensor: tensor)}

    def kept(*before: int) -> int:
        torch._dynamo.reset()
        model = compiled(level, 1)
        base = model.get_base_model()
        base.set_attn_implementation(VARLEN_DETERMINISTIC)
        with torch.no_grad():
            for length in before:
                model(input_ids=IDS[:, :length], use_cache=False, **told(length))
        base.enable_input_require_grads()
        (layer,) = decoder_layers(base)
        counters.clear()
        found = kept_by(layer, model, lambda: gradients(model, **told(IDS.shape[1])))
        assert counters["stats"]["unique_graphs"] == 1
        return found

    assert kept(4, 8) == kept()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_any_number_of_rows_shares_what_is_compiled() -> None:
    torch._dynamo.reset()
    model = compiled("none", 1)
    for rows in (2, 3, 4):  # the second tells the compiler that rows vary
        if rows == 4:
            counters.clear()
        ids = torch.arange(rows * 16).view(rows, 16)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert not counters["stats"]["unique_graphs"]
