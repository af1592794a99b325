"""GGUF hyperparameters: what llama.cpp has to know of each model family, by its own keys.

llama.cpp computes a family one way, in code. What a configuration says otherwise (another
activation, another place for sliding windows) has no key there: such a model is refused by the name
of the setting, since the file would load and answer wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardtune.errors import Problem, RunError

GgufValue: TypeAlias = bool | int | float | str | list[str] | list[int] | list[float] | list[bool]
GgufMetadata: TypeAlias = dict[str, GgufValue]


@dataclass(frozen=True)
class GgufFamily:
    """How one family of transformers is called and written in GGUF."""

    architecture: str
    """llama.cpp's name of it."""
    pairs_interleaved: bool = False
    """Its rotary pairs are neighbouring rows; Hugging Face has them half a head apart."""
    norm_offset: float = 0.0
    """What the model adds to the weight of a norm, and llama.cpp expects to be in it."""
    activation: str = "silu"
    known_to_transformers: bool = True
    """Whether transformers' own GGUF reader can load it."""


FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("llama", pairs_interleaved=True),
    "mistral": GgufFamily("llama", pairs_interleaved=True),
    "smollm3": GgufFamily("smollm3", pairs_interleaved=True, known_to_transformers=False),
    "granite": GgufFamily("granite", pairs_interleaved=True, known_to_transformers=False),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "phi3": GgufFamily("phi3"),
    "gemma2": GgufFamily("gemma2", norm_offset=1.0, activation="gelu_pytorch_tanh"),
    "gemma3_text": GgufFamily("gemma3", norm_offset=1.0, activation="gelu_pytorch_tanh"),
}
"""By `model_type`."""


def gguf_family(config: Any) -> GgufFamily:
    """The family of a configuration; RunError for one that isn't written."""
    found = FAMILIES.get(config.model_type)
    if found is None:
        fact = f"{config.model_type!r} is no family that is written as GGUF"
        fix = f"known are {', '.join(FAMILIES)}; or export --to hf and use llama.cpp's converter"
        raise RunError(Problem("--to gguf", fact, fix))
    return found


def hyperparameters(config: Any) -> GgufMetadata:
    """Every key that llama.cpp reads for this model, under its architecture's name."""
    family = gguf_family(config)
    _require(config, "hidden_act", _activation(config), family.activation)
    head = head_dim(config)
    found: GgufMetadata = {
        "vocab_size": config.vocab_size,
        "context_length": _context(config),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": rotary_dim(config),
        **_rope(config),
        **_OWN_KEYS.get(config.model_type, lambda _: {})(config),
    }
    return {f"{family.architecture}.{key}": value for key, value in found.items()}


def head_dim(config: Any) -> int:
    """Numbers of one attention head."""
    found = getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)


def rotary_dim(config: Any) -> int:
    """How many numbers of a head are rotated."""
    share = rope_parameters(config).get("partial_rotary_factor", 1.0)
    return int(head_dim(config) * share)


def rope_parameters(config: Any, layers: str = "full_attention") -> Mapping[str, Any]:
    """The rotary parameters, of one kind of layers where the kinds differ."""
    found: Mapping[str, Any] = config.rope_parameters or {}
    return found.get(layers, found) if layers in found else found


def _rope(config: Any) -> GgufMetadata:
    rope = rope_parameters(config)
    found: GgufMetadata = {"rope.freq_base": float(rope.get("rope_theta", 10_000.0))}
    kind = rope.get("rope_type", "default")
    match kind:
        case "default":
            pass
        case "llama3":  # a tensor of factors says it
            _require(config, "rope_type llama3 under", _architecture(config), "llama")
        case "linear":
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
        case "yarn":
            found |= _yarn(rope)
        case "longrope":  # tensors of factors, and how much hotter attention gets
            _require(config, "rope_type longrope under", _architecture(config), "phi3")
            found |= _longrope(config, rope)
        case _:
            fact = f"rope_type: {kind} has no counterpart in llama.cpp"
            raise RunError(Problem("--to gguf", fact, "export --to hf"))
    return found


