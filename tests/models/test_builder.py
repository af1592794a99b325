"""Model builders: whole and in parts give the same model, bit for bit, and bad files are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardtune.config.job import IA3, Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.errors import ModelError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from tests.models.families import FAMILIES, write

ADAPTERS: dict[str, Adapter] = {
    "none": NoAdapter(),
    "lora": LoRA(rank=4),
    "dora": LoRA(rank=4, variant="dora"),
    "rslora": LoRA(rank=4, variant="rslora"),
    "pissa": LoRA(rank=4, variant="pissa"),
    "ia3": IA3(),
}


def builder(
    name: str | Path, adapter: Adapter | None = None, precision: str = "fp32", **train: Any
) -> PretrainedModelBuilder:
    section = TrainSection(precision=precision, **train)
    return PretrainedModelBuilder(
        ModelFiles(ModelSection(name=str(name))), adapter or NoAdapter(), section
    )


def leave(part: nn.Module) -> None:
    pass


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """Names, sharing, dtypes, what is trained, and every bit."""
    ours = dict(one.named_parameters(remove_duplicate=False))
    theirs = dict(other.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    assert len(set(ours.values())) == len(set(theirs.values()))
    for name, parameter in ours.items():
        assert parameter.requires_grad == theirs[name].requires_grad, name
        assert parameter.dtype == theirs[name].dtype, name
        assert torch.equal(parameter, theirs[name]), name
    modes = {name: module.training for name, module in other.named_modules()}
    assert {name: module.training for name, module in one.named_modules()} == modes
    buffers = dict(other.named_buffers())
    assert dict(one.named_buffers()).keys() == buffers.keys()
    for name, buffer in one.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


CASES = [(family, "lora", "bf16") for family in FAMILIES]
CASES += [("llama", adapter, "bf16") for adapter in ADAPTERS if adapter != "lora"]
CASES += [("gpt2", "pissa", "fp32"), ("gpt2", "ia3", "fp32"), ("gpt_neox", "none", "fp32")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "kind", "precision"), CASES)
def test_both_ways_give_the_same_weights(
    tmp_path: Path, family: str, kind: str, precision: str
) -> None:
    write(tmp_path, family)
    plan = builder(tmp_path, ADAPTERS[kind], precision)
    parts: list[str] = []
    built = plan.in_parts("cpu", lambda part: parts.append(type(part).__name__))
    assert_same(built, plan.whole("cpu"))
    assert len(parts) == 4  # three layers and the root
    assert len(set(parts[:3])) == 1
    compute = torch.bfloat16 if precision == "bf16" else torch.float32
    for parameter in built.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else compute)


def test_both_ways_train_what_the_code_of_transformers_freezes(tmp_path: Path) -> None:
    """Loading it, transformers forgets that; what isn't trained would be missing in a result."""
    write(tmp_path, "ernie4_5_moe")
    plan = builder(tmp_path)
    built = plan.in_parts("cpu", leave)
    assert_same(built, plan.whole("cpu"))
    assert all(weight.requires_grad for weight in built.parameters())


