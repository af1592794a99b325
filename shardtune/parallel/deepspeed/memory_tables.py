"""The tables of DeepSpeed's two memory estimators, by its own formulas.

DeepSpeed prints them for a model in memory (`..._all_live`) or for two counts of parameters
(`..._all_cold`): `estimate_zero2_model_states_mem_needs_all_live` and so on. All weights are
trained in 16 bits with Adam; activations and buffers don't count. In bytes a parameter:

    stage 2                 GPU 2 + 18 / GPUs                CPU 4 x GPUs of a node, while loading
    stage 2, optimizer      GPU 2                            CPU max(4 x GPUs, 16)
    stage 3                 GPU 4 x largest + 18 / GPUs      CPU as it is loaded
    stage 3, optimizer      GPU 4 x largest + 2 / GPUs       CPU 16 / nodes
    stage 3, and weights    GPU 4 x largest                  CPU 18 / nodes

What stands for the CPU is taken 1.5 times. Without `zero_init` every rank loads the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardtune.core.states_table import StatesRow, StatesTable
from shardtune.core.strategy import Devices
from shardtune.parallel.deepspeed.strategy import DeepSpeed

BUFFERS = 1.5
"""DeepSpeed's `additional_buffer_factor`."""
HALF_WIDTH, FULL_WIDTH = 2, 4
"""Bytes of a number."""
PER_TRAINED = 18
"""A gradient in 16 bits and one in 32, the weight in 32, two moments."""


def states_tables(parameters: int, largest: int, devices: Devices) -> tuple[StatesTable, ...]:
    """Both tables. `largest` is the number of parameters of the largest module, without what lies
    in modules inside it."""
    model = f"Model with {int(parameters / 1e6)}M total params"
    return (
        StatesTable("ZeRO-2", f"{model}.", tuple(_second(parameters, devices))),
        StatesTable(
            "ZeRO-3",
            f"{model}, {int(largest / 1e6)}M largest layer params.",
            tuple(_third(parameters, largest, devices)),
        ),
    )


def _second(parameters: int, on: Devices) -> Iterator[StatesRow]:
    loading = parameters * FULL_WIDTH * on.per_node * BUFFERS
    for offload in (True, False):
        if offload:
            cpu = parameters * max(FULL_WIDTH * on.count, 16) * BUFFERS
            gpu = HALF_WIDTH * parameters
        else:
            cpu, gpu = loading, HALF_WIDTH * parameters + int(PER_TRAINED * parameters / on.count)
        yield StatesRow(
            f"offload_optimizer={_device(offload)}", int(cpu), gpu, _strategy(2, offload), True
        )


def _third(parameters: int, largest: int, on: Devices) -> Iterator[StatesRow]:
    live = FULL_WIDTH * largest
    whole = FULL_WIDTH * on.per_node
    """Bytes a parameter where each rank of a node loads the whole model."""
    for optimizer, weights in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            if optimizer:
                held = (PER_TRAINED if weights else PER_TRAINED - HALF_WIDTH) * (1 / on.nodes)
                gpu = live + (0 if weights else int(HALF_WIDTH * parameters / on.count))
                cpu = parameters * (held if zero_init else max(whole, held)) * BUFFERS
            else:
                gpu = live + int(PER_TRAINED * parameters / on.count)
                cpu = (largest if zero_init else parameters) * FULL_WIDTH * on.per_node * BUFFERS
            options = f"offload_param={_device(weights)}, offload_optimizer={_device(optimizer)}"
            yield StatesRow(
                f"{options}, zero_init={int(zero_init)}",
                int(cpu),
                gpu,
                _strategy(3, optimizer, weights),
                not zero_init,
            )


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _strategy(stage: int, optimizer: bool, weights: bool = False) -> DeepSpeed:
    zero: dict[str, object] = {"stage": stage}
    if optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if weights:
        zero["offload_param"] = {"device": "cpu"}
    return DeepSpeed.model_validate({"type": "deepspeed", "zero_optimization": zero})
