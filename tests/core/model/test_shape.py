"""Shapes of models: every tensor of every family, against transformers and peft themselves."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from shardtune.config.job import IA3, LoRA
from shardtune.core.model.adapter_size import ia3_parameters, lora_parameters
from shardtune.core.model.architectures import SHAPE_READERS, read_shape
from shardtune.core.model.architectures.ia3 import ia3_modules
from shardtune.core.model.flops import attention_flops, matmul_flops, matmul_flops_per_token
from shardtune.core.model.known_models import known_model
from shardtune.core.model.quantized_size import frozen_bytes, quantizable
from shardtune.core.model.shape import LAYER_PARTS, ModelShape
from shardtune.errors import ModelError
from shardtune.models.expert_layers import modules_of_routers
from shardtune.models.peft_adapters import insert_adapters
from shardtune.plan.estimate.workload import AdapterSize
from tests.adapting import add_adapter

Config = dict[str, Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # GPT-BigCode uses it
    # peft says so of the experts, to which it does apply the pattern
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),
]

USUAL: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
}
GPT2: Config = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100}
T5: Config = {
    "d_model": 64,
    "d_kv": 8,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "vocab_size": 100,
}
LATENT: Config = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
MIXTURE: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

GEMMA4: Config = {
    **USUAL,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 90,
}

TINY: dict[str, tuple[str, Config]] = {
    "apertus": ("apertus", USUAL),
    "codegen": ("codegen", {**GPT2, "rotary_dim": 8}),
    "gemma4_text": ("gemma4_text", {**GEMMA4, "use_double_wide_mlp": True}),
    "gemma4_text with experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **USUAL,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "persimmon": ("persimmon", USUAL),
    "xglm": (
        "xglm",
        {
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 3,
            "attention_heads": 4,
            "vocab_size": 100,
        },
    ),
    "llama": ("llama", USUAL),
    "llama with biases": ("llama", {**USUAL, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {**USUAL, "tie_word_embeddings": True, "head_dim": 24}),
    "granite": ("granite", USUAL),
    "smollm3": ("smollm3", USUAL),
    "mistral": ("mistral", USUAL),
    "mixtral": ("mixtral", {**USUAL, "num_local_experts": 4}),
    "qwen2": ("qwen2", USUAL),
    "qwen2_moe": (
        "qwen2_moe",
        {**USUAL, **MIXTURE, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen3": ("qwen3", USUAL),
    "qwen3_moe": ("qwen3_moe", {**USUAL, **MIXTURE, "decoder_sparse_step": 2}),
    "gemma": ("gemma", USUAL),
    "gemma2": ("gemma2", USUAL),
    "gemma3_text": ("gemma3_text", {**USUAL, "num_hidden_layers": 7}),
    "olmo": ("olmo", USUAL),
    "olmo2": ("olmo2", USUAL),
    "olmoe": ("olmoe", {**USUAL, "num_experts": 4}),
    "phi3": ("phi3", USUAL),
    "starcoder2": ("starcoder2", USUAL),
    "nemotron": ("nemotron", {**USUAL, "head_dim": 16}),
    "gpt_oss": ("gpt_oss", {**USUAL, "num_local_experts": 4}),
    "arcee": ("arcee", USUAL),
    "cohere": ("cohere", USUAL),
    "cohere with norms of heads": ("cohere", {**USUAL, "use_qk_norm": True}),
    "cohere2": ("cohere2", USUAL),
    "ernie4_5": ("ernie4_5", {**USUAL, "use_bias": True}),
    "exaone4": ("exaone4", USUAL),
    "glm": ("glm", USUAL),
    "glm4": ("glm4", USUAL),
    "granitemoe": ("granitemoe", {**USUAL, "num_local_experts": 4}),
    "helium": ("helium", {**USUAL, "head_dim": 16}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**USUAL, "head_dim": 16}),
    "ministral": ("ministral", {**USUAL, "head_dim": 16}),
    "olmo3": ("olmo3", USUAL),
    "seed_oss": ("seed_oss", USUAL),
    "stablelm": ("stablelm", {**USUAL, "use_qkv_bias": True}),
    "stablelm in parallel": (
        "stablelm",
        {**USUAL, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "deepseek_v2": ("deepseek_v2", {**USUAL, **LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**USUAL, **LATENT, "q_lora_rank": 24}),
    "gpt2": ("gpt2", GPT2),
    "gpt_bigcode": ("gpt_bigcode", GPT2),
    "gpt_bigcode with all heads": ("gpt_bigcode", {**GPT2, "multi_query": False}),
    "gptj": ("gptj", {**GPT2, "rotary_dim": 8}),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "vocab_size": 100,
            "attention_types": [[["global", "local"], 2]],
        },
    ),
    "gpt_neox": ("gpt_neox", USUAL),
    "falcon": ("falcon", USUAL),
    "falcon in groups": (
        "falcon",
        {**USUAL, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon in sequence": ("falcon", {**USUAL, "parallel_attn": False, "multi_query": False}),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100}),
    "phi": ("phi", {**USUAL, "qk_layernorm": True}),
    "opt": ("opt", {**USUAL, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt with a narrow embedding": (
        "opt",
        {**USUAL, "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 100}),
    "t5": ("t5", T5),
    "t5 gated": ("t5", {**T5, "feed_forward_proj": "gated-gelu"}),
    "mt5": ("mt5", T5),
    "bart": (
        "bart",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 80,
            "decoder_ffn_dim": 96,
            "vocab_size": 100,
        },
    ),
}
SEQ2SEQ = ("t5", "mt5", "bart")
ALL = pytest.mark.parametrize(("family", "config"), TINY.values(), ids=TINY)


def shape_of(family: str, config: Config) -> ModelShape:
    return read_shape({"model_type": family, **config}, family)


def model_of(family: str, config: Config) -> nn.Module:
    """The real architecture, without memory for its weights."""
    auto = AutoModelForSeq2SeqLM if family in SEQ2SEQ else AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = auto.from_config(AutoConfig.for_model(family, **config))
    return model


def short(name: str) -> str:
    """A tensor's name as we write it: within its layer, or its last parts."""
    inside = re.sub(r"^(?:.*?\.)?(?:layers|h|blocks?)\.\d+\.", "", name)
    return inside if inside != name else ".".join(name.split(".")[-2:])


