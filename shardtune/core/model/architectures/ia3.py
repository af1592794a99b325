"""Which linear layers IA3 scales where a job leaves that to us."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from shardtune.core.model.shape import ModelShape
from shardtune.errors import ModelError, Problem

ModuleNames = tuple[str, ...]

# As peft has them, which puts the adapters in.
_TARGETS: dict[str, ModuleNames] = {
    "bart": ("q_proj", "v_proj", "fc2"),
    "bloom": ("query_key_value", "mlp.dense_4h_to_h"),
    "falcon": ("query_key_value", "dense_4h_to_h"),
    "gemma": ("q_proj", "v_proj", "down_proj"),
    "gemma2": ("q_proj", "v_proj", "down_proj"),
    "gemma3_text": ("q_proj", "v_proj", "down_proj"),
    "gpt2": ("c_attn", "mlp.c_proj"),
    "gpt_bigcode": ("c_attn", "mlp.c_proj"),
    "gpt_neox": ("query_key_value", "dense_4h_to_h"),
    "gptj": ("q_proj", "v_proj", "fc_out"),
    "llama": ("k_proj", "v_proj", "down_proj"),
    "mistral": ("k_proj", "v_proj", "down_proj"),
    "mixtral": ("k_proj", "v_proj", "w2"),
    "mt5": ("k", "v", "wi_1"),
    "opt": ("q_proj", "k_proj", "fc2"),
    "phi": ("q_proj", "v_proj", "fc2"),
    "qwen2": ("q_proj", "v_proj", "down_proj"),
    "qwen3": ("q_proj", "v_proj", "down_proj"),
    "t5": ("k", "v", "wo"),
}
_FEEDFORWARD: dict[str, ModuleNames] = {
    "bloom": ("mlp.dense_4h_to_h",),
    "gpt2": ("mlp.c_proj",),
    "gpt_bigcode": ("mlp.c_proj",),
    "mixtral": ("w2",),
    "t5": ("wo",),
}
_SCALED_OUTPUTS = ("k_proj", "v_proj", "query_key_value", "qkv_proj")
_LAST = ("down_proj", "dense_4h_to_h", "fc2", "fc_out")


def ia3_modules(
    shape: ModelShape,
    targets: Literal["auto"] | Collection[str],
    feedforward: Literal["auto"] | Collection[str],
) -> tuple[ModuleNames, ModuleNames]:
    """The linear layers that IA3 scales, and those of them whose input it scales."""
    chosen = _auto_targets(shape) if targets == "auto" else tuple(targets)
    if feedforward != "auto":
        return chosen, tuple(feedforward)
    known = (*_FEEDFORWARD.get(shape.family, ()), *_LAST)
    return chosen, tuple(name for name in chosen if name in known)


def _auto_targets(shape: ModelShape) -> ModuleNames:
    if shape.family in _TARGETS:
        return _TARGETS[shape.family]
    names = {w.module.rpartition(".")[2] for w in shape.weights if w.linear}
    found = tuple(name for name in (*_SCALED_OUTPUTS, *_LAST) if name in names)
    if not found:
        fact = f"nobody knows which layers of a {shape.family!r} model IA3 should scale"
        fix = f"choose keys, values and the MLP's last among {', '.join(sorted(names))}"
        raise ModelError(Problem("adapter.targets", fact, fix))
    return found
