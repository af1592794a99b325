"""DeepSpeed's engine, made to give what every other engine gives.

DeepSpeed keeps 16-bit weights beside fp32 masters: under bf16 and fp16 the trained weights, too,
are *computed with* in 16 bits, and the masters start from the 16-bit values. Updates, saved weights
and checkpoints are those of the fp32 masters, as everywhere.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtune.compat.c_allocator import freed_memory_goes_back
from shardtune.compat.deepspeed_process import kept_linear, restore_linear
from shardtune.core.footprint import Held
from shardtune.core.layout import Layout, State
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.step import EvalResult, MicroBatch
from shardtune.core.tensor_shards import TensorShard, by_weight
from shardtune.core.world import World
from shardtune.engine.forward_pass import COMPUTE
from shardtune.engine.native import NativeEngine
from shardtune.parallel.deepspeed.leaf_modules import gather_around_uneven_calls
from shardtune.parallel.deepspeed.rank_shards import flat_shards
from shardtune.parallel.deepspeed.startup import (
    end_single_rank_group,
    require_async_io,
    start,
)
from shardtune.parallel.deepspeed.states import States
from shardtune.parallel.deepspeed.zero_stages import states_of


class DeepSpeedEngine(NativeEngine):
    """One optimizer step by DeepSpeed. `config` was derived from `layout`."""

    alone = False
    autocasts = False

    def __init__(
        self,
        builder: ModelBuilder,
        setup: EngineSetup,
        world: World,
        layout: Layout,
        config: Mapping[str, Any],
    ) -> None:
        self._own_group = not dist.is_initialized()  # which is so with one rank only
        deepspeed = start(world)
        config, self._swap = _with_swap_folders(config)
        if self._swap:
            require_async_io(deepspeed)
        self._linear = kept_linear()
        stage = config["zero_optimization"]["stage"]
        with freed_memory_goes_back():
            if stage == 3:
                divide = _Divide(deepspeed, config, COMPUTE[setup.precision])
                model = builder.in_parts(world.device, divide)
                gather_around_uneven_calls(model)
            else:
                model = builder.whole(world.device)
            super().__init__(model, setup, world)
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=self.optimizer, config=dict(config), dist_init_required=False
            )
        self.forward_pass.module = self.engine
        self.states: States = states_of(self.engine, self.optimizer, layout, self._swap)
        self._passing = Held({})

    def _begin(self) -> None:
        self.engine.train()

    def _pass(self, batch: MicroBatch, scale: Tensor | float, *, last: bool) -> Tensor:
        # DeepSpeed's own division by the accumulation is switched off: a step may have any number
        # of micro-batches, and the scale says it all.
        self.engine.set_gradient_accumulation_boundary(last)
        loss = self.forward_pass.loss(batch)
        self.world.heartbeat.enter("backward")
        self.engine.backward(self.states.scaled(loss * scale), scale_wrt_gas=False)
        self._passing = _larger(self._passing, self.states.passing())
        return loss.detach()

    def preflight(self, microbatches: Sequence[MicroBatch]) -> None:
        """The forward pass and its loss only: gradients that DeepSpeed has once summed up can't be
        taken from it again in every stage. Its moments exist from the start in most."""
        self._begin()
        for index, batch in enumerate(microbatches[:1]):
            torch.manual_seed(self._seed_of(index))
            self.forward_pass.loss(batch)
        self.engine.eval()
        self.engine.empty_partition_cache()

    def _update(self, rate: float) -> tuple[Tensor, Tensor]:
        norm, applied = self._waited_for(rate)
        return torch.tensor(norm, dtype=torch.float64), torch.tensor(applied)

    def _waited_for(self, rate: float) -> tuple[float, bool]:
        """The update. DeepSpeed asks the device for the norm before it decides."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        norm = self.states.norm_before()
        if norm is not None and not math.isfinite(norm):
            self.engine.zero_grad()
            return norm, False
        self.engine.step()
        if norm is None:
            norm = float(self.engine.get_global_grad_norm())
        return norm, self.engine.was_step_applied()

    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        result = super().evaluate(name, microbatches)
        self.engine.empty_partition_cache()  # a backward pass would let go of gathered weights
        return result

    def nonfinite_weights(self) -> tuple[str, ...]:
        parts = ((name, getattr(p, "ds_tensor", p).detach()) for name, p in self.trained.items())
        return tuple(name for name, part in parts if not part.isfinite().all())

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.trained.items():
            yield name, self.states.weight(parameter)

    def held(self) -> Held:
        """Gradients, and the second copy that hpZ keeps, are gone after a step: they are counted as
        they stood after a backward pass."""
        lasting, passing = self.states.lasting().bytes, self._passing.bytes
        keys = lasting.keys() | passing.keys()
        return Held({key: lasting.get(key, 0) + passing.get(key, 0) for key in keys})

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        tensors = {f"weight.{name}": weight for name, weight in self.trained_weights()}
        with self.states.unpacked():
            for name, parameter in self.trained.items():
                for key, value in self.states.moments(parameter).items():
                    tensors[f"{key}.{name}"] = value
        return tensors, self._numbers()

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        if not self.states.divided:
            return super().shards()
        with self.states.unpacked():
            return flat_shards(self.states, self.trained, self.world), self._numbers()

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        kept = by_weight(tensors)
        self.states.load({parameter: kept[name] for name, parameter in self.trained.items()})
        self.states.load_scale_state(numbers)
        self.taken = int(numbers["taken"])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.destroy()
        restore_linear(self._linear)
        for folder in self._swap.values():
            shutil.rmtree(folder, ignore_errors=True)
        if self._own_group:
            end_single_rank_group()

    def _numbers(self) -> dict[str, float]:
        return {"taken": float(self.taken), **self.states.scale_state()}


def _larger(one: Held, other: Held) -> Held:
    keys = one.bytes.keys() | other.bytes.keys()
    return Held({key: max(one.bytes.get(key, 0), other.bytes.get(key, 0)) for key in keys})


class _Divide:
    """Partitions one part of a model after another, as if it had been built inside `zero.Init`."""

    def __init__(self, deepspeed: Any, config: Mapping[str, Any], compute: torch.dtype) -> None:
        self._init = deepspeed.zero.Init
        self._config = dict(config)
        self._compute = compute
        self._shared: dict[str, Any] = {}

    def __call__(self, part: nn.Module) -> None:
        for parameter in part.parameters():
            if not hasattr(parameter, "ds_id") and parameter.requires_grad:  # frozen ones are so
                parameter.data = parameter.data.to(self._compute)
        made = self._init(module=part, config_dict_or_path=self._config, **self._shared)
        # A second swapper would remove the first one's files; a second group can't be made.
        self._shared = {
            "param_swapper": made.param_swapper,
            "zero_param_parallel_group": made.zero_param_process_group,
        }


def _with_swap_folders(
    config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[State, Path]]:
    """`config` with folders for swap files of this rank alone, which can be removed as a whole."""
    zero = dict(config["zero_optimization"])
    folders: dict[State, Path] = {}
    states: tuple[tuple[str, State], ...] = (
        ("offload_optimizer", "optim"),
        ("offload_param", "params"),
    )
    for key, state in states:
        section = zero.get(key, {})
        if section.get("device") == "nvme":
            parent = Path(section["nvme_path"])
            parent.mkdir(parents=True, exist_ok=True)
            folders[state] = Path(tempfile.mkdtemp(prefix="shardtune-swap-", dir=parent))
            zero[key] = section | {"nvme_path": str(folders[state])}
    return {**config, "zero_optimization": zero}, folders
