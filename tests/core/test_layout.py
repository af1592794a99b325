"""Declarations of strategies: what a rank holds, and what is sent."""

from __future__ import annotations

import pytest

from shardtune.core.footprint import ExpertBytes, ModelBytes, predict_held, predict_sent
from shardtune.core.layout import AxisRule, Layout, Move, State
from shardtune.core.mesh import WORLD, Mesh

BYTES: dict[State, int] = {"params": 2, "grads": 2, "optim": 12}
"""Per parameter in mixed precision with Adam, as the ZeRO paper counts them."""


def divides(*states: State) -> Layout:
    return Layout((AxisRule("shard", frozenset(states)),))


# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
# figure 1: 7.5 B parameters on 64 GPUs, in GB (10^9 bytes).
PAPER = {
    (): 120,
    ("optim",): 31.4,
    ("optim", "grads"): 16.6,
    ("optim", "grads", "params"): 1.9,
}


@pytest.mark.parametrize("states", PAPER)
def test_the_figure_of_the_zero_paper(states: tuple[State, ...]) -> None:
    mesh = Mesh((("shard", 64),))
    layout = divides(*states)
    held = sum(7.5e9 * size / layout.divisor(state, mesh) for state, size in BYTES.items())
    assert held / 1e9 == pytest.approx(PAPER[states], abs=0.06)


def test_axes_that_divide_the_same_state_multiply() -> None:
    layout = Layout(
        (
            AxisRule("shard", frozenset({"params", "optim"})),
            AxisRule("tensor", frozenset({"params"})),
        )
    )
    mesh = Mesh((("shard", 4), ("tensor", 2)))
    assert layout.divisor("params", mesh) == 8
    assert layout.divisor("optim", mesh) == 4
    assert layout.divisor("activations", mesh) == 1


def test_an_axis_of_one_rank_divides_and_sends_nothing() -> None:
    gather = Move("all_gather", "params", "micro_batch", scale=0.5)
    reduce = Move("all_reduce", "grads", "step")
    layout = Layout(
        (
            AxisRule("shard", frozenset({"params"}), (gather,)),
            AxisRule("replicate", moves=(reduce,)),
        )
    )
    assert layout.moves(Mesh((("shard", 4), ("replicate", 2)))) == (
        ("shard", gather),
        ("replicate", reduce),
    )
    lonely = Mesh((("shard", 1), ("replicate", 2)))
    assert layout.moves(lonely) == (("replicate", reduce),)
    assert layout.divisor("params", lonely) == 1
    assert layout.moves(Mesh(())) == ()


def test_rules_of_experts_and_of_other_weights_divide_these_alone() -> None:
    """Two nodes of four ranks: experts over four, shared by two; all else over eight."""
    gather, reduce = (
        Move("all_gather", "params", "micro_batch"),
        Move("all_reduce", "grads", "step"),
    )
    params = frozenset[State]({"params", "grads"})
    layout = Layout(
        (
            AxisRule("shard", params, (gather,), of="experts"),
            AxisRule("expert", params, by="experts"),
            AxisRule(WORLD, params, (gather, reduce), of="others"),
        )
    )
    mesh = Mesh((("shard", 2), ("expert", 4)))
    assert layout.divisor("params", mesh, "experts") == 2
    assert layout.divisor("params", mesh, "others") == 8
    part = ModelBytes(900, 900, 900, 0, experts=ExpertBytes(100, 100, 100))
    assert predict_held(layout, mesh, part).of("params") == 100 // 2 + 800 // 8
    sent = predict_sent(layout, mesh, part, microbatches=1)
    assert sent == {"all_gather": 100 + 800, "all_reduce": 800}


def test_states_live_on_the_gpu_unless_said_otherwise() -> None:
    assert Layout(()).home == {}
    assert Layout((), {"optim": "cpu"}).home["optim"] == "cpu"


def test_who_calls_the_model_together() -> None:
    """Ranks along model axes have the same rows, so they call it together anyway."""
    params = frozenset[State]({"params"})
    by_experts = Layout((AxisRule("expert", params, by="experts"),))
    by_slices = Layout((AxisRule("tensor", params, by="slices"),))
    assert divides("params").together(Mesh((("shard", 2),)))
    assert by_experts.together(Mesh((("data", 1), ("expert", 2))))
    assert not by_experts.together(Mesh((("data", 2), ("expert", 1))))
    assert not by_slices.together(Mesh((("data", 1), ("tensor", 2))))
    assert not divides("optim").together(Mesh((("shard", 2),)))
