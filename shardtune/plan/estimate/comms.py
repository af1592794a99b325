"""What is sent over which link, and how long it takes.

Neighbouring ranks share a node, so the innermost axes of the mesh stay inside and the outermost
cross. A collective takes a start-up time for each hop of its ring, and the bytes of the slowest
hop over that hop's bandwidth; small payloads are therefore slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardtune.core.footprint import Message
from shardtune.core.layout import Move, Op
from shardtune.core.mesh import WORLD, Mesh
from shardtune.plan.cluster import Cluster
from shardtune.plan.estimate.constants import Chip, chip_of

Where = Literal["intra_node", "inter_node"]


@dataclass(frozen=True)
class RankGroup:
    """The ranks that a collective joins, as they lie on the cluster."""

    ranks: int
    per_node: int
    """How many of them share a node."""
    beside: int
    """How many such groups share a node's way out."""

    @property
    def where(self) -> Where:
        return "intra_node" if self.per_node >= self.ranks else "inter_node"


@dataclass(frozen=True)
class Sent:
    """A declared move on its link."""

    message: Message
    where: Where
    wire: float
    """Bytes that a rank sends for it in a step, over that link."""

    @property
    def axis(self) -> str:
        return self.message.axis

    @property
    def move(self) -> Move:
        return self.message.move

    @property
    def total(self) -> float:
        """Bytes of the tensors that it gathers or reduces in a step."""
        return self.message.size * self.message.times


def crossing(sent: Iterable[Sent]) -> float:
    """Bytes that a rank sends out of its node in a step."""
    return sum(each.wire for each in sent if each.where == "inter_node")


def leaving(sent: Iterable[Sent], mesh: Mesh, cluster: Cluster) -> float:
    """Bytes that all ranks of a node together send out of it in a step: a ring leaves it once."""
    return sum(
        each.wire * group_of(each.axis, mesh, cluster).beside
        for each in sent
        if each.where == "inter_node"
    )


def group_of(axis: str, mesh: Mesh, cluster: Cluster) -> RankGroup:
    """Where the ranks along an axis lie: those of the innermost one are neighbours."""
    if axis == WORLD:
        return RankGroup(mesh.size, min(mesh.size, cluster.gpus_per_node), 1)
    inside = 1
    for name, size in reversed(mesh.axes):
        if name == axis:
            break
        inside *= size
    ranks, node = mesh.size_of(axis), cluster.gpus_per_node
    return RankGroup(ranks, max(1, min(ranks, node // inside)), min(inside, node))


def joint_group(axes: tuple[str, ...], mesh: Mesh, cluster: Cluster) -> RankGroup:
    """Several neighbouring axes as one group."""
    groups = [group_of(axis, mesh, cluster) for axis in axes]
    ranks = math.prod(group.ranks for group in groups)
    per_node = min(math.prod(group.per_node for group in groups), cluster.gpus_per_node)
    return RankGroup(ranks, per_node, min(group.beside for group in groups))


def on_links(messages: tuple[Message, ...], mesh: Mesh, cluster: Cluster) -> tuple[Sent, ...]:
    """Each declared move with the link that it goes over."""
    found = []
    for message in messages:
        group = group_of(message.axis, mesh, cluster)
        wire = message.times * _wire(message.move.op, message.size, group)
        found.append(Sent(message, group.where, wire))
    return tuple(found)


def seconds(op: Op, size: float, group: RankGroup, cluster: Cluster, chip: Chip) -> float:
    """One collective over a tensor of `size` bytes."""
    if group.ranks == 1 or size <= 0:
        return 0.0
    wire = _wire(op, size, group)
    measured = _measured(op, size, group, cluster)
    if measured is not None:
        return wire / measured
    rounds = 2 if op == "all_reduce" else 1
    return rounds * _latency(op, group, cluster) + wire / bandwidth(group, cluster, chip)


LATENCY_SHARE = 0.2
"""Of a collective's time, what may go to its start-up for its link to count as busy: most of it is
hidden behind computing. Chosen, not measured."""


def busy_bytes(mesh: Mesh, cluster: Cluster) -> float:
    """Bytes of a collective over all ranks that keep its slowest link busy."""
    group = group_of(WORLD, mesh, cluster)
    chip = chip_of(cluster.gpu.name)
    if group.ranks == 1:
        return 0.0
    started = _latency("all_gather", group, cluster) * bandwidth(group, cluster, chip)
    return started / LATENCY_SHARE


def bandwidth(group: RankGroup, cluster: Cluster, chip: Chip) -> float:
    """Bytes a second over the slowest hop of a ring through the group, by the data sheets."""
    inside = cluster.intra_node.bandwidth * chip.link
    if group.where == "intra_node":
        return inside
    out = cluster.inter_node.bandwidth * chip.network / group.beside
    return out if group.per_node == 1 else min(inside, out)


def _wire(op: Op, size: float, group: RankGroup) -> float:
    """Bytes that go over each hop of a ring."""
    if op == "send_recv":
        return size
    rounds = 2 if op == "all_reduce" else 1
    return rounds * size * (group.ranks - 1) / group.ranks


def _latency(op: Op, group: RankGroup, cluster: Cluster) -> float:
    """Seconds before the first byte arrives, once around."""
    if op == "send_recv":
        near = group.per_node > 1
        return cluster.intra_node.latency if near else cluster.inter_node.latency
    nodes = group.ranks // group.per_node
    inside = (group.per_node - 1) * cluster.intra_node.latency
    # NCCL joins many nodes by trees, whose depth grows with the logarithm.
    return inside + max(0, (nodes - 1).bit_length()) * cluster.inter_node.latency


def _measured(op: Op, size: float, group: RankGroup, cluster: Cluster) -> float | None:
    """Bytes a second over a hop as `shardtune bench` found them, between the nearest sizes."""
    points = sorted(
        (
            point.bytes,
            _wire(op, point.bytes, RankGroup(point.ranks, point.ranks, 1)) / point.seconds,
        )
        for point in cluster.measured.collectives
        if point.op == op and point.link == group.where
    )
    if not points:
        return None
    below = [point for point in points if point[0] <= size]
    above = [point for point in points if point[0] > size]
    if not below or not above:
        return points[0][1] * size / points[0][0] if not below else points[-1][1]
    (small, slow), (large, fast) = below[-1], above[0]
    share = math.log(size / small) / math.log(large / small)
    return slow * math.exp(share * math.log(fast / slow))
