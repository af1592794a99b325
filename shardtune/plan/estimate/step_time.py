"""Seconds of an optimizer step, part by part: computing, sending, updating, waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from shardtune.core.footprint import Message, predict_messages
from shardtune.core.layout import Cargo, Layout, Of, Op, State
from shardtune.core.mesh import Mesh
from shardtune.core.model.flops import attention_flops, matmul_flops
from shardtune.core.model.shape import ModelShape
from shardtune.plan.cluster import Cluster
from shardtune.plan.estimate.activations import waiting_bytes
from shardtune.plan.estimate.comms import (
    RankGroup,
    Sent,
    Where,
    group_of,
    joint_group,
    on_links,
    seconds,
)
from shardtune.plan.estimate.compute import layer_seconds, loss_seconds, repeated_seconds
from shardtune.plan.estimate.constants import TIME, Chip, TimeConstants, chip_of
from shardtune.plan.estimate.gpu_rates import IDLE, Busy, GpuRates
from shardtune.plan.estimate.rank_share import (
    WEIGHTS,
    RankShare,
    held_share,
    part_bytes,
    spread_evenly,
    states_of,
)
from shardtune.plan.estimate.workload import Workload, sent_bytes, whole_bytes

AGAIN = {"none": 0.0, "selective": 0.35, "full": 1.0}
"""Share of a forward pass that the backward pass repeats. `selective` repeats every second product
and the small operations."""
BUCKETS = 8
"""Pieces in which gradients are reduced: the last one has no computing left to hide behind."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. Of parts that overlap the longer one counts."""

    compute: float
    communication: float
    """Exposed communication."""
    optimizer: float
    offload: float
    """Offloaded states: their transfers, and the work of the CPU or disk. Offloaded activations:
    the part of their transfers that no compute hides."""
    bubble: float
    """Pipeline bubble: stages that wait for others."""
    data: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Wait:
    """Exposed communication: what a move adds to a step, because no computing hides it."""

    op: Op
    what: Cargo
    axis: str
    where: Where
    seconds: float


EIGHT_BIT_PEAK = 2.0
"""What data sheets say of dense 8-bit products against 16-bit ones, of every GPU that has them."""


@dataclass(frozen=True)
class SpeedEstimate:
    """How fast a job trains."""

    step: StepTime
    tokens: int
    """Of a step, on all ranks."""
    ranks: int
    flops: float
    """Of a step, on all ranks, without recomputation."""
    peak: float
    """FLOP/s of one GPU by its data sheet, in the precision of its matmuls."""
    sent: tuple[Sent, ...]
    waits: tuple[Wait, ...] = ()
    """The parts of `step.communication`."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.ranks

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: trained weights count three passes, frozen ones two."""
        return self.flops / self.step.total / self.ranks / self.peak


def estimate_speed(
    layout: Layout,
    shape: ModelShape,
    mesh: Mesh,
    cluster: Cluster,
    work: Workload,
    *,
    chip: Chip | None = None,
    time: TimeConstants = TIME,
) -> SpeedEstimate:
    """The time of one step on the slowest rank."""
    on = GpuRates(cluster, chip or chip_of(cluster.gpu.name), time, work.widths.compute)
    places = RankShare.extremes(shape, mesh, work)
    if not work.counted:  # stages of other tools count alike
        places = places[:1]
    found = [_Step(layout, shape, mesh, cluster, work, cut, on).speed() for cut in places]
    return max(found, key=lambda each: each.step.total)


