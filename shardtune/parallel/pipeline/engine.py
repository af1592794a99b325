"""Stages on different ranks, run by the schedules of `torch.distributed.pipelining`.

A step hands all of its micro-batches to a schedule, which sends hidden states from stage to stage
and gradients back. What is around that is the native step: counting label tokens, clipping,
updating. `layers` is the same with one micro-batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from shardtune.core.layout import Home, Layout
from shardtune.core.mesh import Mesh
from shardtune.core.model.document_boundaries import takes_boundaries
from shardtune.core.model_builder import ModelBuilder
from shardtune.core.setup import EngineSetup
from shardtune.core.step import EvalResult, MicroBatch
from shardtune.core.tensor_shards import TensorShard
from shardtune.core.world import World
from shardtune.engine.data_peers import Peers
from shardtune.engine.dtensor import reshard
from shardtune.engine.forward_pass import COMPUTE
from shardtune.engine.native import NativeEngine
from shardtune.engine.trained_parameters import TrainedParameters
from shardtune.parallel.device_mesh import device_mesh, peers
from shardtune.parallel.fully_shard import sharing
from shardtune.parallel.gather_named import in_turn, union
from shardtune.parallel.pipeline.build_stages import Divide, Parts
from shardtune.parallel.pipeline.pad_batches import Block, alike
from shardtune.parallel.pipeline.schedules import TimedStage, make_schedule
from shardtune.parallel.pipeline.stage import Stage
from shardtune.parallel.pipeline.stage_gradients import StageGradients
from shardtune.parallel.pipeline.whole_model import Relay


class PipelineEngine(NativeEngine):
    """One rank's stages in a step."""

    fuses = False
    alone = False

    def __init__(
        self,
        builder: ModelBuilder,
        setup: EngineSetup,
        world: World,
        layout: Layout,
        mesh: Mesh,
        *,
        reshard_after_forward: bool = True,
    ) -> None:
        """The mesh says how the layers of a stage are spread further: in sharded, in shares."""
        assert layout.pipelining is not None
        self.pipelining = layout.pipelining
        groups = device_mesh(mesh, world)
        self._line = groups["pipeline"].get_group()
        self._place = groups["pipeline"].get_local_rank()
        self._size = mesh.size_of("pipeline")
        self._offload = layout.home.get("params", "gpu") == "cpu"
        share: Divide | None = None
        if "shard" in dict(mesh.axes):
            share = sharing(
                setup, groups, offload=self._offload, reshard_after_forward=reshard_after_forward
            )
        parts = Parts(
            self.pipelining,
            self._size,
            self._place,
            groups["tensor"] if mesh.size_of("tensor") > 1 else None,
            share,
        )
        home = "cpu" if self._offload else world.device
        model: Any = builder.in_parts(home, parts.divide, parts.left_out)
        if takes_boundaries(model):
            # Schedules hand on rows of tensors, and boundaries run over all rows.
            model.set_attn_implementation("sdpa")
        self.anatomy, self.division = parts.anatomy, parts.division
        # Shares are gathered in the precision of the computation; else it is as weights are held.
        self._flowing = COMPUTE[setup.precision] if share else self.anatomy.dtype
        rows = peers(mesh, groups, world)
        self._replicated = "data" in dict(mesh.axes)
        self._stage_gradients = StageGradients(
            _trained_here(model, parts.aliases),
            parts.sharded,
            world,
            self._line,
            self.division.ranks,
            tied={first for name, first in parts.aliases.items() if name != first},
            peers=rows if self._replicated else Peers(0, 1),
        )
        super().__init__(model, setup, world, rows, parts.sharded, gradients=self._stage_gradients)
        self.stages = {
            number: Stage(
                self.anatomy,
                self.division,
                number,
                self.forward_pass.autocast,
                self.sharded,
                self._flowing,
            )
            for number in self.division.mine(self._place)
        }
        self._relay = Relay(self.anatomy, self.division, self._line, self._place, self._flowing)
        self._schedule: tuple[tuple[int, ...], Any] | None = None
        self._scale = torch.ones(())

    # The step ----------------------------------------------------------------------------------

    def stage(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return microbatches  # they are brought to one shape first, in CPU memory

    def _backward(self, microbatches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        for stage in self.stages.values():
            stage.train()
        self._scale = scale
        blocks = alike(microbatches, self._runs(len(microbatches)), self._seed_of)
        together = 1 if self.pipelining.kind == "layers" else len(blocks)
        self._losses = []
        self.world.heartbeat.enter("collective")
        with self._relay.resting():
            for begin in range(0, len(blocks), together):
                self._losses += self._run(Block.joined(blocks[begin : begin + together]), together)
        total = torch.zeros((), device=self.device)
        if self._losses:
            total += torch.stack(self._losses).sum().detach() / scale
        dist.all_reduce(total, group=self._line)  # only the last stage knows
        return total

    def _enough(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return microbatches  # how many are under way at once is the schedule's matter

    def _runs(self, microbatches: int) -> int:
        return self.pipelining.runs(self._size, microbatches)

    def _run(self, block: Block, microbatches: int) -> list[Tensor]:
        """Forward and backward of some micro-batches; the losses, where the last stage is."""
        block = block.to(self.device)
        schedule = self._scheduled(block.shape, microbatches)
        losses: list[Tensor] = []
        if self._size > 1:
            self._timer.scheduled()
        tokens = (block.input_ids,) if 0 in self.stages else ()
        schedule.step(
            *tokens,
            position_ids=block.position_ids,
            targets=block.targets,
            seeds=block.seeds,
            lengths=block.lengths,
            target=block.seeds,  # a loss function needs one; the stage has done its work
            losses=losses,
        )
        return losses

    def _scheduled(self, shape: tuple[int, int], microbatches: int) -> Any:
        """The schedule for micro-batches of a shape; torch's stages are made for one only."""
        key = (*shape, microbatches)
        if self._schedule is None or self._schedule[0] != key:
            self._schedule = None  # its buffers go before new ones come
            stages = [self._torch_stage(each, shape) for each in self.stages.values()]
            self._schedule = (
                key,
                make_schedule(self.pipelining, self._size, stages, microbatches, self._scaled),
            )
        return self._schedule[1]

    def _torch_stage(self, stage: Stage, shape: tuple[int, int]) -> PipelineStage:
        flowing = torch.empty(
            *shape, self.anatomy.hidden, dtype=self._flowing, device="meta", requires_grad=True
        )
        tokens = torch.empty(shape, dtype=torch.long, device="meta")
        loss = torch.empty(1, device="meta", requires_grad=True)
        return TimedStage(
            self._timer,
            self.world.heartbeat,
            shape,
            stage,
            stage.number,
            len(self.division.layers),
            self.device,
            input_args=tokens if stage.first else flowing,
            output_args=loss if stage.last else flowing,
            group=self._line,
        )

    def _scaled(self, loss: Tensor, _: Tensor) -> Tensor:
        return loss.sum() * self._scale

    def _home(self) -> Home:
        return "cpu" if self._offload else "gpu"

    # Everything else ---------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, name: str, microbatches: Iterable[MicroBatch]) -> EvalResult:
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for stage in self.stages.values():
            stage.eval()
        with self._relay.resting():
            for batch in microbatches:
                self.world.heartbeat.enter("evaluate")
                sums += self._through(Block.of(batch).to(self.device))
        reshard(self.model)
        dist.all_reduce(sums, group=self._line)
        self.peers.sum(sums)
        loss, correct, labels = sums.tolist()
        return EvalResult(name, loss, int(correct), int(labels))

    def _through(self, block: Block) -> Tensor:
        """One micro-batch through all stages; its sums on the last rank, zeros on the others."""
        ranks = self.division.ranks
        flowing = block.input_ids
        for number, stage in self.stages.items():
            if number and ranks[number - 1] != self._place:
                flowing = torch.empty(
                    *block.shape, self.anatomy.hidden, dtype=self._flowing, device=self.device
                )
                dist.recv(flowing, group=self._line, group_src=ranks[number - 1])
            given = (block.position_ids, block.targets, block.seeds, block.lengths)
            flowing = stage(flowing, *given)
            if not stage.last and ranks[number + 1] != self._place:
                dist.send(flowing.contiguous(), group=self._line, group_dst=ranks[number + 1])
        return flowing if stage.last else torch.zeros(3, device=self.device)

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        mine = {name: weight.detach() for name, weight in self.trained.items()}
        return in_turn(mine, self._line, self.training_state.whole)

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        mine, numbers = super().state()
        return union(mine, self._line), numbers

    def shards(self) -> tuple[list[TensorShard], dict[str, float]]:
        rows = self.peers if self._replicated else Peers(0, 1)
        without = self._stage_gradients.had_by_another
        return self.training_state.shards(rows.rank, rows.size, without), self._numbers()


def _trained_here(model: nn.Module, aliases: Mapping[str, str]) -> TrainedParameters:
    """By the name in the whole model; a tied weight has one name on both of its ranks."""
    return TrainedParameters(
        {
            aliases[name]: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and not parameter.is_meta
        }
    )
