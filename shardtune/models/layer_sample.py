"""A small model with one layer of each kind that a family has, in fp32 and with random weights.

What a family's code does with packed documents doesn't depend on its weights or on how often a
layer is repeated. Vocabulary and MLPs are made narrow; attention and recurrent layers keep their
widths, on which kernels depend.
"""

from __future__ import annotations

from typing import Any

import torch

_VOCABULARY, _NARROW = 256, 32
_MLP_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_FEW = 2


def layer_sample(config: Any, attention: str | None) -> Any:
    """The model; None where transformers can't build it so."""
    from transformers import AutoConfig, AutoModelForCausalLM

    told = config.get_text_config().to_dict()
    try:
        small = AutoConfig.for_model(**told | _narrower(told) | _fewer_layers(told))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                small, dtype=torch.float32, attn_implementation=attention
            )
            _mix(model)
        return model.eval()
    except Exception:  # noqa: BLE001 - whatever a family's code dislikes of the sizes
        return None


def _mix(model: Any) -> None:
    """Weights of a size at which each layer adds about as much as goes into it: the usual small
    ones would hide what a layer does behind the residual."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def _narrower(told: dict[str, Any]) -> dict[str, Any]:
    found = {key: min(_NARROW, told[key]) for key in _MLP_WIDTHS if isinstance(told.get(key), int)}
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(told.get(key), int):
            found[key] = min(_VOCABULARY, told[key])
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if told.get(key) is not None:
            found[key] = 0
    return found


def _fewer_layers(told: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, by the lists that name a kind for every layer."""
    key = next((each for each in _LAYERS if isinstance(told.get(each), int)), None)
    if key is None:
        return {}
    lists = {
        name: value
        for name, value in told.items()
        if isinstance(value, list | tuple) and len(value) == told[key]
    }
    found: dict[str, Any] = {}
    if lists:
        rows = list(zip(*lists.values(), strict=True))
        firsts = sorted(rows.index(row) for row in dict.fromkeys(rows))
        found = {name: [value[n] for n in firsts] for name, value in lists.items()}
        count = len(firsts)
    else:
        count = min(_FEW, told[key])
    if told.get("first_k_dense_replace"):
        found["first_k_dense_replace"], count = 1, max(count, _FEW)
    if told.get("attn_layer_indices"):
        found["attn_layer_indices"], count = [1], max(count, _FEW)
    if told.get("attn_layer_period"):
        found |= {"attn_layer_period": _FEW, "attn_layer_offset": 1}
        count = max(count, _FEW)
    if told.get("num_kv_shared_layers"):
        found["num_kv_shared_layers"] = 0
    return found | {key: count}
