"""A strategy as a picture: which states each rank holds, and what moves, as its layout declares.

It shows a model of eight layers between an embedding and a head. Every rank has three columns, for
weights, gradients and optimizer states; what is filled is what it holds. Below stands what the
ranks of each axis send each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import pairwise

from shardtune.core.layout import AxisRule, Layout, Move, State
from shardtune.core.mesh import WORLD, Mesh
from shardtune.core.pipeline_schedule import split_layers, stage_costs
from shardtune.core.strategy import StrategyBase

_LAYERS = 8
_PARTS = ("embedding", *(f"layer {number}" for number in range(_LAYERS)), "head")
_STATES: dict[State, tuple[str, str]] = {
    "params": ("weights", "#3b6fb6"),
    "grads": ("gradients", "#c8782d"),
    "optim": ("optimizer", "#4b9460"),
}
_MOST_RANKS = 8
_CELL, _HIGH, _GAP, _LEFT, _TOP, _LINE = 30, 18, 34, 84, 74, 17

_OPS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "send_recv": "send",
    "all_to_all": "all-to-all",
}
_CARGO = {
    "params": "weights",
    "recalled": "weights, again for the backward pass",
    "trained": "trained weights",
    "grads": "gradients",
    "unsliced": "gradients of what every rank has whole",
    "tied": "gradients of a tied embedding (first and last stage)",
    "hidden": "hidden states",
    "embedded": "gradients of the embedding's output",
    "scores": "softmax statistics of the loss",
    "routed": "tokens for experts",
}
_PER = {
    "model": "",
    "layer": " in each layer",
    "mixture": " in each layer with experts",
    "return": " in each layer",
    "start": " behind the embedding",
    "end": " at the head",
    "border": " at each border of stages",
}


class StrategyPicture:
    """One strategy on so many ranks, of which the first eight are drawn."""

    def __init__(self, title: str, strategy: StrategyBase, ranks: int) -> None:
        self.title, self.ranks = title, min(ranks, _MOST_RANKS)
        self.mesh: Mesh = strategy.mesh(ranks)
        self.layout: Layout = strategy.layout()
        self.width = _LEFT + self.ranks * (3 * _CELL + _GAP)

    def svg(self) -> str:
        flows = list(self._flows())
        height = _TOP + len(_PARTS) * _HIGH + 30 + _LINE * (len(flows) + 1)
        width = max(self.width, 24 + max(7 * len(line) for line in flows))
        body = [*self._heading(), *self._parts(), *self._arrows(), *self._legend(flows)]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
                "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
                "markerHeight='7' orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='#444'/></marker>"
                "</defs>",
                f'<rect width="{width}" height="{height}" fill="white"/>',
                *body,
                "</svg>",
                "",
            ]
        )

    def _heading(self) -> Iterator[str]:
        yield _text(12, 20, self.title, size=15, bold=True)
        shown = f"; the first {self.ranks} are shown" if self.ranks < self.mesh.size else ""
        yield _text(12, 38, f"{self.mesh} = {self.mesh.size} ranks{shown}", colour="#555")
        for rank in range(self.ranks):
            place = self.mesh.coordinates(rank)
            where = " ".join(f"{axis} {place[axis]}" for axis in place) if len(place) > 1 else ""
            yield _text(self._left(rank), _TOP - 20, f"rank {rank}", bold=True)
            yield _text(self._left(rank), _TOP - 7, where, size=9, colour="#555")

    def _parts(self) -> Iterator[str]:
        for row, part in enumerate(_PARTS):
            yield _text(12, self._top(row) + _HIGH - 6, part, colour="#555")
            for rank in range(self.ranks):
                for column, (state, (_, colour)) in enumerate(_STATES.items()):
                    yield from self._cell(rank, row, column, state, colour)

    def _cell(self, rank: int, row: int, column: int, state: State, colour: str) -> Iterator[str]:
        """A part of the model in one state: an outline, and in it what the rank holds."""
        left, top = self._left(rank) + column * _CELL, self._top(row)
        yield _box(left, top, _CELL - 3, _HIGH - 3, "#f1f1f1")
        if _PARTS[row] not in self._held_parts(rank, state):
            return
        share, of = self._share(rank, state, "share")
        slot, slots = self._share(rank, state, "slices")
        wide, high = (_CELL - 3) / slots, max(0.5, (_HIGH - 3) / of)
        dash = ' stroke="black" stroke-dasharray="2 2"' if state in self.layout.home else ""
        yield _box(left + slot * wide, top + share * high, wide, high, colour, dash)

    def _share(self, rank: int, state: State, by: str) -> tuple[int, int]:
        """Which of how many equal pieces a rank has of weights that are no experts, along all axes
        that divide this way."""
        place, index, count = self.mesh.coordinates(rank), 0, 1
        for rule in self.layout.rules:
            if rule.by == by and state in rule.divides and rule.covers("others"):
                size = self.mesh.size_of(rule.axis)
                mine = rank if rule.axis == WORLD else place.get(rule.axis, 0)
                index, count = index * size + mine, count * size
        return index, count

    def _held_parts(self, rank: int, state: State) -> set[str]:
        """The layers of the rank's stages, and the ends where it has the first or the last."""
        order = self.layout.pipelining
        if order is None:
            return set(_PARTS)
        ranks, here = self.mesh.size_of("pipeline"), self.mesh.coordinates(rank)["pipeline"]
        owners = order.ranks(ranks)
        found = {
            f"layer {n}"
            for owner, stage in zip(owners, self._stages(), strict=True)
            if owner == here
            for n in stage
        }
        ends = {"embedding": owners[0], "head": owners[-1]}
        return found | {name for name, owner in ends.items() if owner == here}

    def _stages(self) -> tuple[range, ...]:
        order = self.layout.pipelining
        assert order is not None
        return split_layers(
            stage_costs([1.0] * _LAYERS, 0.5), order.stages(self.mesh.size_of("pipeline"))
        )

    def _arrows(self) -> Iterator[str]:
        """From the last layer of each stage to the first of the next, where that is elsewhere."""
        order = self.layout.pipelining
        if order is None:
            return
        owners = order.ranks(self.mesh.size_of("pipeline"))
        borders = [stage[-1] for stage in self._stages()[:-1]]
        for (here, there), layer in zip(pairwise(owners), borders, strict=True):
            for rank in range(self.ranks):
                place = self.mesh.coordinates(rank)
                if here == there or place["pipeline"] != here:
                    continue
                other = self._rank_at(place | {"pipeline": there})
                if other is None:
                    continue
                begin, end = self._left(rank) + 3 * _CELL - 2, self._left(other) - 3
                if other < rank:
                    begin, end = self._left(rank) - 3, self._left(other) + 3 * _CELL - 2
                y = self._top(layer + 1) + _HIGH - 2
                yield (
                    f'<line x1="{begin}" y1="{y}" x2="{end}" y2="{y + 8}" stroke="#444" '
                    'stroke-width="1.3" marker-end="url(#tip)"/>'
                )

    def _rank_at(self, place: dict[str, int]) -> int | None:
        """Of those that are drawn."""
        drawn = range(self.ranks)
        return next((rank for rank in drawn if self.mesh.coordinates(rank) == place), None)

    def _legend(self, flows: list[str]) -> Iterator[str]:
        y = _TOP + len(_PARTS) * _HIGH + 22
        left = 12
        for name, colour in _STATES.values():
            yield _box(left, y - 10, 12, 12, colour)
            yield _text(left + 17, y, name)
            left += 100
        for number, line in enumerate(flows, 1):
            yield _text(12, y + number * _LINE + 4, line, colour="#333")

    def _flows(self) -> Iterator[str]:
        for rule in self.layout.rules:
            size = self.mesh.size_of(rule.axis)
            if size == 1:
                continue
            lines = dict.fromkeys(_said(move) for move in rule.moves)
            counts = {line: sum(_said(move) == line for move in rule.moves) for line in lines}
            yield f"{_axis(rule, self.mesh)}:"
            for line, count in counts.items():
                yield f"    {line}" + (f", {count} times" if count > 1 else "")
        if any(self.layout.home.values()):
            homes = ", ".join(f"{state} on {home}" for state, home in self.layout.home.items())
            yield f"dashed: {homes}"

    def _left(self, rank: int) -> float:
        return _LEFT + rank * (3 * _CELL + _GAP)

    def _top(self, row: int) -> float:
        return _TOP + row * _HIGH


def _axis(rule: AxisRule, mesh: Mesh) -> str:
    axis = "over all ranks" if rule.axis == WORLD else f"along {rule.axis}"
    whose = {"all": "", "experts": ", of experts", "others": ", of all but experts"}[rule.of]
    return f"{axis}({mesh.size_of(rule.axis)}){whose}"


def _said(move: Move) -> str:
    when = "each step" if move.when == "step" else "each micro-batch"
    cargo = _CARGO[move.what]
    if move.op == "send_recv":
        cargo += " on, their gradients back"
    return f"{_OPS[move.op]} {cargo}, {when}{_PER[move.per]}"


def _box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def _text(
    x: float, y: float, said: str, *, size: int = 12, bold: bool = False, colour: str = "#111"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    words = escape(said).replace("    ", "\N{NO-BREAK SPACE}" * 4)
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{weight}>{words}</text>'