def test_a_part_gets_memory_when_its_turn_comes_and_not_before(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    plan = builder(tmp_path, LoRA(rank=4))
    roots: list[Any] = []
    plan.in_parts("cpu", roots.append)  # to know the layers' names
    sizes: list[int] = []
    seen: list[nn.Module] = []

    def divide(part: nn.Module) -> None:
        assert not any(p.is_meta for p in part.parameters())
        sizes.append(sum(p.numel() for p in part.parameters() if p not in known))
        known.update(part.parameters())
        seen.append(part)

    known: set[nn.Parameter] = set()
    model = plan.in_parts("cpu", divide)
    assert seen[-1] is model
    whole = sum(p.numel() for p in roots[-1].parameters())
    root = 2 * 67 * 32 + 32  # embedding, head, last norm
    assert sizes == [(whole - root) // 3] * 3 + [root]


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_the_head_too_stays_so(tmp_path: Path, tied: bool) -> None:
    write(tmp_path, "llama", tie_word_embeddings=tied)
    model: Any = builder(tmp_path).in_parts("cpu", leave)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.sampled(2)
@pytest.mark.parametrize("saved", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
@pytest.mark.parametrize("tied", [True, False])
def test_modules_that_are_trained_whole(tmp_path: Path, saved: tuple[str, ...], tied: bool) -> None:
    original = write(tmp_path, "llama", tie_word_embeddings=tied)
    plan = builder(tmp_path, LoRA(rank=4, modules_to_save=saved), "bf16")
    built: Any = plan.in_parts("cpu", leave)
    assert_same(built, plan.whole("cpu"))
    base = built.get_base_model()
    trained = {
        "embed_tokens": base.model.embed_tokens,
        "lm_head": base.lm_head,
    }
    for name in saved:
        copy = trained[name].modules_to_save["default"].weight
        assert copy.requires_grad
        assert copy.dtype == torch.float32
        expected = (
            original.get_input_embeddings()
            if tied
            else original.get_submodule("lm_head" if name == "lm_head" else "model.embed_tokens")
        )
        assert torch.equal(copy, expected.weight.bfloat16().float())
    if tied:  # what trains one trains the other
        copies = {module.modules_to_save["default"].weight for module in trained.values()}
        assert len(copies) == 1


def test_resized_embeddings(tmp_path: Path) -> None:
    model = write(tmp_path / "old", "llama")
    model.resize_token_embeddings(71, mean_resizing=False)
    model.save_pretrained(tmp_path / "new")
    adapter = LoRA(rank=4, modules_to_save=("embed_tokens", "lm_head"))
    plan = builder(tmp_path / "new", adapter)
    built = plan.in_parts("cpu", leave)
    assert_same(built, plan.whole("cpu"))
    assert built(torch.tensor([[70, 3]])).logits.shape == (1, 2, 71)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_in_several_files(tmp_path: Path, family: str) -> None:
    write(tmp_path, family, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    plan = builder(tmp_path, LoRA(rank=4))
    assert_same(plan.in_parts("cpu", leave), plan.whole("cpu"))


def test_files_of_a_bare_decoder(tmp_path: Path) -> None:
    """As GPT-2's own files are: no name before the layers, and old buffers that nobody reads."""
    write(tmp_path, "gpt2")

    def bare(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        old = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}
        return {name.removeprefix("transformer."): t for name, t in tensors.items()} | old

    rewrite(tmp_path, bare)
    plan = builder(tmp_path)
    assert_same(plan.in_parts("cpu", leave), plan.whole("cpu"))


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def test_missing_and_unexpected_weights_are_named(tmp_path: Path) -> None:
    write(tmp_path, "llama")

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        moved = tensors.pop("model.layers.1.mlp.up_proj.weight")
        return tensors | {"model.layers.1.mlp.up_prj.weight": moved}

    rewrite(tmp_path, spoil)
    with pytest.raises(ModelError) as caught:
        builder(tmp_path).in_parts("cpu", leave)
    missing, unexpected = caught.value.problems
    assert "1 weights" in missing.fact
    assert "are missing: model.layers.1.mlp.up_proj.weight" in missing.fact
    assert "no place in the model: model.layers.1.mlp.up_prj.weight" in unexpected.fact


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    rewrite(tmp_path, lambda t: t | {"model.norm.weight": torch.ones(33)})
    with pytest.raises(ModelError, match=r"model.norm.weight.*\(33,\).*\(32,\)"):
        builder(tmp_path).in_parts("cpu", leave)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        builder(tmp_path).in_parts("cpu", leave)


def test_a_file_of_the_index_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, "llama", shard="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        builder(tmp_path).in_parts("cpu", leave)


def test_adapters_start_from_the_seed_and_their_name_alone(tmp_path: Path) -> None:
    write(tmp_path, "llama")

    def first(seed: int, targets: tuple[str, ...]) -> dict[str, torch.Tensor]:
        plan = builder(tmp_path, LoRA(rank=4, targets=targets), seed=seed)
        return {n: p for n, p in plan.whole("cpu").named_parameters() if "lora_A" in n}

    few, many = first(0, ("q_proj",)), first(0, ("k_proj", "up_proj", "q_proj"))
    for name, weight in few.items():
        assert torch.equal(weight, many[name])
    one, two = list(few.values())[:2]
    assert not torch.equal(one, two)
    assert not torch.equal(one, first(1, ("q_proj",))[next(iter(few))])


def test_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    before = torch.get_rng_state()
    builder(tmp_path, LoRA()).in_parts("cpu", leave)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpointing_is_on_in_both_ways(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    plan = builder(tmp_path, LoRA(), gradient_checkpointing="full")
    for model in (plan.whole("cpu"), plan.in_parts("cpu", leave)):
        assert model.get_base_model().is_gradient_checkpointing  # type: ignore[operator,union-attr]