def test_every_family_is_tried() -> None:
    assert {family for family, _ in TINY.values()} == set(SHAPE_READERS)


@ALL
def test_every_tensor_is_the_one_that_transformers_makes(family: str, config: Config) -> None:
    # As sorted sizes: GPT-2 and GPT-OSS store some of them the other way round.
    real = Counter(
        (short(name), tuple(sorted(parameter.shape)))
        for name, parameter in model_of(family, config).named_parameters()
    )
    ours: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for weight in shape_of(family, config).weights:
        if weight.parameter:
            name = weight.name if weight.part in LAYER_PARTS else short(weight.name)
            ours[name, tuple(sorted(weight.shape))] += weight.times
    assert ours == real


def tensors(
    family: str, config: Config
) -> tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]:
    """Sizes of all parameters, ours and those of transformers."""
    real = Counter(tuple(sorted(each.shape)) for each in model_of(family, config).parameters())
    ours: Counter[tuple[int, ...]] = Counter()
    for weight in shape_of(family, config).weights:
        if weight.parameter:
            ours[tuple(sorted(weight.shape))] += weight.times
    return ours, real


@ALL
def test_a_config_as_transformers_saves_it(family: str, config: Config) -> None:
    """As `merge` and full fine-tuning write it: some keys bear other names than as published."""
    saved = json.loads(AutoConfig.for_model(family, **config).to_json_string())
    del saved["model_type"]
    ours, real = tensors(family, saved)
    assert ours == real
    assert sum(real.values()) == sum(tensors(family, config)[1].values())


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen2", {"num_key_value_heads": None}),
        ("qwen3", {"num_key_value_heads": None}),
        ("ernie4_5", {"num_key_value_heads": None, "head_dim": None}),
        ("seed_oss", {"num_key_value_heads": None, "head_dim": None}),
        ("bart", {"tie_word_embeddings": False}),
        ("deepseek_v2", {"mlp_bias": True}),
    ],
)
def test_null_and_rare_keys_mean_what_they_mean_to_transformers(
    family: str, change: Config
) -> None:
    ours, real = tensors(family, {**TINY[family][1], **change})
    assert ours == real


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gpt_neox", "intermediate_size"),
        ("opt", "ffn_dim"),
        ("persimmon", "intermediate_size"),
        ("phi", "intermediate_size"),
        ("qwen2_moe", "moe_intermediate_size"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("stablelm", "num_key_value_heads"),
        ("xglm", "ffn_dim"),
    ],
)
def test_a_key_that_is_left_out_has_the_default_of_transformers(family: str, key: str) -> None:
    without = {name: value for name, value in TINY[family][1].items() if name != key}
    ours, real = tensors(family, without)
    assert ours == real


