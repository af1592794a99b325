"""The measurement of a machine, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from shardtune.core.files.yaml_document import dump_document
from shardtune.core.host.machine import Machine
from shardtune.core.world import World
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.machine_profile import CollectivePoint, Profile
from shardtune.report.bench_table import bus_gbs, draw_bench, print_bench
from tests.ranks import on_ranks


def measure(world: World, folder: str) -> str:
    from shardtune.measure import bench

    bench.SECONDS = 0.001
    bench.LARGEST_MESSAGE["cpu"] = 1 << 20
    bench.CPU_SHAPES = ((64, 64, 64), (128, 64, 32))
    return bench.bench(world, Path(folder), lambda text: None).model_dump_json()


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    text, _ = on_ranks(2, measure, str(tmp_path_factory.mktemp("disk")))
    return Profile.model_validate_json(text)


def test_everything_is_measured_on_two_ranks(profile: Profile) -> None:
    measured = profile.measured
    assert [(point.m, point.k, point.n) for point in measured.matmul] == [
        (64, 64, 64),
        (128, 64, 32),
    ]
    assert measured.memory_gbs
    assert measured.disk_write_gbs
    assert measured.disk_read_gbs
    found = {(point.op, point.bytes) for point in measured.collectives}
    ops = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
    assert found == {(op, 1 << power) for op in ops for power in (16, 18, 20)}
    assert {point.link for point in measured.collectives} == {"intra_node"}
    assert (profile.nodes, profile.gpus_per_node) == (1, 2)


def test_the_planner_reads_what_was_written(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(dump_document(profile.model_dump(mode="json")), encoding="utf-8")
    cluster = parse_cluster(str(path))
    assert cluster.gpus == 2
    assert cluster.measured == profile.measured
    if not Machine.here().gpus:  # where tests say that nothing but fp32 is fast
        assert {point.dtype for point in cluster.measured.matmul} == {"fp32"}
        assert cluster.gpu.matmul.best(gpu=False) == ("fp32", "the measured CPU has no fast bf16")


def test_it_is_shown_and_drawn(profile: Profile, tmp_path: Path) -> None:
    console = Console(record=True, width=100)
    print_bench(profile, console)
    assert "reduce_scatter" in console.export_text()
    draw_bench(profile, tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").read_text(encoding="utf-8").count("<polyline") == 4


@pytest.mark.parametrize(
    ("op", "expected"),
    # nccl-tests, doc/PERFORMANCE.md: an all-reduce of 4 ranks carries 2 * 3/4 of its bytes.
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("send_recv", 1.0)],
)
def test_bus_bandwidth_counts_what_a_link_carries(op: str, expected: float) -> None:
    point = CollectivePoint.model_validate(
        {"op": op, "link": "intra_node", "ranks": 4, "bytes": 10**9, "seconds": 1.0}
    )
    assert bus_gbs(point) == pytest.approx(expected)