def _yarn(rope: Mapping[str, Any]) -> GgufMetadata:
    found: GgufMetadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]),
    }
    keys = {
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    for ours, theirs in keys.items():
        if rope.get(ours) is not None:
            found[f"rope.scaling.{theirs}"] = float(rope[ours])
    return found


def _longrope(config: Any, rope: Mapping[str, Any]) -> GgufMetadata:
    original = int(rope["original_max_position_embeddings"])
    factor = config.max_position_embeddings / original
    hotter = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(rope.get("attention_factor") or hotter),
    }


def _context(config: Any) -> int:
    """The longest text. llama.cpp has no window for Mistral; a text as long as one needs none."""
    window = getattr(config, "sliding_window", None)
    longest = int(config.max_position_embeddings)
    return min(longest, window) if config.model_type == "mistral" and window else longest


def _granite(config: Any) -> GgufMetadata:
    _require(config, "head_dim", head_dim(config), config.hidden_size // config.num_attention_heads)
    return {
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    }


def _smollm3(config: Any) -> GgufMetadata:
    """Every fourth layer has no rotary positions; that is fixed in llama.cpp's code."""
    layers = range(1, config.num_hidden_layers + 1)
    _require(
        config, "no_rope_layers", list(config.no_rope_layers), [int(n % 4 > 0) for n in layers]
    )
    _require(config, "use_sliding_window", bool(config.use_sliding_window), False)
    return {}


def _gemma2(config: Any) -> GgufMetadata:
    every = _windows(config, 2)
    _attention_scale(config, layers_of_27b=46)
    for setting in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, setting) is None:
            _require(config, setting, None, "a number")
    return {
        "attn_logit_softcapping": float(config.attn_logit_softcapping),
        "final_logit_softcapping": float(config.final_logit_softcapping),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": every,
    }


def _gemma3(config: Any) -> GgufMetadata:
    every = _windows(config, 6)
    _attention_scale(config, layers_of_27b=62)
    _require(config, "attn_logit_softcapping", config.attn_logit_softcapping, None)
    local = rope_parameters(config, "sliding_attention")
    _require(config, "rope_type of sliding layers", local.get("rope_type", "default"), "default")
    found: GgufMetadata = {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": every,
        "rope.freq_base_swa": float(local["rope_theta"]),
    }
    if config.final_logit_softcapping is not None:
        found["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return found


def _windows(config: Any, usual: int) -> int:
    """Every how many layers one sees all tokens; the other layers see a window."""
    whole = [n for n, kind in enumerate(config.layer_types, 1) if kind == "full_attention"]
    every = whole[0] if whole else usual
    layers = range(1, config.num_hidden_layers + 1)
    expected = ["sliding_attention" if n % every else "full_attention" for n in layers]
    _require(config, "layer_types", list(config.layer_types), expected)
    return every


def _attention_scale(config: Any, layers_of_27b: int) -> None:
    """llama.cpp takes the scale from the size of a head, and of the largest model otherwise."""
    largest = config.num_hidden_layers == layers_of_27b
    head = config.hidden_size // config.num_attention_heads if largest else head_dim(config)
    _require(config, "query_pre_attn_scalar", config.query_pre_attn_scalar, head)


def _phi3(config: Any) -> GgufMetadata:
    window = config.sliding_window or 0  # 0 tells Phi 4 from Phi 3
    longest = config.max_position_embeddings
    original = rope_parameters(config).get("original_max_position_embeddings", longest)
    return {
        "attention.sliding_window": window,
        "rope.scaling.original_context_length": int(original),
    }


def _qwen2(config: Any) -> GgufMetadata:
    _require(config, "use_sliding_window", bool(config.use_sliding_window), False)
    return {}


_OWN_KEYS: Mapping[str, Callable[[Any], GgufMetadata]] = {
    "granite": _granite,
    "smollm3": _smollm3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen2,
}


def _activation(config: Any) -> str:
    found = getattr(config, "hidden_activation", None) or config.hidden_act
    return str(found)


def _architecture(config: Any) -> str:
    return gguf_family(config).architecture


def _require(config: Any, setting: str, found: object, wanted: object) -> None:
    if found != wanted:
        fact = f"{config.model_type} has {setting} {found}, and llama.cpp computes it as {wanted}"
        raise RunError(Problem("--to gguf", fact, "export --to hf"))