@dataclass(frozen=True)
class _Step:
    """One step, as its parts see it."""

    layout: Layout
    shape: ModelShape
    mesh: Mesh
    cluster: Cluster
    work: Workload
    cut: RankShare
    on: GpuRates

    @property
    def _in_eight_bits(self) -> bool:
        """Whether frozen weights are multiplied in 8 bits, by a GPU that can."""
        return self.work.fp8 and self.on.chip.fp8_rows > 1

    def speed(self) -> SpeedEstimate:
        work, micro, layers = self.work, self.work.microbatches, self._layers
        layer, loss = self._layer(), loss_seconds(self.shape, work, self.cut, self.on)
        messages = self._messages()
        sending = self._sending(messages)
        gathers, reduction, _ = sending
        forward = self._with(layer.forward, gathers.forward / layers)
        backward = self._with(layer.backward, gathers.backward / layers, reduction / layers)
        slices, border = self._slices(layer), self._border()
        waits = self._waits(messages, sending, layer, slices, border)
        # A rank waits for what an average one does.
        average = (self.shape.layers + self.shape.encoder_layers) / self.cut.pipeline
        slot = average * (forward + backward + slices) + 2 * border
        if work.counted:
            slot += loss.both / self.cut.pipeline
            loss = loss if self.cut.ends else IDLE
        optimizer, offload = self._update()
        step = StepTime(
            compute=micro * (layers * (self._passes * layer.forward + layer.backward) + loss.both),
            communication=sum(each.seconds for each in waits),
            optimizer=optimizer,
            offload=offload + micro * self._waiting(layer),
            bubble=micro * slot * work.pipelining.bubble(self.cut.pipeline, micro),
        )
        return SpeedEstimate(
            step,
            self._step_rows * work.row_tokens,
            self.mesh.size,
            self._flops(),
            self.on.peak * (EIGHT_BIT_PEAK if self._in_eight_bits else 1.0),
            on_links(messages, self.mesh, self.cluster),
            waits,
        )

    @property
    def _layers(self) -> float:
        """Of one stage."""
        return self.cut.layers(self.shape)

    @property
    def _step_rows(self) -> int:
        """On all ranks. The fullest rank has as many as any other or one more."""
        work, cut = self.work, self.cut
        if work.step_rows is not None:
            return work.step_rows
        replicas = self.mesh.size // (cut.tensor * cut.pipeline * cut.context)
        return work.micro_batch * work.microbatches * replicas

    @property
    def _passes(self) -> int:
        """Forward passes of a micro-batch. One that only counts experts computes the logits of one
        token, which are nothing beside its layers."""
        return 2 if self.work.counts_routed else 1

    @property
    def _exchanges(self) -> float:
        """How often tokens are sent to experts, as a multiple of what is declared: a layer that is
        computed again sends them again."""
        return 1.5 if self.work.checkpointing == "full" else 1.0

    def _layer(self, exchanged: Busy = IDLE) -> Busy:
        """One layer of one micro-batch, with what is computed again."""
        layer = layer_seconds(self.shape, self.work, self.cut, self.on, exchanged)
        if self.work.checkpointing in ("mlp", "most"):
            layers = self.shape.layers + self.shape.encoder_layers
            share = max(0.0, 1 - self.work.kept_layers / layers)
            again = share * repeated_seconds(self.shape, self.work, self.cut, self.on)
        else:
            again = AGAIN[self.work.checkpointing] * layer.forward
        return Busy(layer.forward, layer.backward + again)

    # Sending -----------------------------------------------------------------------------------

    def _messages(self) -> tuple[Message, ...]:
        part = part_bytes(sent_bytes(self.shape, self.work), self.shape, self.work, self.cut)
        micro = self.work.microbatches
        found = predict_messages(self.layout, self.mesh, part, microbatches=micro)
        forward = _in_forward_pass(found)
        return tuple(
            replace(each, times=self._passes * each.times) if first else each
            for each, first in zip(found, forward, strict=True)
        )

    def _took(self, message: Message, size: float) -> float:
        return seconds(message.move.op, size, self._group(message.axis), self.cluster, self.on.chip)

    def _group(self, axis: str) -> RankGroup:
        """Ranks that share a long row take part in what data parallelism sends."""
        if self.cut.context > 1 and axis in ("shard", "data", "replicate"):
            return joint_group((axis, "context"), self.mesh, self.cluster)
        return group_of(axis, self.mesh, self.cluster)

    def _sending(self, messages: tuple[Message, ...]) -> tuple[Busy, float, float]:
        """Gathers of a micro-batch, its reductions, and what comes once at the end of the step.

        Each is sent in pieces: a layer's, or a bucket's.
        """
        forward = backward = reduction = at_end = 0.0
        for message, first in zip(messages, _in_forward_pass(messages), strict=True):
            took = self._in_pieces(message)
            if message.move.when == "step":
                at_end += took
            elif first:
                forward += took
            elif message.move.what in WEIGHTS:
                backward += took
            elif message.move.what == "grads":
                reduction += took
        return Busy(forward, backward), reduction, at_end

    def _in_pieces(self, message: Message) -> float:
        pieces = self._pieces(message)
        return pieces * self._took(message, message.size / pieces)

    def _pieces(self, message: Message) -> float:
        """Weights and gradients travel layer by layer, or in buckets of a fixed size."""
        buckets = self.work.buckets
        if buckets is None or _is_gather(message):
            return self._layers
        elements = buckets.reduce if message.move.what == "grads" else buckets.gather
        return max(1, math.ceil(message.size / (elements * self.work.widths.reduced)))

    def _with(self, computing: float, gather: float, reduction: float = 0.0) -> float:
        """A layer's computing and sending. What nobody asked for ahead of its use is waited for."""
        if self.work.prefetch:
            return self._beside(computing, gather + reduction)
        return gather + self._beside(computing, reduction)

    def _waits(
        self,
        messages: tuple[Message, ...],
        sending: tuple[Busy, float, float],
        layer: Busy,
        slices: float,
        border: float,
    ) -> tuple[Wait, ...]:
        """What no computing hides, of all micro-batches, by the move that is waited for: those that
        are hidden together share what is left of them by their own time."""
        gathers, reduction, at_end = sending
        micro, layers = self.work.microbatches, self._layers
        forward = layers * self._with(layer.forward, gathers.forward / layers)
        forward -= layers * layer.forward
        behind = gathers.backward + reduction
        backward = layers * self._with(
            layer.backward, gathers.backward / layers, reduction / layers
        )
        backward -= layers * layer.backward
        after = self._after(at_end, layer)
        found = []
        together = zip(messages, _in_forward_pass(messages), self._unhidden(messages), strict=True)
        for message, first, unhidden in together:
            took, move = self._in_pieces(message), message.move
            if move.when == "step":
                lasts = after * took / at_end if at_end else 0.0
            elif first:
                lasts = micro * self._passes * forward
                lasts *= took / gathers.forward if gathers.forward else 0.0
                unhidden *= self._passes
            elif move.what == "routed":  # experts wait for their tokens, and these for the results
                lasts = message.times * self._took(message, message.size) * self._exchanges
            elif move.what in WEIGHTS or move.what == "grads":
                lasts = micro * backward * took / behind if behind else 0.0
            else:
                continue
            lasts += micro * unhidden
            found.append(self._wait(move.op, move.what, message.axis, lasts))
        found.append(self._wait("all_reduce", "hidden", "tensor", micro * layers * slices))
        handed = 2 * border * self.work.pipelining.chunks
        found.append(self._wait("send_recv", "hidden", "pipeline", micro * handed))
        return tuple(each for each in found if each.seconds)

    def _wait(self, op: Op, what: Cargo, axis: str, lasts: float) -> Wait:
        where = group_of(axis, self.mesh, self.cluster).where
        return Wait(op, what, axis, where, lasts)

    def _beside(self, computing: float, sending: float) -> float:
        """Both at once: the longer, and a part of the shorter that they take from each other."""
        lost = self.on.chip.clash if self.work.overlap else 1.0
        return max(computing, sending) + lost * min(computing, sending)

    def _after(self, sending: float, layer: Busy) -> float:
        """What is left of the step's own sending when the last backward pass hides the rest."""
        if not self.work.overlap or sending == 0.0:
            return sending
        room = layer.backward * self._layers
        hidden = self.on.chip.clash * min(sending, room)
        return max(sending / BUCKETS, sending - room) + hidden

    def _unhidden(self, messages: tuple[Message, ...]) -> list[float]:
        """Of each message what has nothing to hide behind: the first gather of a micro-batch and
        its last reduction."""
        ends = self.shape.embedding_parameters / self.shape.parameters
        share = max(ends, 1 / (self.shape.layers + self.shape.encoder_layers))
        found = []
        for message, first in zip(messages, _in_forward_pass(messages), strict=True):
            weights = message.move.what in WEIGHTS
            counts = message.move.when == "micro_batch" and self.work.overlap
            counts = counts and (message.move.what == "grads" or first)
            part = share
            if self.work.buckets is not None and not weights:
                part = max(share, 1 / self._pieces(message))
            found.append(self._took(message, message.size * part) if counts else 0.0)
        return found

    def _slices(self, layer: Busy) -> float:
        """What a layer takes longer because its slices exchange activations: all wait for that,
        unless it goes in pieces, but a host that is slower than its GPU hides some of it."""
        if self.cut.tensor == 1:
            return 0.0
        size = self.work.tokens / self.cut.context * self.shape.hidden * self.work.widths.compute
        group = group_of("tensor", self.mesh, self.cluster)
        took = 2 * seconds("all_reduce", size, group, self.cluster, self.on.chip)
        took *= self.on.chip.clash if self.work.async_tensor else 1.0
        return self._layer(Busy(took, took)).both - layer.both

    def _border(self) -> float:
        """Activations that one stage hands to the next, or gradients back."""
        if self.cut.pipeline == 1:
            return 0.0
        # The slices of a stage send a share each, and gather what arrives.
        tokens = self.work.tokens / self.cut.context / self.cut.tensor
        size = tokens * self.shape.hidden * self.work.widths.compute
        group = group_of("pipeline", self.mesh, self.cluster)
        return seconds("send_recv", size, group, self.cluster, self.on.chip)

    # Updating ----------------------------------------------------------------------------------

    def _update(self) -> tuple[float, float]:
        """The optimizer on the GPU, which may read its states from the host and write them back; or
        the way to the host, the update there, and the way back."""
        widths = self.work.widths
        own = self._trained_here("optim")
        passed = own * (2 * widths.gradients + 2 * widths.optimizer + 2 * widths.trained)
        home = self.layout.home.get("optim", "gpu")
        # Gradients of every micro-batch are added to those before.
        sums = self.work.microbatches * self._trained_here("grads") * (2 + 2 * widths.gradients)
        if home == "gpu":
            return (passed + sums) / self.on.bytes, self._from_host()
        if self.work.host_mapped:  # both ways at once, and nothing else takes as long
            way = own * widths.optimizer / (self._host * self.on.time.host_mapped)
            return sums / self.on.bytes, way
        neighbours = min(self.mesh.size, self.cluster.gpus_per_node)
        way = own * (widths.gradients + widths.trained) / self._host
        update = passed * neighbours / self.on.time.cpu_bytes
        disk = own * widths.optimizer * neighbours * self._disk if home == "nvme" else 0.0
        return 0.0, way + max(update, disk) + self._from_host()

    def _trained_here(self, state: State) -> float:
        """Trained numbers of which a rank has a state."""
        part = states_of(whole_bytes(self.shape, self.work), self.shape, self.cut)
        size = spread_evenly(self.layout, self.mesh, state, part.trained, part.experts.trained)
        return size / self.work.widths.trained

    @property
    def _host(self) -> float:
        """Bytes a second between a GPU and its host."""
        found = self.cluster.measured.host_to_device_gbs
        return found * 1e9 if found else self.cluster.gpu.host_gbs * 1e9 * self.on.time.host

    @property
    def _disk(self) -> float:
        """Seconds to read a byte and to write it back."""
        measured, time = self.cluster.measured, self.on.time
        read = (measured.disk_read_gbs or time.disk_read_gbs) * 1e9
        return 1 / read + 1 / ((measured.disk_write_gbs or time.disk_write_gbs) * 1e9)

    def _from_host(self) -> float:
        """Weights that live in CPU memory come to the GPU twice for each micro-batch."""
        if self.layout.home.get("params", "gpu") == "gpu":
            return 0.0
        whole = sent_bytes(self.shape, self.work).params * held_share(self.shape, self.cut)
        took = 2 * whole / self.layout.divisor("params", self.mesh) / self._host
        return took * self.work.microbatches * (self.on.chip.clash if self.work.overlap else 1.0)

    def _waiting(self, layer: Busy) -> float:
        """Activations go to CPU memory in the forward pass and come back in the backward pass."""
        way = waiting_bytes(self.shape, self.work, self.cut) / self._host / self._layers
        unhidden = max(0.0, way - layer.forward) + max(0.0, way - layer.backward)
        return self._layers * unhidden

    def _flops(self) -> float:
        work = self.work
        once = self._step_rows * matmul_flops(self.shape, work.sequence, work.target)
        pairs = self._step_rows * attention_flops(self.shape, work.sequence, work.target)
        passes = 3 if self.work.adapter is None else 2
        return passes * once + 3 * pairs


def _in_forward_pass(messages: Sequence[Message]) -> list[bool]:
    """Of each message, whether it gathers weights for the forward pass: the first gather of each
    kind of weights does, those after it are for the backward pass."""
    found: list[bool] = []
    seen: set[Of] = set()
    for message in messages:
        first = _is_gather(message) and message.of not in seen
        seen.update({message.of} if first else ())
        found.append(first)
    return found


def _is_gather(message: Message) -> bool:
    """Whether it brings weights to where a micro-batch is computed."""
    return message.move.what in WEIGHTS and message.move.when == "micro_batch"
