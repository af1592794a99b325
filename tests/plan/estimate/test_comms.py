"""What crosses which link, and what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardtune.core.footprint import ModelBytes, predict_messages
from shardtune.core.mesh import Mesh
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from shardtune.parallel.fsdp.strategy import FSDP
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.estimate.comms import (
    RankGroup,
    Sent,
    bandwidth,
    crossing,
    group_of,
    on_links,
    seconds,
)
from shardtune.plan.estimate.constants import chip_of
from shardtune.plan.machine_profile import CollectivePoint, Measured

TWO_NODES = parse_cluster("2x8xA100-80GB@400Gbps")
MODEL = 10**9
WHOLE = ModelBytes(params=MODEL, trained=MODEL, grads=MODEL, optim=6 * MODEL)
A100 = chip_of("A100-80GB")


def sent_by(strategy: FSDP | DeepSpeed) -> tuple[Sent, ...]:
    mesh = strategy.mesh(16)
    messages = predict_messages(strategy.layout(), mesh, WHOLE, microbatches=1)
    return on_links(messages, mesh, TWO_NODES)


def zero3(**settings: Any) -> DeepSpeed:
    return DeepSpeed(zero_optimization=ZeRO.model_validate({"stage": 3, **settings}))


def test_zeropp_crosses_nodes_with_a_quarter_of_zero3() -> None:
    # 3 M against 0.5 M + 0 + 0.25 M (DeepSpeed's ZeRO++ blog); a ring sends 15/16 of it.
    plain = sent_by(zero3())
    plus = sent_by(
        zero3(zero_hpz_partition_size=8, zero_quantized_weights=True, zero_quantized_gradients=True)
    )
    assert crossing(plain) == pytest.approx(3 * MODEL * 15 / 16)
    assert crossing(plus) == pytest.approx(0.75 * MODEL * 15 / 16)


def test_hpz_alone_keeps_the_backward_gather_inside() -> None:
    sent = sent_by(zero3(zero_hpz_partition_size=8))
    inside = [each for each in sent if each.where == "intra_node"]
    assert [(each.move.op, each.wire) for each in inside] == [("all_gather", MODEL * 7 / 8)]
    assert crossing(sent) == pytest.approx(2 * MODEL * 15 / 16)


def test_hybrid_sharding_crosses_with_its_share_of_the_gradients_only() -> None:
    sent = sent_by(FSDP(sharding="hybrid", replicas=2))
    # An all-reduce between two of an eighth of the gradients: twice, half of it each time.
    assert crossing(sent) == pytest.approx(2 * MODEL / 8 / 2)
    assert crossing(sent) < crossing(sent_by(FSDP())) / 10


@pytest.mark.parametrize(
    ("axis", "expected"),
    [("tensor", RankGroup(8, 8, 1)), ("data", RankGroup(2, 1, 8)), ("world", RankGroup(16, 8, 1))],
)
def test_the_innermost_axis_stays_inside_a_node(axis: str, expected: RankGroup) -> None:
    assert group_of(axis, Mesh((("data", 2), ("tensor", 8))), TWO_NODES) == expected


def test_groups_that_cross_side_by_side_share_the_way_out() -> None:
    alone, eight = (bandwidth(RankGroup(2, 1, n), TWO_NODES, A100) for n in (1, 8))
    assert eight == pytest.approx(alone / 8)


def test_small_payloads_are_slow() -> None:
    node = RankGroup(8, 8, 1)
    rates = [size / seconds("all_reduce", size, node, TWO_NODES, A100) for size in (2**20, 2**30)]
    assert rates[0] < rates[1] / 5


def test_a_rank_alone_sends_nothing() -> None:
    assert seconds("all_reduce", MODEL, RankGroup(1, 1, 1), TWO_NODES, A100) == 0.0


def test_measured_collectives_count_instead_of_the_data_sheet() -> None:
    points = tuple(
        CollectivePoint(op="all_gather", link="intra_node", ranks=8, bytes=size, seconds=took)
        for size, took in ((10**6, 1e-3), (10**8, 1e-2))
    )
    cluster = replace(TWO_NODES, measured=Measured(collectives=points))
    node = RankGroup(8, 8, 1)
    for point in points:
        found = seconds("all_gather", point.bytes, node, cluster, A100)
        assert found == pytest.approx(point.seconds)
    assert 1e-3 < seconds("all_gather", 10**7, node, cluster, A100) < 1e-2
    # Below the smallest size that was measured it takes as long as that.
    assert seconds("all_gather", 10**3, node, cluster, A100) == pytest.approx(1e-3)