def test_experts_of_deepseek_by_their_other_name() -> None:
    config = dict(TINY["deepseek_v2"][1])
    config["num_experts"] = config.pop("n_routed_experts")
    ours, real = tensors("deepseek_v2", config)
    assert ours == real


@ALL
def test_linear_modules_are_known_as_such(family: str, config: Config) -> None:
    """Adapters and quantization go by the module's type, and leave routers alone."""
    kinds = {"Conv1D": "conv1d", "Linear": "linear", "FalconLinear": "linear"}
    model = model_of(family, config)
    routing = modules_of_routers(model)
    real = {
        (short(f"{name}.weight"), kinds[type(module).__name__], (rows, columns))
        for name, module in model.named_modules()
        if type(module).__name__ in kinds and module not in routing
        for rows, columns in [
            module.weight.shape if isinstance(module, nn.Linear) else reversed(module.weight.shape)
        ]
        if not (name == "lm_head" and AutoConfig.for_model(family, **config).tie_word_embeddings)
    }
    ours = {(w.name, w.kind, w.shape) for w in shape_of(family, config).weights if w.linear}
    assert ours == real


@pytest.mark.sampled(4)
@ALL
def test_lora_trains_as_many_as_peft_does(family: str, config: Config) -> None:
    adapted = insert_adapters(model_of(family, config), LoRA(rank=4))
    expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    shape = shape_of(family, config)
    expert_rank = LoRA(rank=4).rank_of_experts(shape.experts.per_token) if shape.experts else 0
    assert lora_parameters(shape, 4, expert_rank=expert_rank) == expected
    if shape.experts:
        frozen = insert_adapters(model_of(family, config), LoRA(rank=4, experts="none"))
        expected = sum(p.numel() for p in frozen.parameters() if p.requires_grad)
        assert lora_parameters(shape, 4) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dora_trains_as_many_as_peft_does(family: str) -> None:
    name, config = TINY[family]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config))
    adapted = add_adapter(model, LoRA(rank=4, variant="dora"), seed=0)
    expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert lora_parameters(shape_of(name, config), 4, dora=True) == expected


@pytest.mark.sampled(4)
@ALL
def test_ia3_trains_as_many_as_peft_does(family: str, config: Config) -> None:
    shape = shape_of(family, config)
    adapted = insert_adapters(model_of(family, config), IA3())
    expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert ia3_parameters(shape) == expected
    modules, inputs = ia3_modules(shape, "auto", "auto")
    factors = AdapterSize(1, modules, scaled_inputs=inputs)  # as forecasts have it
    assert expected == sum(
        weight.times * weight.shape[0 if factors.scales_result(weight) else 1]
        for weight in factors.on(shape)
    )


@pytest.mark.parametrize(
    "family", ["llama", "llama tied", "gpt2", "t5", "opt with a narrow embedding"]
)
def test_modules_trained_whole_are_counted_once(family: str) -> None:
    names = ("lm_head", {"gpt2": "wte", "t5": "shared"}.get(family, "embed_tokens"))
    adapter = LoRA(rank=2, modules_to_save=names)
    adapted = insert_adapters(model_of(*TINY[family]), adapter)
    expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    shape = shape_of(*TINY[family])
    assert lora_parameters(shape, 2, modules_to_save=names) == expected


def test_a_norm_trained_whole_is_the_one_that_is_called_so() -> None:
    names = ("norm",)
    adapted = insert_adapters(model_of(*TINY["llama"]), LoRA(rank=2, modules_to_save=names))
    expected = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert lora_parameters(shape_of(*TINY["llama"]), 2, modules_to_save=names) == expected


def test_chosen_targets() -> None:
    shape = shape_of("llama", USUAL)
    # rank times (inputs + outputs), for 3 layers: queries 64+64, values 64+32
    assert lora_parameters(shape, 2, ("q_proj", "self_attn.v_proj")) == 3 * 2 * (128 + 96)


def test_unknown_targets_are_named_with_the_nearest() -> None:
    shape = shape_of("llama", USUAL)
    with pytest.raises(ModelError) as error:
        lora_parameters(shape, 2, ("q_prj", "up_proj", "c_attn"))
    first, second = error.value.problems
    assert (first.place, first.fix) == ("adapter.targets.0", "did you mean 'q_proj'?")
    assert second.place == "adapter.targets.2"
    assert "down_proj" in second.fix


# Figures that are published --------------------------------------------------------------------

LLAMA_8B: Config = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_lora_on_llama_8b() -> None:
    # "trainable params: 41,943,040" is what peft prints for rank 16 on all linear layers.
    assert lora_parameters(shape_of("llama", LLAMA_8B), 16) == 41_943_040


