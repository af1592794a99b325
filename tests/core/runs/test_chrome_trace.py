"""Chrome traces, added up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.core.runs.chrome_trace import (
    add_up,
    overlap,
    own_times,
    read_trace,
    subtract,
    union,
)


def event(name: str, kind: str, begin: float, end: float, thread: int = 1) -> dict[str, Any]:
    times = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "name": name, "cat": kind, "pid": 7, "tid": thread, **times}


def written(folder: Path, *events: dict[str, Any]) -> Path:
    path = folder / "trace.json.gz"
    other = {"ph": "M", "name": "process_name"}
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [other, *events]}).encode()))
    return path


def test_intervals() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert overlap([(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 20)]) == 1 + 1 + 1 + 1
    assert subtract([(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 20)]) == [(0, 1), (2, 3), (6, 8)]
    assert subtract([(0, 4)], []) == [(0, 4)]


def test_an_operations_own_time_is_without_those_it_calls(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        event("aten::linear", "cpu_op", 0, 100),
        event("aten::addmm", "cpu_op", 10, 90),
        event("aten::copy_", "cpu_op", 20, 40),
        event("aten::add", "cpu_op", 100, 130),
    )
    own = own_times(read_trace(path))
    assert own == [
        ("aten::linear", 20), ("aten::addmm", 60), ("aten::copy_", 20), ("aten::add", 30)
    ]  # fmt: skip


def test_a_processor(tmp_path: Path) -> None:
    """200 us of one step: 100 of matmul, 30 of others, 20 waiting in an operation that sends, and
    50 of Python, in 10 of which gloo still sends."""
    path = written(
        tmp_path,
        event("aten::addmm", "cpu_op", 0, 100),
        event("aten::mul", "cpu_op", 100, 130),
        event("c10d::allreduce_", "cpu_op", 130, 150),
        event("gloo:all_reduce", "user_annotation", 90, 160, thread=2),
        event("aten::copy_", "cpu_op", 91, 92, thread=2),
        event("DistributedDataParallel.forward", "user_annotation", 0, 200),
    )
    found = add_up(read_trace(path), rank=1, steps=1, seconds=200e-6)
    assert not found.on_gpu
    assert found.matmul == pytest.approx(100e-6)
    assert found.memory == pytest.approx(30e-6)
    assert found.exposed == pytest.approx(30e-6)
    assert found.idle == pytest.approx(40e-6)
    (sent,) = found.collectives
    assert (sent.op, sent.count) == ("all_reduce", 1)
    assert (sent.seconds, sent.exposed) == (pytest.approx(70e-6), pytest.approx(30e-6))
    assert [each.name for each in found.top] == ["aten::addmm", "aten::mul"]


def test_a_gpu(tmp_path: Path) -> None:
    """Kernels of two streams; the second all-gather has nothing to hide behind."""
    path = written(
        tmp_path,
        event("aten::mm", "cpu_op", 0, 5),
        event("sm90_xmma_gemm_bf16", "kernel", 10, 60, thread=7),
        event("flash_fwd_kernel", "kernel", 60, 80, thread=7),
        event("vectorized_elementwise_kernel", "kernel", 80, 90, thread=7),
        event("ncclDevKernel_AllGather_RING_LL(x)", "kernel", 20, 50, thread=13),
        event("ncclDevKernel_AllGather_RING_LL(x)", "kernel", 90, 130, thread=13),
        event("ncclDevKernel_ReduceScatter_Sum_f32(x)", "kernel", 85, 95, thread=14),
        event("Memcpy HtoD", "gpu_memcpy", 0, 4, thread=20),
    )
    found = add_up(read_trace(path), rank=0, steps=1, seconds=150e-6)
    assert found.on_gpu
    kinds = (found.matmul, found.attention, found.memory, found.copies)
    assert kinds == pytest.approx((50e-6, 20e-6, 10e-6, 4e-6))
    assert found.exposed == pytest.approx(40e-6)
    assert found.idle == pytest.approx(150e-6 - 4e-6 - 120e-6)
    exposed = {each.op: each.exposed for each in found.collectives}
    assert exposed == pytest.approx({"all_gather": 40e-6, "reduce_scatter": 5e-6})
