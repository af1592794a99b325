"""peft's LoRA layers with a shorter way to compute: the same numbers, names and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import Tensor, nn

from shardtune.config.job import LoRA, ModelSection, TrainSection
from shardtune.core.model import fused_families as families
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.fused.activation_checkpointing import checkpoint_activations
from shardtune.models.fused.apply import pack_weights
from shardtune.models.fused.known_source import say_once
from shardtune.models.fused.lora import (
    GATE_UP,
    QKV,
    FusedDecoderLayer,
    FusedLoRALinear,
    LoRAMLP,
    LoRASharedInput,
    fuse_lora,
)
from shardtune.models.materialize import decoder_layers
from shardtune.models.model_files import ModelFiles
from tests.adapting import add_adapter
from tests.conftest import Logged
from tests.models.families import write

pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

SHAPE = {
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
OTHERS = {
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "phi3": {"original_max_position_embeddings": 64},
    "starcoder2": {
        "use_bias": True,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}
# Of each family: modules of a layer that join (or close) their products.
JOINED = {
    "llama": (LoRASharedInput, LoRAMLP),
    "mistral": (LoRASharedInput, LoRAMLP),
    "qwen2": (LoRASharedInput, LoRAMLP),  # with biases
    "qwen3": (LoRASharedInput, LoRAMLP),
    "smollm3": (LoRASharedInput, LoRAMLP),
    "granite": (LoRASharedInput, LoRAMLP),
    "olmo2": (LoRASharedInput, LoRAMLP),
    "gemma": (LoRASharedInput, LoRASharedInput),  # GELU
    "gemma2": (LoRASharedInput, LoRASharedInput),
    "gemma3_text": (LoRASharedInput, LoRASharedInput),
    "starcoder2": (LoRASharedInput,),  # with biases; its MLP has no gate
    "mixtral": (LoRASharedInput,),  # and its experts
    "qwen3_moe": (LoRASharedInput,),
    "olmoe": (LoRASharedInput,),
    "gpt_oss": (LoRASharedInput,),
    "phi3": (LoRAMLP,),  # one layer for queries, keys and values, one for gate and up
    "falcon": (),  # one layer for queries, keys and values; its MLP has no gate
    "olmo": (),  # of no known family: each layer by itself
}
LAYERS = {"phi3": 4, "falcon": 4, "starcoder2": 6}
LAYERS |= dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "gpt_oss"), 4)
"""Linear layers of a decoder layer, where they aren't seven."""
IDS = torch.tensor([[3, 9, 27, 14, 42, 59, 43, 62, 52], [5, 25, 58, 22, 43, 14, 3, 15, 8]])


