"""DeepSpeed: ZeRO in its four stages, offload to memory and disk, ZeRO++.

The fields bear DeepSpeed's own names, so that its documentation applies. What decides is the
layout: `derive_config.py` derives the engine's settings from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardtune.core.layout import AxisRule, Home, Layout, Move, State
from shardtune.core.mesh import WORLD, Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.world import World
from shardtune.errors import JobError, Problem
from shardtune.parallel.deepspeed import limits
from shardtune.parallel.deepspeed.deepspeed_fields import DeepSpeedFields
from shardtune.parallel.deepspeed.derive_config import to_deepspeed

if TYPE_CHECKING:
    from shardtune.core.engine import Engine

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
            return Layout((AxisRule("data", divides, _MOVES[zero.stage], twice),), home, masters)
        gather = Move(
            "all_gather", "params", "micro_batch", INT8 if zero.zero_quantized_weights else 1.0
        )
        reduce = Move(
            "reduce_scatter", "grads", "micro_batch", INT4 if zero.zero_quantized_gradients else 1.0
        )
        if zero.zero_hpz_partition_size == 1:
            return Layout((AxisRule("data", divides, (gather, gather, reduce)),), home, masters)
        # Forward over all ranks, backward within the node, which keeps a copy for it.
        between = AxisRule("between", divides)
        within = AxisRule("within", divides, (gather,), frozenset({"params"}))
        everywhere = AxisRule(WORLD, moves=(gather, reduce))
        return Layout((between, within, everywhere), home, masters)

    def build(self, builder: ModelBuilder, setup: EngineSetup, world: World) -> Engine:
        from shardtune.parallel.deepspeed.engine import DeepSpeedEngine

        self.require(world)
        layout = self.layout()
        config = to_deepspeed(layout, self.mesh(world.size), self, setup, world)
        return DeepSpeedEngine(builder, setup, world, layout, config)

    def require(self, world: World) -> None:
        """Refuses what DeepSpeed can't do, on these ranks or at all."""
        gpu = world.device != "cpu"
        problems = [*self.problems(world.size), *self.problems_here(gpu=gpu)]
        if problems:
            raise JobError(problems)

    def problems(self, ranks: int) -> list[Problem]:
        """What DeepSpeed can't do on so many ranks of any machine."""
        if self.config is not None:
            fact = f"{self.config} has not been read"
            return [Problem("strategy.config", fact, "resolve the job before it is built")]
        zero = self.zero_optimization
        return [*limits.anywhere(zero), *limits.on_ranks(zero, ranks)]

    def problems_here(self, *, gpu: bool) -> list[Problem]:
        """What it can't do on this machine."""
        return limits.here(self.zero_optimization, gpu=gpu)


_MOVES: dict[int, tuple[Move, ...]] = {
    0: (Move("all_reduce", "grads", "step"),),
    1: (Move("reduce_scatter", "grads", "step"), Move("all_gather", "trained", "step")),
    2: (Move("reduce_scatter", "grads", "micro_batch"), Move("all_gather", "trained", "step")),
}
