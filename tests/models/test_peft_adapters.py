"""Every kind of adapter: what peft makes of the saved result, and which layers it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.constants import (
    TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
    TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
)

from shardtune.config.job import IA3, Adapter, LoRA, ModelSection, TrainSection
from shardtune.core.model.architectures import ia3
from shardtune.errors import ModelError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.load_result import load_result
from shardtune.models.materialize import skeleton
from shardtune.models.model_files import ModelFiles
from shardtune.models.peft_adapters import describe_left_out, ia3_modules
from tests.models.families import write

IDS = torch.arange(12).view(1, 12) * 5

ADAPTERS: dict[str, Adapter] = {
    "lora": LoRA(rank=4),
    "dora": LoRA(rank=4, variant="dora"),
    "rslora": LoRA(rank=4, variant="rslora"),
    "pissa": LoRA(rank=4, variant="pissa"),
    "ia3": IA3(),
    "saved": LoRA(rank=4, modules_to_save=("embed_tokens", "lm_head")),
}


def build(folder: Path, adapter: Adapter, **model: Any) -> Any:
    section = ModelSection(name=str(folder), **model)
    return PretrainedModelBuilder(
        ModelFiles(section), adapter, TrainSection(precision="fp32")
    ).whole("cpu")


def disturb(model: Any) -> None:
    """Stands for training: every trained weight moves."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(IDS).logits
    return found


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_peft_loads_what_was_saved(tmp_path: Path, adapter: Adapter, tied: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    write(tmp_path / "model", "llama", tie_word_embeddings=tied)
    model = build(tmp_path / "model", adapter)
    before = logits(model)
    disturb(model)
    after = logits(model)
    assert (before - after).abs().max() > 0.05  # IA3 moves them by 0.08, the others by more
    model.save_pretrained(tmp_path / "result")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "result")
    torch.testing.assert_close(logits(loaded), after, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapter_changes_nothing_before_it_is_trained(tmp_path: Path, adapter: Adapter) -> None:
    original = write(tmp_path, "llama")
    torch.testing.assert_close(
        logits(build(tmp_path, adapter)), logits(original), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_result_of_quantized_weights_comes_back_on_quantized_weights(
    tmp_path: Path, kind: str
) -> None:
    from transformers import GenerationConfig

    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    write(tmp_path / "model", "llama")
    model = build(tmp_path / "model", LoRA(rank=4), quantization=kind)
    disturb(model)
    model.save_pretrained(tmp_path / "result")
    GenerationConfig().save_pretrained(tmp_path / "result")
    section = ModelSection(name=str(tmp_path / "model"), quantization=kind)
    loaded = load_result(str(tmp_path / "result"), ModelFiles(section), "fp32")
    assert torch.equal(logits(loaded), logits(model))


@torch.no_grad()
def test_a_model_that_sees_gets_adapters_where_text_goes_through(tmp_path: Path) -> None:
    """Its encoder of pictures has them where they are asked for by name. peft takes all."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    write(tmp_path / "model", "gemma4")

    def adapted(adapter: LoRA) -> Any:
        model = build(tmp_path / "model", adapter)
        places = {name for name, each in model.named_modules() if name.endswith(".lora_A")}
        return model, any(".vision_tower." in n for n in places), len(places)

    model, in_encoder, found = adapted(LoRA(rank=2))
    text_layers = 6 * 7 - 2 * 2 + 6 * 2 + 1  # two share keys and values; gates and projections
    assert (in_encoder, found) == (False, text_layers)
    left_out = (
        "no adapters in model.vision_tower, model.embed_vision, which text never goes through"
    )
    assert describe_left_out(model, LoRA()) == left_out
    _, in_encoder, found = adapted(LoRA(rank=2, targets=("linear",)))
    assert in_encoder
    disturb(model)
    model.save_pretrained(tmp_path / "result")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "result")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)


def test_ia3_of_a_model_that_sees_scales_what_text_goes_through(tmp_path: Path) -> None:
    write(tmp_path, "mistral3")  # its encoder's layers are called as its decoder's

    def scaled(adapter: IA3) -> list[str]:
        names = (name for name, _ in build(tmp_path, adapter).named_modules())
        return [name for name in names if name.endswith(".ia3_l")]

    default = scaled(IA3())
    assert len(default) == 3 * 3  # keys, values and the end of the MLP in three layers
    assert not any(".vision_tower." in name for name in default)
    assert any(".vision_tower." in name for name in scaled(IA3(targets=("k_proj",))))
    assert "vision_tower" in describe_left_out(build(tmp_path, IA3()), IA3())


def test_experts_that_no_adapter_reaches_are_named(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, DbrxConfig

    config = DbrxConfig(
        vocab_size=100,
        d_model=32,
        n_heads=2,
        n_layers=1,
        max_seq_len=64,
        attn_config={"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={
            "hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2
        },
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = build(tmp_path, LoRA(rank=2))
    assert describe_left_out(model, LoRA(rank=2)).startswith("the experts stay frozen")
    assert not describe_left_out(model, LoRA(rank=2, experts="none"))


def test_rslora_is_stronger_by_the_root_of_the_rank(tmp_path: Path) -> None:
    write(tmp_path, "llama")

    def scaling(adapter: LoRA) -> float:
        layer = build(tmp_path, adapter).get_base_model().model.layers[0].mlp.up_proj
        return float(layer.scaling["default"])

    assert scaling(LoRA(rank=16, alpha=32)) == 2
    assert scaling(LoRA(rank=16, alpha=32, variant="rslora")) == 8


@pytest.mark.parametrize(
    ("family", "wanted", "saved"),
    [
        ("llama", "norm", ["model.norm"]),  # not `input_layernorm`
        ("gpt2", "attn", [f"transformer.h.{n}.attn" for n in range(3)]),  # `c_attn` is inside
        ("llama", "mlp", [f"model.layers.{n}.mlp" for n in range(3)]),
    ],
)
def test_modules_are_saved_that_are_called_so(
    tmp_path: Path, family: str, wanted: str, saved: list[str]
) -> None:
    from peft.utils.other import ModulesToSaveWrapper

    write(tmp_path, family)
    model = build(tmp_path, LoRA(rank=2, modules_to_save=(wanted,))).get_base_model()
    modules = model.named_modules()
    assert [name for name, each in modules if isinstance(each, ModulesToSaveWrapper)] == saved


@pytest.mark.parametrize(
    ("family", "targets", "feedforward"),
    [
        ("llama", {"k_proj", "v_proj", "down_proj"}, {"down_proj"}),
        ("gpt2", {"c_attn", "mlp.c_proj"}, {"mlp.c_proj"}),
        ("gpt_neox", {"query_key_value", "dense_4h_to_h"}, {"dense_4h_to_h"}),
    ],
)
def test_ia3_knows_the_families(
    tmp_path: Path, family: str, targets: set[str], feedforward: set[str]
) -> None:
    """The expected names are those of peft's table."""
    write(tmp_path, family)
    model = skeleton(ModelFiles(ModelSection(name=str(tmp_path))), torch.float32)
    assert tuple(map(set, ia3_modules(model, IA3()))) == (targets, feedforward)


def test_our_table_of_ia3_is_that_of_peft() -> None:
    """The planner has no peft; what it counts and what peft would scale are one table."""
    for family, targets in TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.items():
        linear = {name.rpartition(".")[2] for name in targets}
        assert ia3.ia3_targets(family, linear) == tuple(targets), family
        known = TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(family, ())
        assert set(known) & set(targets) <= set(ia3.ia3_feedforward(family, tuple(targets))), family


def test_ia3_derives_what_peft_does_not_know(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    model = skeleton(ModelFiles(ModelSection(name=str(tmp_path))), torch.float32)
    model.config.model_type = "unheard-of"
    assert ia3_modules(model, IA3()) == (("k_proj", "v_proj", "down_proj"), ("down_proj",))
    chosen = IA3(targets=("v_proj", "up_proj"), feedforward=("up_proj",))
    assert ia3_modules(model, chosen) == (("v_proj", "up_proj"), ("up_proj",))


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (LoRA(targets=("q_prj",)), "adapter.targets.0: .* no linear layer 'q_prj'"),
        (LoRA(modules_to_save=("lm_hed",)), "adapter.modules_to_save.0: .*'lm_hed'"),
        (IA3(targets=("nope",), feedforward=()), "adapter.targets.0: .*'nope'"),
        (IA3(targets=("k_proj",), feedforward=("up_proj",)), "adapter.feedforward: up_proj not"),
    ],
)
def test_names_that_the_model_lacks_are_told(tmp_path: Path, adapter: Adapter, said: str) -> None:
    write(tmp_path, "llama")
    with pytest.raises(ModelError, match=said):
        build(tmp_path, adapter)
