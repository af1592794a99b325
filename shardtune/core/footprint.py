"""Bytes: what a layout predicts for a rank, and what an engine really holds. One type for both."""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.core.layout import Cargo, Home, Layout, Move, Of, Op, Per, State
from shardtune.core.mesh import Mesh


@dataclass(frozen=True)
class ExpertBytes:
    """Bytes of a model's experts, and of training them."""

    params: int = 0
    trained: int = 0
    grads: int = 0
    optim: int = 0

    @property
    def recalled(self) -> int:
        """Weights that the backward pass needs again: gradients flow through all experts."""
        return self.params


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model and of training it, unsharded; or of the part of it on one rank.

    Stages, tensor-parallel shards and experts come first: `params` and the rest are then those of
    the rank's own part, and the data axes shard them further.
    """

    params: int
    """All weights, frozen ones too, as they are stored between steps."""
    trained: int
    """Of these, the ones that are trained."""
    grads: int
    optim: int
    """Moments; fp32 masters, if an engine keeps them, are another `trained` in addition."""
    unsliced: int = 0
    """Gradients of trained weights that tensor parallelism replicates, but computes in parts."""
    experts: ExpertBytes = ExpertBytes()
    """The part of `params` and the rest that is experts, if a layout has rules of their own."""
    idle: int = 0
    """Of all weights, those that no backward pass reaches: an untied frozen embedding."""
    tied: int = 0
    """Gradients of weights of which both the first and the last stage hold a copy."""
    hidden: int = 0
    """Hidden states between two layers for one micro-batch."""
    embedded: int = 0
    """The same, if its gradient is needed: by a trained embedding."""
    scores: float = 0
    """One fp32 number for each token of a micro-batch whose logits are computed, on average."""
    routed: int = 0
    """The rows that a micro-batch sends to the experts of one layer: one per token and choice."""
    mixtures: int = 0
    """Layers with experts."""
    layers: int = 0
    returns: int = 0
    """Of these layers, those that return a gradient: not the first after a frozen embedding."""
    starts: int = 0
    """1 if the rank has the embedding."""
    ends: int = 0
    """1 if the rank has the head."""
    borders: int = 0
    """Borders between stages over which the rank sends, counted once for each direction."""

    @property
    def recalled(self) -> int:
        """Weights that the backward pass needs again."""
        return self.params - self.idle

    def carried(self, what: Cargo, of: Of) -> float:
        """Bytes of a cargo, of these weights."""
        whole: float = getattr(self, what)
        routed: float = getattr(self.experts, what, 0)
        return {"all": whole, "experts": routed, "others": whole - routed}[of]

    def times(self, per: Per) -> int:
        """How often a move happens in a micro-batch, or a step."""
        counts: dict[Per, int] = {
            "model": 1,
            "layer": self.layers,
            "mixture": self.mixtures,
            "return": self.returns,
            "start": self.starts,
            "end": self.ends,
            "border": self.borders,
        }
        return counts[per]


@dataclass(frozen=True)
class Held:
    """Bytes by state and by place: GPU, CPU or NVMe."""

    bytes: dict[tuple[State, Home], int]

    def of(self, state: State) -> int:
        """A state's bytes in all places."""
        return sum(size for (kind, _), size in self.bytes.items() if kind == state)


def predict_held(layout: Layout, mesh: Mesh, whole: ModelBytes) -> Held:
    """The bytes of each state that a rank holds between two steps, without padding."""
    found: dict[tuple[State, Home], int] = {}
    states: tuple[State, ...] = ("params", "grads", "optim")
    for state in states:
        routed = _taken(state, whole.experts, layout)
        rest = _taken(state, whole, layout) - routed
        held = layout.held(state, rest, mesh) + layout.held(state, routed, mesh, "experts")
        found[state, layout.home.get(state, "gpu")] = held
    return Held(found)


def _taken(state: State, whole: ModelBytes | ExpertBytes, layout: Layout) -> int:
    """Bytes of a state, with the optimizer's masters where it has them."""
    masters = whole.trained if state == "optim" and layout.masters else 0
    sizes = {"params": whole.params, "grads": whole.grads, "optim": whole.optim}
    return sizes[state] + masters


@dataclass(frozen=True)
class Message:
    """A declared move as a rank sends it: how large one is, and how many a step has."""

    axis: str
    move: Move
    size: float
    """Bytes of the tensor that it gathers or reduces."""
    times: int
    of: Of = "all"
    """Whose bytes they are."""


def predict_messages(
    layout: Layout, mesh: Mesh, whole: ModelBytes, *, microbatches: int
) -> tuple[Message, ...]:
    """Every collective that a rank takes part in during a step."""
    found = []
    for rule, move in layout.sending(mesh):
        size = whole.carried(move.what, rule.of) * move.scale / layout.share(move.what, rule, mesh)
        times = microbatches if move.when == "micro_batch" else 1
        found.append(Message(rule.axis, move, size, times * whole.times(move.per), rule.of))
    return tuple(found)


def predict_sent(
    layout: Layout, mesh: Mesh, whole: ModelBytes, *, microbatches: int
) -> dict[Op, int]:
    """Bytes of the collectives that a rank takes part in during a step, by kind.

    A collective counts with the bytes of the tensor that it gathers or reduces.
    """
    sent: dict[Op, int] = {}
    for each in predict_messages(layout, mesh, whole, microbatches=microbatches):
        op = each.move.op
        sent[op] = sent.get(op, 0) + round(each.size * each.times)
    return sent
