"""Which layers have a sliding window: the planner's count against the masks of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardtune.core.model.architectures.traits import TRAITS
from tests.core.model.test_shape import TINY, shape_of

Config = dict[str, Any]
LAYERS, WINDOW, TOKENS = 5, 4, 8

SWITCHED = [family for family in TRAITS if hasattr(CONFIG_MAPPING[family], "use_sliding_window")]
WINDOWED = [family for family in TRAITS if hasattr(CONFIG_MAPPING[family], "sliding_window")]
ON: Config = {"use_sliding_window": True}
TYPES = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
CHOICES: dict[str, Config] = {
    "nothing said": {},
    "on": ON,
    "off": {"use_sliding_window": False},
    "on from layer 2": {**ON, "max_window_layers": 2},
    "on from layer 0": {**ON, "max_window_layers": 0},
    "on, every second layer without rope": {**ON, "no_rope_layer_interval": 2},
    "on, rope by a list": {**ON, "no_rope_layers": [1, 0, 0, 1, 0]},
    "on, but no size": {**ON, "sliding_window": None},
    "on, types by a list": {**ON, "layer_types": [*TYPES, "sliding_attention"]},
    "every third sees all": {"sliding_window_pattern": 3},
}


def config_of(family: str, choice: str) -> Config:
    usual: Config = dict(next(config for name, config in TINY.values() if name == family))
    usual |= {"num_hidden_layers": LAYERS, "sliding_window": WINDOW, "pad_token_id": None}
    return {**usual, "num_experts_per_tok": 2, **CHOICES[choice]}


def windowed_layers(family: str, config: Config) -> int:
    """In how many layers of the real model the last token doesn't see the first."""
    hides: list[bool] = []

    def look(module: Any, args: tuple[Any, ...], kwargs: Config) -> None:
        mask = kwargs["attention_mask"]
        hides.append(bool(mask[0, 0, -1, 0] < 0))

    real = AutoConfig.for_model(family, **config)
    real._attn_implementation = "eager"  # whose masks are always written out
    model = AutoModelForCausalLM.from_config(real).eval()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
    model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    assert len(hides) == LAYERS
    return sum(hides)


def test_families_with_a_switch_are_known() -> None:
    assert {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"} <= set(SWITCHED)
    asked = [name for name, traits in TRAITS.items() if "use_sliding_window" in traits.window_keys]
    assert sorted(asked) == sorted(SWITCHED)
    slides = [name for name, traits in TRAITS.items() if traits.window != "no"]
    assert sorted(slides) == sorted(WINDOWED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_where_the_real_model_has_them(family: str, choice: str) -> None:
    config = config_of(family, choice)
    try:
        real = windowed_layers(family, config)
    except (ValueError, ZeroDivisionError):
        assert config["sliding_window"] is None, "only a family that needs a size fails without"
        return
    shape = shape_of(family, config)
    assert shape.windowed_layers == real
    assert shape.window == (WINDOW if real else None)
