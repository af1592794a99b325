"""What the layers of each family keep for the backward pass: the closed forms against the dry run,
which makes every tensor of a real step and counts it."""

from __future__ import annotations

import json
from dataclasses import replace
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.opt.modeling_opt import OPTDecoder

from shardtune.config.auto import resolve
from shardtune.config.job import Job
from shardtune.config.model_config import config_of, shape_of
from shardtune.core.host.machine import Machine
from shardtune.core.model.architectures import SHAPE_READERS
from shardtune.core.model.family_support import FAMILY_SUPPORT
from shardtune.measure.dry_run import dry_run
from shardtune.models.builder import MetaModelBuilder
from shardtune.models.load import config_from
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.estimate.activations import stack_bytes, top_bytes
from shardtune.plan.estimate.family_copies import FAMILY_COPIES
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.transient_buffers import casts_of
from shardtune.plan.forecast import Forecast, forecast
from shardtune.training.engine_setup import make_plan

Config = dict[str, Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

ROWS, LENGTH, WINDOW = 2, 640, 256
ENDS: Config = {"vocab_size": 5000, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
USUAL: Config = ENDS | {
    "hidden_size": 1024,
    "intermediate_size": 2688,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 80,
    "max_position_embeddings": LENGTH,
}
EVEN: Config = {key: value for key, value in USUAL.items() if key != "head_dim"}
"""For families that divide their hidden size by their heads."""
WHOLE: Config = {key: value for key, value in EVEN.items() if key != "num_key_value_heads"}
SLIDING: Config = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SLIDING_8: Config = SLIDING | {"layer_types": SLIDING["layer_types"] * 2}
"""With adapters the first layer's norm keeps nothing, as no gradient goes below it; Cohere's keep
so much that four layers would be too few for this not to matter."""
MIXTURE: Config = {"moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
EXPERTS: Config = {"num_local_experts": 8, "num_experts_per_tok": 2}
LATE: Config = {
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: Config = LATE | {
    "num_key_value_heads": 16,
    "kv_lora_rank": 256,
    "q_lora_rank": 384,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
GPT: Config = ENDS | {
    "n_positions": LENGTH,
    "n_embd": 1024,
    "n_layer": 4,
    "n_head": 16,
    # A CPU keeps masks of dropout in 16 bits and a GPU in eight.
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
}

CONFIGS: dict[str, tuple[str, Config]] = {
    "apertus": ("apertus", EVEN),
    "arcee": ("arcee", USUAL),
    "bloom": ("bloom", ENDS | {"hidden_size": 1024, "n_layer": 4, "n_head": 16}),
    "codegen": ("codegen", GPT | {"n_ctx": LENGTH, "rotary_dim": 32}),
    "cohere": ("cohere", EVEN | {"num_hidden_layers": 8}),
    "cohere, norms of heads": ("cohere", EVEN | {"num_hidden_layers": 8, "use_qk_norm": True}),
    "cohere2": ("cohere2", EVEN | {"num_hidden_layers": 8} | SLIDING_8),
    "deepseek_v2": ("deepseek_v2", EVEN | LATENT),
    "deepseek_v3": ("deepseek_v3", EVEN | LATENT),
    "ernie4_5": ("ernie4_5", USUAL),
    "exaone4": ("exaone4", EVEN | SLIDING),
    "falcon": ("falcon", WHOLE),
    "falcon, groups of keys": (
        "falcon",
        WHOLE | {"new_decoder_architecture": True, "num_kv_heads": 4},
    ),
    "gemma": ("gemma", USUAL),
    "gemma2": ("gemma2", USUAL | {"sliding_window": WINDOW}),
    "gemma3_text": ("gemma3_text", USUAL | SLIDING),
    "gemma4_text": (
        "gemma4_text",
        USUAL
        | SLIDING
        | {
            "global_head_dim": 80,
            "hidden_size_per_layer_input": 128,
            "vocab_size_per_layer_input": 5000,
        },
    ),
    "glm": ("glm", USUAL),
    "glm4": ("glm4", USUAL),
    "glm4_moe": ("glm4_moe", USUAL | LATE),
    "gpt2": ("gpt2", GPT),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_neo": (
        "gpt_neo",
        ENDS
        | {
            "max_position_embeddings": LENGTH,
            "hidden_size": 1024,
            "num_layers": 4,
            "num_heads": 16,
            "attention_types": [[["global", "local"], 2]],
            "window_size": WINDOW,
        },
    ),
    "gpt_neox": ("gpt_neox", WHOLE),
    "gpt_neox, one after the other": ("gpt_neox", WHOLE | {"use_parallel_residual": False}),
    "gpt_oss": ("gpt_oss", USUAL | EXPERTS | {"sliding_window": 128}),
    "gptj": ("gptj", GPT | {"rotary_dim": 32}),
    "granite": ("granite", EVEN),
    "granitemoe": ("granitemoe", EVEN | EXPERTS),
    "helium": ("helium", EVEN | {"head_dim": 64}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", USUAL),
    "llama": ("llama", USUAL),
    "llama, biases": ("llama", USUAL | {"attention_bias": True, "mlp_bias": True}),
    "ministral": ("ministral", USUAL),
    "mistral": ("mistral", USUAL),
    "mistral, a window": ("mistral", USUAL | {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", USUAL | EXPERTS),
    "mpt": ("mpt", ENDS | {"d_model": 1024, "n_layers": 4, "n_heads": 16, "max_seq_len": LENGTH}),
    "nemotron": ("nemotron", EVEN | {"head_dim": 64}),
    "olmo": ("olmo", EVEN),
    "olmo2": ("olmo2", EVEN),
    "olmo3": ("olmo3", EVEN | SLIDING),
    "olmoe": ("olmoe", EVEN | {"num_experts": 8, "num_experts_per_tok": 2}),
    "opt": (
        "opt",
        WHOLE | {"ffn_dim": 4096, "word_embed_proj_dim": 1024, "dropout": 0.0},
    ),
    "persimmon": ("persimmon", WHOLE),
    "phi": ("phi", EVEN),
    "phi3": ("phi3", EVEN),
    "qwen2": ("qwen2", EVEN | {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", EVEN | MIXTURE | {"shared_expert_intermediate_size": 640}),
    "qwen3": ("qwen3", USUAL),
    "qwen3_moe": ("qwen3_moe", USUAL | MIXTURE),
    "seed_oss": ("seed_oss", USUAL | {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "smollm3": ("smollm3", EVEN),
    "stablelm": ("stablelm", EVEN),
    "starcoder2": ("starcoder2", EVEN),
    "xglm": (
        "xglm",
        ENDS
        | {
            "max_position_embeddings": LENGTH,
            "d_model": 1024,
            "ffn_dim": 4096,
            "num_layers": 4,
            "attention_heads": 16,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
        },
    ),
}
WITH_EAGER_ATTENTION = ("deepseek_v2", "deepseek_v3")
"""A GPU has a kernel for heads whose values are narrower; a CPU writes the scores down."""
OTHERWISE_ON_A_GPU = (
    "bloom", "codegen", "deepseek_v2", "deepseek_v3", "falcon", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gpt_oss", "gptj", "mpt", "nemotron", "opt", "persimmon", "phi", "stablelm",
    "starcoder2", "xglm",
)  # fmt: skip
"""Autocast computes layer norms and every softmax in fp32 on a GPU, which the closed form counts,
and in 16 bits on a CPU, which a dry run without a GPU sees. Adapters go with autocast."""
QUICK = ("gemma2", "gpt_neox")
ADAPTED = [name for name, (family, _) in CONFIGS.items() if family not in OTHERWISE_ON_A_GPU]


def test_every_family_is_tried() -> None:
    tried = {family for family, _ in CONFIGS.values()}
    assert tried == set(FAMILY_SUPPORT) & set(SHAPE_READERS)  # no shape: `plan` says so
    assert set(FAMILY_COPIES) <= tried
    assert len(CONFIGS) + len(ADAPTED) >= 40


def slow_but(names: tuple[str, ...], all_names: list[str]) -> list[Any]:
    return [
        name if name in names else pytest.param(name, marks=pytest.mark.long) for name in all_names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(QUICK, list(CONFIGS)))
def test_all_weights_trained(name: str, tmp_path: Path) -> None:
    if name == "opt" and "position_attention_mask" not in getsource(OPTDecoder.forward):
        pytest.skip("this transformers asks a fake mask whether it masks: a run keeps none")
    closed, kept = both(name, tmp_path)
    assert closed == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("name", slow_but((), ADAPTED))
def test_lora(name: str, tmp_path: Path) -> None:
    closed, kept = both(name, tmp_path, adapter={"type": "lora", "rank": 16})
    assert closed == pytest.approx(kept, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_the_models_own_dropout(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer keeps two masks of the residual stream: a byte a number on a GPU, where a CPU, which
    a dry run without a GPU sees, has 16 bits."""
    without = both(name, tmp_path)
    family, config = CONFIGS[name]
    drops = {"gpt2": "resid_pdrop", "opt": "dropout"}[name]
    monkeypatch.setitem(CONFIGS, name, (family, config | {drops: 0.1}))
    found = both(name, tmp_path)
    closed, kept = (after - before for after, before in zip(found, without, strict=True))
    masks = config.get("n_layer", config.get("num_hidden_layers")) * 2 * 1024 * ROWS * LENGTH
    width = 1 if torch.cuda.is_available() else 2
    assert closed == masks
    assert kept == pytest.approx(width * masks, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("experts", ["all", "none"])
def test_packed_experts(experts: str, tmp_path: Path) -> None:
    """Packed ones are multiplied by groups, with adapters or without."""
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    model = {"name": str(tmp_path), "quantization": "nf4"}
    adapter = {"type": "lora", "rank": 16, "experts": experts}
    closed, kept = both("qwen3_moe", tmp_path, model=model, adapter=adapter)
    assert closed == pytest.approx(kept, rel=0.03)


def both(name: str, folder: Path, **sections: Any) -> tuple[float, int]:
    """Bytes that the closed form says are kept, and those that are."""
    job = make_job(name, folder, **sections)
    found = forecast(job, shape_of(job.model), parse_cluster("1xH200-141GB"))
    if job.model.attention == "eager" and not torch.cuda.is_available():
        # Heads with sinks have a kernel of ours on a GPU alone; a CPU writes the scores down.
        found = replace(found, work=replace(found.work, attention="eager"))
    seen = dry_run(
        MetaModelBuilder.of(config_from(config_of(job.model)), job.model, job.adapter, job.train),
        job.strategy,
        make_plan(job, 1, 10).setup,
        ranks=1,
        rows=ROWS,
        length=LENGTH,
        vocabulary=found.shape.vocab,
    )
    return kept_by(found), seen.kept


def kept_by(found: Forecast) -> float:
    """The layers, the casts of adapters, and what lies behind the last layer."""
    shape, work, whole = found.shape, found.work, RankShare()
    casts = casts_of(shape, work, whole).forward
    return stack_bytes(shape, work, whole) + casts + top_bytes(shape, work) * work.tokens


def make_job(name: str, folder: Path, **sections: Any) -> Job:
    family, config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps({"model_type": family, **config}))
    attention = "eager" if family in WITH_EAGER_ATTENTION else "auto"
    document = {
        "model": {"name": str(folder), "attention": attention},
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": LENGTH},
        "train": {
            "micro_batch": ROWS,
            "global_batch": ROWS,
            "steps": 10,
            "loss": "plain",
            "kernels": "eager",
            "gradient_checkpointing": "none",
            "precision": "bf16",
        },
        "launch": {"processes": 1},
        **sections,
    }
    job = Job.model_validate_json(json.dumps(document))
    return resolve(job, Machine(cores=2, gpus=1)).job
