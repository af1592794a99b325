"""Whole models only: what the files lack, or hold as NaN, is refused by name in each way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardtune.config.job import LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.errors import ModelError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.load import check_weights
from shardtune.models.model_files import ModelFiles
from shardtune.models.required_weights import is_finite
from tests.models import encoder_decoder
from tests.models.families import write

Tensors = dict[str, torch.Tensor]


def before_ranks(section: ModelSection) -> None:
    check_weights(ModelFiles(section), NoAdapter())


def whole(section: ModelSection) -> nn.Module:
    return built(section).whole("cpu")


def in_parts(section: ModelSection) -> nn.Module:
    return built(section).in_parts("cpu", lambda part: None)


def quantized(section: ModelSection) -> nn.Module:
    return built(section.model_copy(update={"quantization": "int8"})).whole("cpu")


def built(section: ModelSection) -> PretrainedModelBuilder:
    adapter = LoRA(rank=2, modules_to_save=("embed_tokens",))
    return PretrainedModelBuilder(ModelFiles(section), adapter, TrainSection(precision="fp32"))


WAYS = pytest.mark.parametrize("build", [before_ranks, whole, in_parts, quantized])


def change(folder: Path, changed: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(changed(tensors), path, metadata={"format": "pt"})


@WAYS
def test_a_layer_that_the_file_lacks_is_named(
    tmp_path: Path, build: Callable[[ModelSection], object]
) -> None:
    write(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    layer = f"model.layers.{config['num_hidden_layers'] - 1}"
    with pytest.raises(ModelError, match=rf"9 weights of .* are missing: {layer}") as caught:
        build(ModelSection(name=str(tmp_path)))
    assert "and 1 more" in str(caught.value)


@WAYS
def test_a_shard_without_a_tensor_of_the_index_is_refused(
    tmp_path: Path, build: Callable[[ModelSection], object]
) -> None:
    write(tmp_path, "llama", shard="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    tensors = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    gone, _ = tensors.popitem()
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=gone):
        build(ModelSection(name=str(tmp_path)))


@pytest.mark.parametrize("build", [before_ranks, in_parts])
def test_a_shard_that_is_cut_off_is_refused_in_a_sentence(
    tmp_path: Path, build: Callable[[ModelSection], object]
) -> None:
    write(tmp_path, "llama", shard="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelError, match=f"{shard.name} is no sound safetensors file"):
        build(ModelSection(name=str(tmp_path)))


@pytest.mark.parametrize("build", [whole, in_parts, quantized])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_no_number_is_named(
    tmp_path: Path, build: Callable[[ModelSection], object], value: float
) -> None:
    write(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: Tensors) -> Tensors:
        tensors[name][3, 4] = value
        return tensors

    change(tmp_path, spoil)
    with pytest.raises(ModelError, match=rf"1 of the weights .* hold NaN or infinity: {name}"):
        build(ModelSection(name=str(tmp_path)))


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral"])
def test_files_of_older_versions_are_no_reason_to_refuse(tmp_path: Path, family: str) -> None:
    """A tied head is saved once; tables that are computed today lie in the files; names may lack
    the prefix of the whole model."""
    write(tmp_path, family)
    layer = "h.0.attn" if family == "gpt2" else "layers.0.self_attn"
    tables = {
        f"{layer}.rotary_emb.inv_freq": torch.ones(4),
        f"{layer}.masked_bias": torch.tensor(-1e9),
        "h.0.attn.bias": torch.ones(1, 1, 8, 8),
    }
    if family != "gpt2":
        tables = {f"model.{layer}.rotary_emb.inv_freq": torch.ones(4)}

    def old(tensors: Tensors) -> Tensors:
        return {name.removeprefix("transformer."): each for name, each in tensors.items()} | tables

    change(tmp_path, old)
    section = ModelSection(name=str(tmp_path))
    check_weights(ModelFiles(section), NoAdapter())
    builder = PretrainedModelBuilder(
        ModelFiles(section), NoAdapter(), TrainSection(precision="fp32")
    )
    whole, parts = builder.whole("cpu"), builder.in_parts("cpu", lambda part: None)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", encoder_decoder.FAMILIES)
def test_encoders_with_a_shared_embedding_are_whole(tmp_path: Path, family: str) -> None:
    encoder_decoder.write(tmp_path, family)
    check_weights(ModelFiles(ModelSection(name=str(tmp_path))), NoAdapter())


def test_8_bit_weights_are_looked_at() -> None:
    weight = torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn)
    assert is_finite(weight)
    weight[1] = torch.nan
    assert not is_finite(weight)
