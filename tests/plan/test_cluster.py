"""Clusters, from a short text or a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.core.files.yaml_document import dump_document
from shardtune.errors import JobError
from shardtune.plan.cluster import DISPLAY_GIB, Cluster, find_gpu, known_gpus, parse_cluster
from shardtune.plan.machine_profile import Profile

PROFILE: dict[str, Any] = {
    "gpu": "A100-80GB",
    "nodes": 2,
    "gpus_per_node": 8,
    "inter_node_gbps": 1600,
    "host_gib": 1024,
    "nvme_gib": 7000,
    "price_per_gpu_hour": 2.5,
    "measured": {
        "matmul": [{"m": 8192, "n": 8192, "k": 8192, "tflops": 271.0}],
        "memory_gbs": 1700.0,
        "host_to_device_gbs": 24.5,
        "collectives": [
            {
                "op": "all_reduce",
                "link": "intra_node",
                "ranks": 8,
                "bytes": 1 << 30,
                "seconds": 0.008,
            }
        ],
    },
}


def written(folder: Path, value: Any, name: str = "cluster.yaml") -> str:
    path = folder / name
    text = dump_document(value) if name.endswith(".yaml") else json.dumps(value, indent=1)
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems_of(spec: str) -> dict[str, str]:
    with pytest.raises(JobError) as error:
        parse_cluster(spec)
    assert all(problem.place and problem.fix for problem in error.value.problems)
    return {problem.fact: problem.fix for problem in error.value.problems}


# Specs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "gpu", "nodes", "each", "link", "gbps"),
    [
        ("4xA40", "A40", 1, 4, "pcie", None),
        ("8xH100-80GB", "H100-80GB", 1, 8, "nvlink", None),
        ("2x8xA100-80GB@400Gbps", "A100-80GB", 2, 8, "nvlink", 400),
        ("8xRTX3090:pcie", "RTX3090", 1, 8, "pcie", None),
        ("1xRTX4090", "RTX4090", 1, 1, "pcie", None),
        ("128x8xH100-80GB@3200Gbps", "H100-80GB", 128, 8, "nvlink", 3200),
        ("2xA40:nvlink", "A40", 1, 2, "nvlink", None),
        ("8xa100 80gb:PCIe", "A100-80GB", 1, 8, "pcie", None),
        (" 4x4090 ", "RTX4090", 1, 4, "pcie", None),
        ("4x8xMI300X:nvlink@12.5Gbps", "MI300X", 4, 8, "nvlink", 12.5),
    ],
)
def test_a_spec_says_it_all(
    spec: str, gpu: str, nodes: int, each: int, link: str, gbps: float | None
) -> None:
    cluster = parse_cluster(spec)
    assert cluster.gpu.name == gpu
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, each)
    assert cluster.gpus == nodes * each
    assert cluster.link == link
    assert cluster.inter_node_gbps == (gbps or 100)
    assert cluster.name == spec.strip()


def test_links_are_in_bytes() -> None:
    cluster = parse_cluster("2x8xA100-80GB@400Gbps")
    assert cluster.intra_node.bandwidth == 300e9  # NVIDIA: 600 GB/s in both directions
    assert cluster.inter_node.bandwidth == 50e9
    over_pcie = parse_cluster("8xA100-80GB:pcie")
    assert over_pcie.intra_node.bandwidth == 31.5e9
    assert over_pcie.intra_node.latency > cluster.intra_node.latency


def test_what_nobody_said_is_told() -> None:
    (assumption,) = parse_cluster("2x8xH100").assumptions
    assert "100 Gbps between nodes" in assumption
    (assumption,) = parse_cluster("2xA6000").assumptions
    assert "bridge" in assumption
    (assumption,) = parse_cluster("64xH100").assumptions
    assert "one node with 64 GPUs" in assumption
    for spec in ("8xH100", "2x8xH100@400Gbps", "2xA6000:nvlink", "4xA6000"):
        assert parse_cluster(spec).assumptions == ()


@pytest.mark.parametrize(
    ("spec", "fact", "fix"),
    [
        ("4xA41", "there is no GPU 'A41' in the catalogue", "did you mean A40?"),
        ("8xH100-90GB", "no GPU 'H100-90GB'", "did you mean H100-94GB?"),
        ("2xQuantum", "no GPU 'Quantum'", "describe it in a profile"),
        ("0xA40", "0 GPUs in a node", "at least 1"),
        ("0x8xA40", "0 nodes", "at least 1"),
        ("8xH100:nvlnk", "'nvlnk' is no link", "did you mean nvlink?"),
        ("8xH100:ethernet", "'ethernet' is no link", "nvlink or pcie"),
        ("1xT4:nvlink", "T4 has no NVLink", "pcie"),
        ("4xA40:nvlink", "bridges connect two A40, not 4", "pcie"),
        ("2x8xH100@50GB/s", "GB/s are bytes", "write @400Gbps"),
        ("2x8xH100@400", "400 of what?", "Gbps"),
        ("2x8xH100@400Mbps", "'Mbps' is no unit", "Gbps"),
        ("2x8xH100@0Gbps", "0 Gbps", "more than nothing"),
        ("64xH100@25Gbps", "64xH100 is one node", "2x8xH100"),
        ("H100", "'H100' is neither a cluster nor a file", "4xA40"),
        ("", "neither a cluster nor a file", "4xA40"),
        ("8x", "neither a cluster nor a file", "4xA40"),
        ("-1xA40", "neither a cluster nor a file", "4xA40"),
        ("9" * 5000 + "xA40", "neither a cluster nor a file", "4xA40"),
    ],
)
def test_a_bad_spec_is_told_with_its_fix(spec: str, fact: str, fix: str) -> None:
    ((found, mend),) = problems_of(spec).items()
    assert fact in found
    assert fix in mend


def test_all_that_is_wrong_is_told_at_once() -> None:
    assert len(problems_of("0x0xA41@5Mbps")) == 4


@given(st.text(max_size=40))
@settings(deadline=None)  # a busy machine is no failure
def test_any_text_is_a_cluster_or_refused(text: str) -> None:
    try:
        cluster = parse_cluster(text)
    except JobError:
        return
    assert isinstance(cluster, Cluster)


@given(
    nodes=st.integers(1, 9999),
    each=st.integers(1, 16),
    gpu=st.sampled_from(sorted(known_gpus())),
    gbps=st.integers(1, 10**6),
)
@settings(deadline=None)
def test_a_spec_means_what_it_was_made_from(nodes: int, each: int, gpu: str, gbps: int) -> None:
    cluster = parse_cluster(f"{nodes}x{each}x{gpu}@{gbps}Gbps")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.name) == (nodes, each, gpu)
    assert cluster.inter_node_gbps == gbps


# The catalogue ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_gpus())
def test_every_gpu_is_whole_and_plausible(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.name == name
    assert 10 < gpu.memory_gib < 300
    assert 10 < gpu.peak_tflops < 3000
    assert 300 <= gpu.memory_gbs <= 8000
    assert gpu.bf16_tflops in (None, gpu.fp16_tflops)
    assert gpu.fp32_tflops is not None
    # Tensor cores and AMD's matrix cores have no full fp32, or less of it.
    assert 1.9 < gpu.fp16_tflops / gpu.fp32_tflops < 32
    assert (gpu.nvlink == "none") == (gpu.nvlink_gbs is None)
    assert gpu.source
    # What is usable is less than what is sold (in GB of 10^9), but not much less.
    sold = next((part for part in name.split("-") if part.endswith("GB")), None)
    if sold is not None:
        assert 0.90 < gpu.memory_gib * 2**30 / (float(sold[:-2]) * 10**9) < 1.08


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A100", "A100-80GB"),
        ("a100-sxm4-40gb", "A100-40GB"),
        ("h100_80gb", "H100-80GB"),
        ("RTX 4090", "RTX4090"),
        ("H200", "H200-141GB"),
    ],
)
def test_a_gpu_is_found_by_its_other_names(name: str, expected: str) -> None:
    assert find_gpu(name).name == expected


# Profiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.json"])
def test_a_profile_carries_what_was_measured(tmp_path: Path, name: str) -> None:
    cluster = parse_cluster(written(tmp_path, PROFILE, name))
    assert cluster.gpu is find_gpu("A100-80GB")
    assert cluster.gpus == 16
    assert cluster.link == "nvlink"
    assert cluster.host_gib == 1024
    assert cluster.nvme_gib == 7000
    assert cluster.price_per_hour == 40
    assert cluster.measured.matmul[0].tflops == 271
    assert cluster.measured.device_to_host_gbs is None
    assert cluster.measured.collectives[0].bytes == 1 << 30
    assert cluster.assumptions == ()


def test_a_profile_may_be_called_anything(tmp_path: Path) -> None:
    path = tmp_path / "cluster"
    path.write_text("gpu: A40\ngpus_per_node: 2\n", encoding="utf-8")
    assert parse_cluster(str(path)).gpus == 2


def test_a_profile_may_describe_its_own_gpu(tmp_path: Path) -> None:
    gpu = {"name": "X1", "memory_gib": 30.5, "bf16_tflops": 200, "fp16_tflops": 200}
    cluster = parse_cluster(
        written(tmp_path, {"gpu": {**gpu, "memory_gbs": 900, "nvlink_gbs": 100}})
    )
    assert cluster.gpu.name == "X1"
    assert cluster.link == "nvlink"
    assert cluster.gpu.host_gbs == 31.5


def test_the_json_of_a_profile_can_be_read_back(tmp_path: Path) -> None:
    profile = Profile.model_validate_json(json.dumps(PROFILE))
    path = tmp_path / "again.json"
    path.write_text(profile.model_dump_json(), encoding="utf-8")
    assert parse_cluster(str(path)).measured == profile.measured


def test_problems_of_a_profile_stand_at_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "gpu: A100-80GB\n"
        "node: 2\n"
        "gpus_per_node: 0\n"
        "measured:\n"
        "  collectives:\n"
        "  - {op: all_reduc, link: intra_node, ranks: 8, bytes: 10}\n",
        encoding="utf-8",
    )
    with pytest.raises(JobError) as error:
        parse_cluster(str(path))
    found = {problem.place: (problem.fact, problem.fix) for problem in error.value.problems}
    inside = "measured.collectives.0"
    assert found == {
        f"{path}:2: node": ("unknown key", "did you mean 'nodes'?"),
        f"{path}:3: gpus_per_node": (
            "is 0; it must be greater than or equal to 1",
            "correct it",
        ),
        f"{path}:6: {inside}.op": (
            'is "all_reduc"; it must be'
            " 'all_reduce', 'all_gather', 'reduce_scatter' or 'send_recv'",
            "correct it",
        ),
        f"{path}:6: {inside}.seconds": ("is missing", "add `seconds:`"),
    }


@pytest.mark.parametrize(
    ("value", "place", "fact"),
    [
        ({}, "gpu", "is missing"),
        ({"gpu": "A101"}, "gpu", "no GPU 'A101'"),
        ({"gpu": {"name": "X"}}, "gpu.memory_gib", "is missing"),
        ({"gpu": "T4", "link": "nvlink"}, "link", "T4 has no NVLink"),
        ({"gpu": "T4", "nodes": 1.5}, "nodes", "is 1.5; it must be a valid integer"),
        ({"gpu": "T4", "host_gib": -1}, "host_gib", "is -1; it must be greater than 0"),
        ({"gpu": "T4", "measured": {"memory": 3}}, "measured.memory", "unknown key"),
        ([1], "", "not a mapping"),
        (None, "", "is empty"),
    ],
)
def test_a_bad_profile(tmp_path: Path, value: Any, place: str, fact: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("" if value is None else dump_document(value), encoding="utf-8")
    with pytest.raises(JobError) as error:
        parse_cluster(str(path))
    assert any(
        fact in problem.fact and problem.place.endswith(place) for problem in error.value.problems
    )
    assert all(problem.place.startswith(str(path)) for problem in error.value.problems)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("gpu: A40\n", encoding="utf-8")
    with pytest.raises(JobError, match=r"no such file\n.*did you mean .*cluster\.yaml"):
        parse_cluster(str(tmp_path / "clustr.yaml"))


def test_a_card_that_drives_a_screen_has_less() -> None:
    whole = parse_cluster("2xA100-80GB:pcie").gpu.memory_gib
    assert parse_cluster("2xA100-80GB:pcie:display").gpu.memory_gib == whole - DISPLAY_GIB
    assert parse_cluster("2xA100-80GB:display:pcie").link == "pcie"
    assert parse_cluster("2x8xA100-80GB:40GiB@400Gbps").gpu.memory_gib == 40


@pytest.mark.parametrize("spec", ["1xRTX4090:80GiB", "1xRTX4090:0GiB", "2xA100-80GB:pcie:nvlink"])
def test_memory_that_a_card_does_not_have_is_refused(spec: str) -> None:
    with pytest.raises(JobError):
        parse_cluster(spec)


def test_a_profile_may_say_what_a_job_may_take(tmp_path: Path) -> None:
    profile = tmp_path / "desk.yaml"
    profile.write_text("gpu: RTX4090\nmemory_gib: 20\n", encoding="utf-8")
    assert parse_cluster(str(profile)).gpu.memory_gib == 20
