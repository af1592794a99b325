"""Gradients of pipeline stages: tied weights, replicas of a stage, and the norm over all stages."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch.distributed as dist
from torch import Tensor

from shardtune.core.world import World
from shardtune.engine.data_peers import Peers
from shardtune.engine.gradient_reduction import GradientReduction
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.engine.unsharded import Unsharded
from shardtune.parallel.gradients import add_up, square


class StageGradients(GradientReduction):
    """Gradients of the stages that a rank has. First and last stage may have a copy each of a tied
    weight."""

    def __init__(
        self,
        parameters: TrainedParameters,
        sharded: Unsharded | None,
        world: World,
        line: dist.ProcessGroup,
        ranks: Sequence[int],
        *,
        tied: AbstractSet[str],
        peers: Peers,
    ) -> None:
        """`line` are the ranks of one pipeline, `ranks` says which of them has which stage, `peers`
        are those that replicate this rank's stages."""
        super().__init__(parameters, sharded)
        self.world = world
        self.peers = peers
        self._stages = dist.get_world_size(line)
        place = dist.get_rank(line)
        ends = sorted({ranks[0], ranks[-1]})
        self._ends: dist.ProcessGroup | None = None
        self._tied: frozenset[str] = frozenset()
        if len(ends) > 1 and place in ends:
            both = [dist.get_global_rank(line, end) for end in ends]
            self._ends = dist.new_group(both, use_local_synchronization=True)
            self._tied = frozenset(tied & parameters.named.keys())
        self.had_by_another = self._tied if place == ranks[-1] else frozenset()
        """Trained weights that an earlier rank of the line has, too."""

    def reduce(self) -> None:
        """Gradients of the same weights, computed by several ranks, become one."""
        super().reduce()
        gradients = self.parameters.gradients()
        # Sorted: both ranks must send them in one order, and sets have none.
        tied = [gradients[name] for name in sorted(self._tied) if name in gradients]
        if tied:
            add_up(tied, self._ends)
        if self.peers.size > 1:
            add_up(gradients.values(), self.peers.group, over=self.peers.size)

    def norm(self) -> Tensor:
        """Over all stages; a tied weight's gradient lies on two of them, and counts once."""
        gradients = self.parameters.gradients()
        mine = [each for name, each in gradients.items() if name not in self.had_by_another]
        total = square(mine, self.world.size // self._stages).to(self.world.device)
        dist.all_reduce(total)
        return total.sqrt()
