"""Which linear layers IA3 scales where a job leaves that to us."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from shardtune.core.model.shape import ModelShape
from shardtune.errors import ModelError, Problem

ModuleNames = tuple[str, ...]

# As peft has them for every family it knows; a test compares.
_TARGETS: dict[str, ModuleNames] = {
    "RefinedWeb": ("query_key_value", "dense_4h_to_h"),
    "RefinedWebModel": ("query_key_value", "dense_4h_to_h"),
    "bart": ("q_proj", "v_proj", "fc2"),
    "bert": ("key", "value", "output.dense"),
    "bloom": ("query_key_value", "mlp.dense_4h_to_h"),
    "deberta": ("in_proj", "output.dense"),
    "deberta-v2": ("key_proj", "value_proj", "output.dense"),
    "falcon": ("query_key_value", "dense_4h_to_h"),
    "gemma": ("q_proj", "v_proj", "down_proj"),
    "gemma2": ("q_proj", "v_proj", "down_proj"),
    "gemma3_text": ("q_proj", "v_proj", "down_proj"),
    "gpt2": ("c_attn", "mlp.c_proj"),
    "gpt_bigcode": ("c_attn", "mlp.c_proj"),
    "gpt_neo": ("q_proj", "v_proj", "c_proj"),
    "gpt_neox": ("query_key_value", "dense_4h_to_h"),
    "gptj": ("q_proj", "v_proj", "fc_out"),
    "llama": ("k_proj", "v_proj", "down_proj"),
    "llama4": ("q_proj", "v_proj", "down_proj"),
    "mistral": ("k_proj", "v_proj", "down_proj"),
    "mixtral": ("k_proj", "v_proj", "w2"),
    "mt5": ("k", "v", "wi_1"),
    "opt": ("q_proj", "k_proj", "fc2"),
    "phi": ("q_proj", "v_proj", "fc2"),
    "qwen2": ("q_proj", "v_proj", "down_proj"),
    "qwen3": ("q_proj", "v_proj", "down_proj"),
    "roberta": ("key", "value", "output.dense"),
    "t5": ("k", "v", "wo"),
}
_FEEDFORWARD: dict[str, ModuleNames] = {
    "bert": ("output.dense",),
    "bloom": ("mlp.dense_4h_to_h",),
    "deberta": ("output.dense",),
    "deberta-v2": ("output.dense",),
    "gpt2": ("mlp.c_proj",),
    "gpt_bigcode": ("mlp.c_proj",),
    "gpt_neo": ("c_proj",),
    "mixtral": ("w2",),
    "roberta": ("output.dense",),
    "t5": ("wo",),
}
# IA3 scales what attention reads (keys and values) and what the MLP's last layer takes in. These
# are the names which those layers bear in families that peft's own table doesn't know.
_SCALED_OUTPUTS = ("k_proj", "v_proj", "query_key_value", "qkv_proj")
_LAST = ("down_proj", "dense_4h_to_h", "fc2", "fc_out")


def ia3_modules(
    shape: ModelShape,
    targets: Literal["auto"] | Collection[str],
    feedforward: Literal["auto"] | Collection[str],
) -> tuple[ModuleNames, ModuleNames]:
    """The linear layers that IA3 scales, and those of them whose input it scales."""
    names = {w.module.rpartition(".")[2] for w in shape.weights if w.linear}
    chosen = ia3_targets(shape.family, names) if targets == "auto" else tuple(targets)
    if feedforward != "auto":
        return chosen, tuple(feedforward)
    return chosen, ia3_feedforward(shape.family, chosen)


def ia3_targets(family: str, linear: Collection[str]) -> ModuleNames:
    """The layers that IA3 scales in a model of `family`, which has these `linear` ones. peft's
    table also names modules that only older versions of a model had (Mixtral's experts)."""
    known = (name for name in _TARGETS.get(family, ()) if name.rpartition(".")[2] in linear)
    if here := tuple(known):
        return here
    found = tuple(name for name in (*_SCALED_OUTPUTS, *_LAST) if name in linear)
    if not found:
        fact = f"IA3 has no default layers for {family!r} models"
        fix = f"choose keys, values and the MLP's last among {', '.join(sorted(linear))}"
        raise ModelError(Problem("adapter.targets", fact, fix))
    return found


def ia3_feedforward(family: str, targets: ModuleNames) -> ModuleNames:
    """Those of the `targets` whose input is scaled: the MLP's last layer."""
    known = (*_FEEDFORWARD.get(family, ()), *_LAST)
    return tuple(name for name in targets if name in known)
