"""Expert parallelism: ranks have experts of their own, and all other weights alike.

Every rank has rows of its own. An expert's gradient comes from the tokens of all ranks that send to
it, so it is whole where it is computed; all other gradients are summed once a step.
"""

from __future__ import annotations

from shardtune.core.mesh import Mesh
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.tensor_shards import TensorShard
from shardtune.core.world import World
from shardtune.engine.data_peers import Peers
from shardtune.engine.dtensor import local
from shardtune.engine.native import NativeEngine
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.parallel.device_mesh import device_mesh, peers
from shardtune.parallel.expert.shard_experts import ExpertParallelModel, build_expert_parallel
from shardtune.parallel.gradients import ShardedGradients, add_up


class ExpertEngine(NativeEngine):
    """The native step on a model of whose experts each rank has some."""

    alone = False

    def __init__(self, builder: ModelBuilder, setup: EngineSetup, world: World, mesh: Mesh) -> None:
        groups = device_mesh(mesh, world)
        model, sharded = build_expert_parallel(builder, world.device, groups["expert"])
        rows = peers(mesh, groups, world)
        data = groups["data"]
        self._twins = Peers(data.get_local_rank(), data.size(), data.get_group())
        self._experts = sharded
        gradients = ExpertGradients(TrainedParameters.of(model), sharded, world, rows, self._twins)
        super().__init__(model, setup, world, rows, sharded, gradients=gradients)

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        """Experts are saved by one of their twins, all else by one of all ranks."""
        routed = {name for name in self.trained if self._experts.is_routed(name)}
        state, twins, rows = self.training_state, self._twins, self.peers
        found = state.shards(twins.rank, twins.size, without=self.trained.keys() - routed)
        return found + state.shards(rows.rank, rows.size, without=routed), self._numbers()


class ExpertGradients(ShardedGradients):
    """Gradients of experts, which only their twins have, and of all else, which every rank has."""

    def __init__(
        self,
        parameters: TrainedParameters,
        sharded: ExpertParallelModel,
        world: World,
        rows: Peers,
        twins: Peers,
    ) -> None:
        super().__init__(parameters, sharded, world)
        self.experts, self.rows, self.twins = sharded, rows, twins

    def reduce(self) -> None:
        found = self.parameters.gradients()
        routed = [grad for name, grad in found.items() if self.experts.is_routed(name)]
        others = [grad for name, grad in found.items() if not self.experts.is_routed(name)]
        add_up(others, self.rows.group, over=self.rows.size)
        if self.twins.size > 1:
            add_up(routed, self.twins.group, over=self.rows.size)
        else:
            for gradient in routed:
                local(gradient).div_(self.rows.size)