def test_active_parameters_of_mixtral() -> None:
    # Jiang et al., "Mixtral of Experts": 47 B parameters, 13 B of them active
    config = {**LLAMA_8B, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    shape = shape_of("mixtral", config)
    assert round(shape.parameters / 1e9) == 47
    assert round(shape.active_parameters / 1e9) == 13
    assert shape.layers_in("layer") == 0
    assert shape.layers_in("moe_layer") == 32


def test_largest_module_of_t5_3b() -> None:
    # DeepSpeed's documentation: "2851M total params, 32M largest layer params"
    config = {**T5, "d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24}
    config |= {"num_decoder_layers": 24, "num_heads": 32, "vocab_size": 32128}
    shape = shape_of("t5", config)
    assert shape.parameters // 10**6 == 2851
    assert shape.largest_module // 10**6 == 32


def test_nf4_of_llama_2_7b() -> None:
    # Dettmers et al., "QLoRA": 4.127 bits a weight; litgpt holds 3.86 GB of weights
    config = {**LLAMA_8B, "intermediate_size": 11008, "num_key_value_heads": 32}
    shape = shape_of("llama", {**config, "vocab_size": 32000})
    assert quantizable(shape) == 6_476_005_376
    assert frozen_bytes(shape, "nf4") / 1e9 == pytest.approx(3.86, abs=0.01)
    assert frozen_bytes(shape) == 2 * 6_738_415_616


def test_int8_keeps_a_scale_for_each_output() -> None:
    shape = shape_of("llama", USUAL)
    linears = [w for w in shape.weights if w.kind == "linear" and w.part == "layer"]
    outputs = sum(3 * w.shape[0] for w in linears)
    packed = quantizable(shape)
    assert packed == 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96)
    expected = packed + 2 * outputs + 2 * (shape.parameters - packed)
    assert frozen_bytes(shape, "int8") == expected


def test_what_is_trained_whole_is_not_quantized() -> None:
    shape = shape_of("llama", USUAL)
    assert quantizable(shape) - quantizable(shape, kept=["mlp"]) == 3 * 3 * 64 * 96
    assert quantizable(shape_of("gpt2", GPT2)) == 0


def test_flops_of_llama_8b() -> None:
    shape = shape_of("llama", LLAMA_8B)
    # 2 for each parameter but the embedding and the norms
    norms = 65 * 4096
    assert matmul_flops_per_token(shape) == 2 * (shape.parameters - 128256 * 4096 - norms)
    # Kaplan et al.: 4 × layers × context × width for each token, every pair counted
    assert attention_flops(shape, 2048, causal=False) == 2048 * (4 * 32 * 2048 * 4096)
    # half of the pairs, and the diagonal
    assert attention_flops(shape, 2048) == 4 * 32 * 4096 * (2048 * 2049 // 2)


def test_a_tied_head_is_multiplied_with_too() -> None:
    tied = shape_of("llama", {**USUAL, "tie_word_embeddings": True})
    apart = shape_of("llama", USUAL)
    assert matmul_flops_per_token(tied) == matmul_flops_per_token(apart)
    assert apart.parameters - tied.parameters == 100 * 64


@pytest.mark.parametrize(
    ("family", "config", "layers"),
    [
        ("mistral", {}, 3),
        ("mistral", {"sliding_window": None}, 0),
        ("gemma2", {}, 2),
        ("gemma3_text", {"num_hidden_layers": 13}, 11),
        ("gpt_oss", {"num_local_experts": 4}, 2),
        ("qwen2", {}, 0),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, 2),
        ("gemma2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, 1),
        ("llama", {}, 0),
    ],
)
def test_layers_with_a_window(family: str, config: Config, layers: int) -> None:
    shape = shape_of(family, {**USUAL, **config})
    assert shape.windowed_layers == layers
    assert (shape.window is not None) == (layers > 0)


@given(seq=st.integers(1, 80), window=st.integers(1, 100), layers=st.integers(1, 5))
@settings(deadline=None)
def test_a_window_counts_the_pairs_that_it_sees(seq: int, window: int, layers: int) -> None:
    config = {**USUAL, "num_hidden_layers": layers, "sliding_window": window}
    shape = shape_of("mistral", config)
    pairs = sum(min(position + 1, window) for position in range(seq))
    assert attention_flops(shape, seq) == layers * pairs * 4 * 64


@given(
    hidden=st.integers(1, 64).map(lambda n: 8 * n),
    ffn=st.integers(1, 1000),
    layers=st.integers(1, 20),
    vocab=st.integers(1, 5000),
    kv=st.sampled_from([1, 2, 4, 8]),
    tied=st.booleans(),
)
@settings(max_examples=50, deadline=None)  # a busy machine is no failure
def test_parts_add_up_to_the_whole(
    hidden: int, ffn: int, layers: int, vocab: int, kv: int, tied: bool
) -> None:
    config = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    shape = shape_of("llama", config)
    # Llama's count in closed form
    width = hidden // 8
    layer = 2 * hidden * hidden + 2 * hidden * kv * width + 3 * hidden * ffn + 2 * hidden
    assert shape.largest_layer == layer
    assert shape.parameters == layers * layer + hidden + vocab * hidden * (1 if tied else 2)
    parts = ("embedding", "layer", "root", "head")
    assert sum(shape.parameters_in(part) for part in parts) == shape.parameters
    assert shape.active_parameters == shape.parameters


# What can't be read ----------------------------------------------------------------------------


def test_a_model_that_also_takes_pictures_is_not_taken_for_its_text_alone() -> None:
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **USUAL}}
    with pytest.raises(ModelError) as error:
        read_shape(config, "it")
    (problem,) = error.value.problems
    assert "also takes pictures" in problem.fact
    assert "text_config" in problem.fix
    with pytest.raises(ModelError) as error:
        read_shape({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}}, "it")
    (problem,) = error.value.problems
    assert "nor is its text part ('qwen3_vl_text')" in problem.fact
    assert "text_config" not in problem.fix


