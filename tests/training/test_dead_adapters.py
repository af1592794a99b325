"""LoRA modules that no update reached."""

from __future__ import annotations

import torch

from shardtune.training.dead_adapters import dead_adapter_warning, dead_adapters


def test_a_factor_that_is_still_zero_is_found() -> None:
    trained = {
        "layers.0.q_proj.lora_A.weight": torch.ones(2, 4),
        "layers.0.q_proj.lora_B.weight": torch.ones(4, 2),
        "layers.0.v_proj.lora_A.weight": torch.zeros(2, 4),
        "layers.0.v_proj.lora_B.weight": torch.zeros(4, 2),
    }
    assert dead_adapters(trained, updates=5) == ["layers.0.v_proj"]
    assert dead_adapters(trained, updates=4) == []  # a warmup may begin at a rate of 0


def test_the_warning_names_a_few() -> None:
    found = dead_adapter_warning(9, [f"layer{n}" for n in range(5)])
    assert found.fact.startswith("5 adapters were never trained")
    assert "layer0, layer1, layer2 and 2 more;" in found.fact
