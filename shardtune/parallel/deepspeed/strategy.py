"""DeepSpeed: ZeRO in its four stages, offload to memory and disk, ZeRO++.

The fields bear DeepSpeed's own names, so that its documentation applies. What decides is the
layout: `derive_config.py` derives the engine's settings from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from shardtune.core.capabilities import Capabilities, Need, Refusal
from shardtune.core.files.yaml_document import KeyPath
from shardtune.core.layout import AxisRule, Home, Layout, Move, State
from shardtune.core.mesh import WORLD, Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.send_buckets import SendBuckets
from shardtune.core.setup import EngineSetup, Precision
from shardtune.core.strategy import Choice, Devices, JobFacts, ResolvedStrategy, ToldValue
from shardtune.core.world import World
from shardtune.errors import JobError, Problem
from shardtune.parallel.capability_limits import WHOLE_COPIES, divided, layers_as_written
from shardtune.parallel.deepspeed import json_file, limits
from shardtune.parallel.deepspeed.buckets import buckets_of, sized_buckets
from shardtune.parallel.deepspeed.deepspeed_fields import DeepSpeedFields
from shardtune.parallel.deepspeed.derive_config import to_deepspeed

if TYPE_CHECKING:
    from shardtune.core.engine import Engine
    from shardtune.core.model.shape import ModelShape

STAGES: tuple[State, ...] = ("optim", "grads", "params")
"""What a stage divides: stage n the first n of these."""
INT8, INT4 = 0.5, 0.25
"""What ZeRO++ sends, as a share of the 16 bits that it would send otherwise."""


class DeepSpeed(DeepSpeedFields):
    """DeepSpeed's engine: our fields, or a DeepSpeed JSON file as it is."""

    def mesh(self, ranks: int) -> Mesh:
        within = self.zero_optimization.zero_hpz_partition_size
        if within == 1:
            return Mesh((("data", ranks),))
        return Mesh((("between", max(1, ranks // within)), ("within", within)))

    def layout(self) -> Layout:
        """What the stage divides and sends. hpZ is two axes: ranks of a node, and nodes."""
        zero = self.zero_optimization
        home: dict[State, Home] = {}
        if zero.offload_optimizer.device != "none":
            home["optim"] = zero.offload_optimizer.device
            home["grads"] = "cpu"  # where the update is computed
        if zero.offload_param.device != "none":
            home["params"] = zero.offload_param.device
        divides = frozenset(STAGES[: zero.stage])
        masters = zero.stage > 0  # ZeRO updates a flat copy of its share, also in fp32
        if zero.stage < 3:
            # Collected in one buffer, and once more in the form that the update wants.
            twice: frozenset[State] = frozenset({"grads"} if "optim" in home else ())
            moves = tuple(self._reduced(move) for move in _MOVES[zero.stage])
            return Layout((AxisRule("data", divides, moves, twice),), home, masters)
        gather = Move(
            "all_gather", "params", "micro_batch", INT8 if zero.zero_quantized_weights else 1.0
        )
        reduce = Move(
            "reduce_scatter", "grads", "micro_batch", INT4 if zero.zero_quantized_gradients else 1.0
        )
        reduce = self._reduced(reduce)
        if zero.zero_hpz_partition_size == 1:
            return Layout((AxisRule("data", divides, (gather, gather, reduce)),), home, masters)
        # Forward over all ranks, backward within the node, which keeps a copy for it.
        between = AxisRule("between", divides)
        within = AxisRule("within", divides, (gather,), frozenset({"params"}))
        everywhere = AxisRule(WORLD, moves=(gather, reduce))
        return Layout((between, within, everywhere), home, masters)

    def _reduced(self, move: Move) -> Move:
        """How gradients meet: to each rank its own share, or with `reduce_scatter: false` all of
        them to all, twice the bytes."""
        whole = self.zero_optimization.reduce_scatter is False and move.op == "reduce_scatter"
        return replace(move, op="all_reduce") if whole else move

    def send_buckets(self) -> SendBuckets:
        return buckets_of(self.zero_optimization)

    def with_buckets(self, size: float) -> DeepSpeed:
        told = sized_buckets(self.zero_optimization, size)
        return self.model_copy(update={"zero_optimization": told})

    @property
    def capabilities(self) -> Capabilities:
        zero = self.zero_optimization
        return _capabilities(
            zero.offload_param.device == "nvme",
            zero.offload_optimizer.device != "none",
            zero.stage == 3 and zero.zero_hpz_partition_size == 1,
            self.config is not None,
        )

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        from shardtune.parallel.deepspeed.engine import DeepSpeedEngine

        self.require(world, setup.precision)
        layout = self.layout()
        config = to_deepspeed(layout, self.mesh(world.size), self, setup, world)
        return DeepSpeedEngine(builder, setup, world, layout, config)

    def require(self, world: World, precision: Precision) -> None:
        """Refuses what DeepSpeed can't do, on these ranks or at all."""
        here = self.problems_here(gpu=world.device != "cpu", precision=precision)
        problems = [*self.problems(world.size), *here]
        if problems:
            raise JobError(problems)

    def problems(self, ranks: int) -> list[Problem]:
        """What DeepSpeed can't do on so many ranks of any machine."""
        if self.config is not None:
            fact = f"{self.config} has not been read"
            return [Problem("strategy.config", fact, "resolve the job before it is built")]
        zero = self.zero_optimization
        return [*limits.anywhere(zero), *limits.on_ranks(zero, ranks)]

    def told(self, ranks: int) -> Mapping[KeyPath, ToldValue]:
        return json_file.told(self, ranks) if self.config is not None else {}

    def precision(self) -> tuple[Precision, str] | None:
        return json_file.precision(self) if self.config is not None else None

    def micro_batch(self, global_batch: int, ranks: int) -> tuple[int, str] | None:
        return json_file.micro_batch(self, global_batch, ranks) if self.config is not None else None

    def resolved(self, facts: JobFacts) -> ResolvedStrategy:
        if self.config is None:
            return ResolvedStrategy(self)
        found = json_file.read(self, facts)
        return ResolvedStrategy(found.strategy, found.reasons, found.notes)

    @classmethod
    def candidates(cls, shape: ModelShape, devices: Devices) -> Iterator[Choice]:
        if devices.count > 1:
            for stage in (1, 2, 3):
                yield cls._choice(f"zero{stage}", 10, stage=stage)
        if devices.nodes > 1 and devices.per_node > 1:
            size = devices.per_node
            yield cls._choice("zero3 + hpZ", 21, stage=3, zero_hpz_partition_size=size)
        if devices.gpu:
            cpu = {"device": "cpu"}
            name = "zero2, optimizer in CPU memory"
            yield cls._choice(name, 40, stage=2, offload_optimizer=cpu)
            name = "zero3, optimizer in CPU memory"
            yield cls._choice(name, 41, stage=3, offload_optimizer=cpu)
            name = "zero3, all in CPU memory"
            yield cls._choice(name, 42, stage=3, offload_optimizer=cpu, offload_param=cpu)

    @classmethod
    def _choice(cls, name: str, order: int, **zero: Any) -> Choice:
        return Choice(name, name, cls.model_validate({"zero_optimization": zero}), order)

    def problems_here(self, *, gpu: bool, precision: Precision) -> list[Problem]:
        """What it can't do on this machine, in this precision."""
        return limits.here(self.zero_optimization, gpu=gpu, precision=precision)


@cache
def _capabilities(files: bool, offload: bool, everywhere: bool, described: bool) -> Capabilities:
    """With weights in files, an offloaded optimizer, weights gathered from all ranks, or a file
    that describes it all."""
    whole = layers_as_written(divided(WHOLE_COPIES, "deepspeed"), "deepspeed")
    quantizations, bits = whole.quantizations, whole.optimizer_bits
    if files:
        fact = (
            "weights can't be offloaded to NVMe (zero_optimization.offload_param): DeepSpeed reads "
            "their packed bytes back as numbers in the model's dtype"
        )
        fix = "set offload_param.device: cpu"
        quantizations = quantizations.without(
            {kind: Refusal(f"{kind} {fact}", fix) for kind in ("nf4", "int8")}
        )
    if offload:
        fact = (
            "8-bit moments can't be offloaded (zero_optimization.offload_optimizer): on the CPU "
            "each update would unpack a rank's whole shard to 32 bits"
        )
        bits = bits.without({"8": Refusal(fact, "set offload_optimizer.device: none")})
    return replace(
        whole,
        quantizations=quantizations,
        optimizer_bits=bits,
        router_losses=Refusal("DeepSpeed scales the gradients of its own loss only"),
        micro_batch_by_memory=not described,  # the file has a word in it
        dry_run=Refusal(
            "DeepSpeed allocates buffers of its own, which fake tensors can't represent",
            "set strategy.type: fsdp, which shards as stage 3 does",
        ),
        offload={"params": ("cpu", "nvme"), "grads": ("cpu",), "optim": ("cpu", "nvme")},
        trained_weights="compute_precision",
        gathers_from_all_nodes=everywhere,
        needs=(Need("deepspeed", "deepspeed"),),
    )


_MOVES: dict[int, tuple[Move, ...]] = {
    0: (Move("all_reduce", "grads", "step"),),
    1: (Move("reduce_scatter", "grads", "step"), Move("all_gather", "trained", "step")),
    2: (Move("reduce_scatter", "grads", "micro_batch"), Move("all_gather", "trained", "step")),
}