def test_an_unknown_architecture_is_named_with_those_we_know() -> None:
    with pytest.raises(ModelError) as error:
        read_shape({"model_type": "lama"}, "my/model")
    (problem,) = error.value.problems
    assert "my/model" in problem.place
    assert "'lama'" in problem.fact
    assert "did you mean 'llama'?" in problem.fix
    assert "qwen3_moe" in problem.fix


@pytest.mark.parametrize("config", [{}, {"model_type": 3}, {"model_type": None}])
def test_a_config_without_an_architecture(config: Config) -> None:
    with pytest.raises(ModelError, match="model_type"):
        read_shape(config, "my/model")


def test_all_that_is_wrong_is_told_at_once() -> None:
    config = {**USUAL, "hidden_size": "64", "vocab_size": 0, "tie_word_embeddings": "yes"}
    del config["num_hidden_layers"]
    with pytest.raises(ModelError) as error:
        shape_of("llama", config)
    facts = {problem.place.split(": ")[1]: problem.fact for problem in error.value.problems}
    assert facts["hidden_size"] == "is '64', not a whole number"
    assert facts["vocab_size"] == "is 0; it must be at least 1"
    assert facts["num_hidden_layers"] == "is missing"
    assert facts["tie_word_embeddings"] == "is 'yes', not true or false"


def test_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(ModelError, match="is 7, which doesn't divide 64"):
        shape_of("llama", {**USUAL, "num_attention_heads": 7})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", sorted(SHAPE_READERS))
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_no_config_ends_in_a_traceback(family: str, data: st.DataObject) -> None:
    """Whatever stands under a key that matters, it is read or refused."""
    config: Config = dict(next(config for name, config in TINY.values() if name == family))
    strange = st.sampled_from([None, -1, 0, True, "x", 1.5, [], {}, 10**9])
    for key in data.draw(st.sets(st.sampled_from(sorted(config)), max_size=3)):
        config[key] = data.draw(strange)
    try:
        shape = shape_of(family, config)
    except ModelError:
        return
    assert shape.parameters > 0


def test_a_model_with_an_encoder_reads_and_writes() -> None:
    """By hand, for T5's layers: an encoder's weights meet the source, a decoder's the target, but
    for keys and values of what it reads."""
    shape = known_model("google/flan-t5-xl")
    d, ffn, heads, layers, vocab = 2048, 5120, 32 * 64, 24, 32128
    attention, mlp = 4 * d * heads, 3 * d * ffn
    read, written = 512, 128
    across = 2 * d * heads
    by_source = layers * (attention + mlp + across)
    by_target = layers * (attention + across + mlp) + vocab * d
    expected = 2 * (read * by_source + written * by_target)
    assert matmul_flops(shape, read, written) == expected
    assert matmul_flops(shape, 256, 256) == 256 * matmul_flops_per_token(shape)
    seen = read * read + written * (written + 1) // 2 + read * written
    assert attention_flops(shape, read, written) == layers * seen * 4 * heads
    assert attention_flops(shape, 256, 256) == attention_flops(shape, 256)