def base_of(family: str, **changes: Any) -> Any:
    """A small model with weights of a size that shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        shape = SHAPE | OTHERS.get(family, {}) | changes
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    return model


def model_of(family: str, adapter: LoRA | None = None, **changes: Any) -> Any:
    adapted = add_adapter(base_of(family, **changes), adapter or LoRA(rank=4, alpha=8), seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zeros, which would hide the adapters
                nn.init.normal_(parameter, std=0.2)
    return adapted


def quickened(adapted: Any) -> Any:
    causal = adapted.get_base_model()
    layers = decoder_layers(causal)
    for layer in layers:
        fuse_lora(layer, causal.config.model_type)
    pack_weights(layers)
    return adapted


def loss_and_gradients(model: Any) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(0)  # of dropout
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad
    }


def assert_alike(model: Any, expected: tuple[float, dict[str, Tensor]]) -> None:
    loss, gradients = loss_and_gradients(model)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert gradients.keys() == expected[1].keys()
    for name, right in expected[1].items():
        assert (gradients[name] - right).norm() <= 1e-5 * right.norm(), name


def kinds(model: Any, *wanted: type) -> list[type]:
    """Which of `wanted` the modules are, in their order."""
    return [kind for module in model.modules() for kind in wanted if isinstance(module, kind)]


def test_every_family_is_here() -> None:
    assert set(JOINED) >= families.SHARED_INPUT_FAMILIES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", sorted(JOINED))
def test_loss_and_gradients_are_those_of_peft(family: str) -> None:
    model = model_of(family)
    before = loss_and_gradients(model)
    names = [type(module).__name__ for module in decoder_layers(model.get_base_model())]
    quickened(model)
    assert_alike(model, before)
    assert tuple(kinds(model, LoRASharedInput, LoRAMLP)) == JOINED[family] * 2
    assert len(kinds(model, FusedLoRALinear)) == 2 * LAYERS.get(family, 7)
    after = [type(module).__name__ for module in decoder_layers(model.get_base_model())]
    assert after == names  # transformers looks for layers by their class's name


@pytest.mark.parametrize(
    ("targets", "joined"),
    [
        (("q_proj", "v_proj"), ()),
        (("q_proj", "k_proj", "v_proj"), (LoRASharedInput,)),
        (("gate_proj", "up_proj"), (LoRASharedInput,)),
        (("up_proj", "down_proj"), ()),
        (("gate_proj", "up_proj", "down_proj"), (LoRAMLP,)),
    ],
    ids=str,
)
def test_some_layers_only(targets: tuple[str, ...], joined: tuple[type, ...]) -> None:
    model = model_of("qwen2", LoRA(rank=4, targets=targets))
    before = loss_and_gradients(model)
    quickened(model)
    assert_alike(model, before)
    assert tuple(kinds(model, LoRASharedInput, LoRAMLP)) == joined * 2
    assert len(kinds(model, FusedLoRALinear)) == 2 * len(targets)


@pytest.mark.parametrize(
    ("adapter", "joined"),
    [
        (LoRA(rank=4, variant="rslora"), (LoRASharedInput, LoRAMLP)),
        (LoRA(rank=4, variant="pissa"), (LoRASharedInput, LoRAMLP)),
        (LoRA(rank=4, modules_to_save=("embed_tokens", "lm_head")), (LoRASharedInput, LoRAMLP)),
        (LoRA(rank=4, variant="dora"), (LoRASharedInput, LoRASharedInput)),
    ],
    ids=["rslora", "pissa", "modules_to_save", "dora"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without biases, and with them
def test_variants_are_fused(family: str, adapter: LoRA, joined: tuple[type, ...]) -> None:
    model = model_of(family, adapter).train()
    for name, parameter in model.named_parameters():
        if "magnitude" in name:  # as if it had been trained
            parameter.data *= torch.linspace(0.5, 1.5, len(parameter))
    before = loss_and_gradients(model)
    quickened(model)
    assert_alike(model, before)
    assert len(kinds(model, FusedLoRALinear)) == 14
    assert tuple(kinds(model, LoRASharedInput, LoRAMLP)) == joined * 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of what it meets on its way
def test_dora_is_compiled_as_a_whole() -> None:
    model = model_of("llama", LoRA(rank=4, variant="dora")).train()
    before = loss_and_gradients(model)
    for layer in decoder_layers(quickened(model).get_base_model()):
        checkpoint_activations(layer, "none")
        layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    assert_alike(model, before)


def test_what_stays_as_it_is_says_why(logged: Logged) -> None:
    say_once.cache_clear()
    model = model_of("llama", LoRA(rank=4, variant="dora", dropout=0.5)).eval()
    before = loss_and_gradients(model)
    assert_alike(quickened(model), before)
    assert not kinds(model, FusedLoRALinear)
    quickened(model_of("llama", LoRA(rank=4, targets=("q_proj", "v_proj"))))
    assert logged.text.splitlines() == [
        "LoRA layers run as peft computes them: "
        "DoRA with dropout drops the frozen layer's input, too",
        "q_proj, v_proj: not one product with the others, which have no such adapter",
    ]
    say_once.cache_clear()


def test_ranks_that_differ() -> None:
    """By a rank pattern: queries, keys and values are one product all the same."""
    causal = base_of("llama")
    config = LoraConfig(r=4, target_modules="all-linear", rank_pattern={"q_proj": 8, "up_proj": 2})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = get_peft_model(causal, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.2)
    before = loss_and_gradients(model)
    assert_alike(quickened(model), before)
    assert kinds(model, LoRASharedInput, LoRAMLP) == [LoRASharedInput] * 4


def test_dropout_is_fused_and_is_off_in_evaluation() -> None:
    model = model_of("llama", LoRA(rank=4, dropout=0.5)).eval()
    before = loss_and_gradients(model)
    quickened(model)
    assert len(kinds(model, FusedLoRALinear)) == 14
    assert kinds(model, LoRASharedInput, LoRAMLP) == [LoRASharedInput, LoRAMLP] * 2
    assert_alike(model, before)
    model.train()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(float(model(input_ids=IDS, labels=IDS, use_cache=False).loss.detach()))
    assert losses[0] == losses[1] != losses[2]


def test_a_joint_result_may_be_as_wide_as_the_input() -> None:
    """32 wide: 16 queries, 8 keys and 8 values."""
    model = model_of("llama", head_dim=4)
    before = loss_and_gradients(model)
    quickened(model)
    assert_alike(model, before)
    assert kinds(model, LoRASharedInput, LoRAMLP) == [LoRASharedInput, LoRAMLP] * 2


@pytest.mark.parametrize("family", sorted(families.SHARED_INPUT_FAMILIES))
def test_where_nothing_is_in_between_queries_and_keys_are_turned_at_once(family: str) -> None:
    model = quickened(model_of(family))
    turned = [
        m.fuses_rope
        for m in model.modules()
        if isinstance(m, LoRASharedInput) and hasattr(m, "q_proj")
    ]
    apart = 0 if family == "phi3" else 2  # its queries, keys and values are one layer
    assert turned == [family in families.ROPE_FAMILIES] * apart


@pytest.mark.parametrize("family", sorted(families.SHARED_INPUT_FAMILIES))
def test_which_layers_add_to_what_goes_past_them(family: str) -> None:
    """Fails where transformers writes one of them in other words: see `LAYER`."""
    model = quickened(model_of(family))
    layers = decoder_layers(model.get_base_model())
    assert [isinstance(layer, FusedDecoderLayer) for layer in layers] == [
        family in families.RESIDUAL_FAMILIES
    ] * 2
    left = [layer.self_attn.o_proj.deferred for layer in layers]
    assert left == [family in families.RESIDUAL_FAMILIES] * 2


def test_a_layer_that_is_watched_is_not_left_to_others() -> None:
    model = model_of("llama")
    before = loss_and_gradients(model)
    quickened(model)
    seen: list[Any] = []
    for layer in decoder_layers(model.get_base_model()):
        last = layer.self_attn.o_proj
        last.register_forward_hook(lambda module, given, result: seen.append((given[0], result)))
    assert_alike(model, before)
    given, result = seen[0]
    assert not torch.equal(given, result)


def test_weights_with_one_input_stand_together() -> None:
    model = quickened(model_of("llama"))
    assert joined_weights(model) == 4
    for layer in decoder_layers(model.get_base_model()):
        for module, names in ((layer.self_attn, QKV), (layer.mlp, GATE_UP)):
            assert getattr(module, names[-1]).base_layer.spare_rows == 4 * len(names)


def test_another_adapter_is_computed_as_peft_does() -> None:
    plain, model = model_of("llama"), model_of("llama")
    for each in (plain, model):
        torch.manual_seed(2)
        each.add_adapter("other", LoraConfig(r=4, target_modules=["o_proj", "gate_proj"]))
        for name, parameter in each.named_parameters():
            if ".other." in name:
                nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        quickened(model)
        for each in (plain, model):
            each.set_adapter("other")
        expected = plain(input_ids=IDS).logits
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_biases_of_an_mlp_keep_it_open() -> None:
    model = model_of("llama", mlp_bias=True, attention_bias=True)
    before = loss_and_gradients(model)
    quickened(model)
    assert_alike(model, before)
    assert kinds(model, LoRASharedInput, LoRAMLP) == [LoRASharedInput] * 4


@torch.no_grad()
def test_disabled_merged_and_unmerged() -> None:
    plain, model = model_of("qwen2").eval(), quickened(model_of("qwen2")).eval()

    def logits(of: Any) -> Tensor:
        return of(input_ids=IDS, use_cache=False).logits

    adapted = logits(plain)
    with plain.disable_adapter(), model.disable_adapter():
        assert torch.equal(logits(model), logits(plain))
        assert (logits(model) - adapted).norm() > 0.1 * adapted.norm()
    model.merge_adapter()
    torch.testing.assert_close(logits(model), adapted, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), adapted, rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload()
    assert not kinds(merged, FusedLoRALinear)
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_answers_are_those_of_peft() -> None:
    """Word by word, with a cache: rows of one token."""
    plain, model = model_of("llama").eval(), quickened(model_of("llama")).eval()
    told = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 5, "do_sample": False}
    expected = plain.generate(input_ids=IDS, **told)
    assert torch.equal(model.generate(input_ids=IDS, **told), expected)


def test_under_autocast_products_are_in_its_precision() -> None:
    model = quickened(model_of("llama").bfloat16())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    layer = next(module for module in model.modules() if isinstance(module, FusedLoRALinear))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 3, 32)).dtype == torch.bfloat16
        _, gradients = loss_and_gradients(model)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_saved_files_are_those_of_peft(tmp_path: Path) -> None:
    plain, model = model_of("llama"), quickened(model_of("llama"))
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "quick")
    assert list(model.state_dict()) == list(plain.state_dict())
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "quick").iterdir()) == names
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        ours, theirs = ((tmp_path / kind / name).read_bytes() for kind in ("quick", "plain"))
        assert ours == theirs
    with safe_open(tmp_path / "quick" / "adapter_model.safetensors", "pt") as file:
        assert len(list(file.keys())) == 2 * 14


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's own, when its compiler is imported
def test_only_a_job_with_compiled_layers_has_them(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    section = ModelSection(name=str(tmp_path))
    for kernels, count in (("compiled", 21), ("eager", 0)):
        train = TrainSection(precision="fp32", kernels=kernels)
        for build in ("whole", "in_parts"):
            builder = PretrainedModelBuilder(ModelFiles(section), LoRA(rank=4), train)
            further = () if build == "whole" else (lambda part: None,)
            model = getattr(builder, build)("cpu", *further)
            assert len(kinds(model, FusedLoRALinear)) == count
            whole = build == "whole" and kernels == "compiled"
            assert joined_weights(model) == (6 if whole else 0)


def joined_weights(model: Any) -> int:
    """Modules whose layers with one input have their weights in one piece of memory."""
    count = 0
    for layer in decoder_layers(model.get_base_model()):
        for module, names in ((layer.self_attn, QKV), (layer.mlp, GATE_UP)):
            weights = [getattr(module, name).base_layer.weight for name in names]
            count += len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    return count
