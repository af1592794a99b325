"""DeepSpeed's configuration, derived from a layout.

The stage, the offload devices and ZeRO++ are read from the layout and from nowhere else, so the
engine can't run something other than what is declared.
"""

from __future__ import annotations

from typing import Any

from shardtune.core.job_section import Section
from shardtune.core.layout import Home, Layout
from shardtune.core.mesh import Mesh
from shardtune.core.setup import EngineSetup
from shardtune.core.world import World
from shardtune.parallel.deepspeed.deepspeed_fields import DeepSpeedFields


def to_deepspeed(
    layout: Layout, mesh: Mesh, strategy: DeepSpeedFields, setup: EngineSetup, world: World
) -> dict[str, Any]:
    """DeepSpeed's configuration. What is divided, sent and put where comes from the layout."""
    zero: dict[str, Any] = _given(strategy.zero_optimization)
    zero |= _declared(layout, mesh)
    homes: dict[str, Home] = {
        "offload_optimizer": layout.home.get("optim", "gpu"),
        "offload_param": layout.home.get("params", "gpu"),
    }
    for key, home in homes.items():
        section = zero.pop(key)
        if home != "gpu":
            pin = section.get("pin_memory", True) and world.device != "cpu"  # pinning needs a GPU
            zero[key] = section | {"device": home, "pin_memory": pin}
    stage = zero["stage"]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.micro_batch,
        "gradient_accumulation_steps": setup.accumulation,
        "train_batch_size": setup.micro_batch * setup.accumulation * world.size,
        # DeepSpeed clips at 1.0 where nothing is said; 0 never clips.
        "gradient_clipping": setup.max_grad_norm or 0.0,
        "bf16": {"enabled": setup.precision == "bf16"},
        "fp16": {"enabled": setup.precision == "fp16", **_given(strategy.fp16)},
        "zero_optimization": zero,
        # Our own optimizers, torch's. Offloaded ones run on the CPU without a compiler that way.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": strategy.wall_clock_breakdown,
    }
    if setup.precision != "fp32" and setup.accumulation > 1 and stage > 0:
        # A sum of many micro-batches loses too much in 16 bits.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if "nvme" in homes.values():
        config["aio"] = _given(strategy.aio)
    for key in ("communication_data_type", "prescale_gradients", "gradient_predivide_factor"):
        value = getattr(strategy, key)
        if value is not None:
            config[key] = value
    return config


def _declared(layout: Layout, mesh: Mesh) -> dict[str, Any]:
    """The stage and ZeRO++ as the layout has them."""
    divided = {state for rule in layout.rules for state in rule.divides}
    moves = [move for rule in layout.rules for move in rule.moves]
    copying = [rule for rule in layout.rules if "params" in rule.copies]
    return {
        "stage": len(divided),
        # DeepSpeed would all-reduce whole buckets and throw away what isn't its own: twice the
        # bytes of the reduction to each owner that the layout declares.
        "use_multi_rank_bucket_allreduce": False,
        "zero_hpz_partition_size": mesh.size_of(copying[0].axis) if copying else 1,
        "zero_quantized_weights": any(m.what == "params" and m.scale < 1 for m in moves),
        "zero_quantized_gradients": any(m.what == "grads" and m.scale < 1 for m in moves),
    }


def _given(section: Section) -> dict[str, Any]:
    """The keys that are set; the others keep DeepSpeed's defaults."""
    return section.model_dump(exclude_none=True)
