"""What a CPU is fast in: measured once, kept for this CPU and this torch, forced by environment."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardtune.core.host import matmul_speed
from shardtune.core.host.matmul_speed import (
    FAST_PRECISIONS,
    MatmulSpeed,
    cpu_matmul_speed,
    gpu_matmul_speed,
)
from shardtune.core.setup import Precision
from shardtune.errors import JobError

Rates = Mapping[Precision, float]
SLOW: Rates = {"fp32": 0.08, "bf16": 0.02, "fp16": 0.006}  # AVX512 without bf16
FAST: Rates = {"fp32": 0.08, "bf16": 0.8, "fp16": 0.006}  # AMX
EQUAL: Rates = {"fp32": 0.08, "bf16": 0.078, "fp16": 0.08}
NONE: Rates = {"fp32": 0.04, "bf16": 0.0, "fp16": 0.0}


class Measurement:
    """Gives these rates, and counts how often it was asked."""

    def __init__(self, rates: Rates) -> None:
        self.rates, self.times = rates, 0

    def __call__(self) -> Rates:
        self.times += 1
        return self.rates


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a CPU with a name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(FAST_PRECISIONS, raising=False)
    monkeypatch.setattr(matmul_speed, "_cpu", lambda: {"name": "a CPU", "flags": "avx512f"})
    return tmp_path / "shardtune" / "matmul"


@pytest.mark.parametrize(
    ("rates", "fast", "why"),
    [
        (SLOW, {"fp32"}, "bf16 matmuls take 4.0 times as long as fp32 ones on this CPU, a CPU"),
        (
            FAST,
            {"fp32", "bf16"},
            "bf16 matmuls are 10.0 times as fast as fp32 ones on this CPU, a CPU",
        ),
        (
            EQUAL,
            {"fp32", "bf16", "fp16"},
            "bf16 matmuls are as fast as fp32 ones on this CPU, a CPU",
        ),
        (NONE, {"fp32"}, "this CPU, a CPU, has no bf16 instructions"),
    ],
    ids=["slow", "fast", "equal", "none"],
)
def test_rates_are_judged(rates: Rates, fast: set[str], why: str) -> None:
    found = cpu_matmul_speed(Measurement(rates))
    assert (set(found.fast), found.why, found.tflops) == (fast, why, rates)


def test_a_cpu_is_measured_once() -> None:
    measure = Measurement(SLOW)
    first = cpu_matmul_speed(measure)
    assert cpu_matmul_speed(measure) == first
    assert measure.times == 1


def test_several_that_ask_at_once_measure_once() -> None:
    measure = Measurement(SLOW)
    askers = [threading.Thread(target=cpu_matmul_speed, args=(measure,)) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert measure.times == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"tflops": {"fp32": 1}}', '{"tflops": 3}',
             '{"tflops": {"fp32": 0, "bf16": 1, "fp16": 1}}',
             '{"tflops": {"fp32": 1, "bf16": NaN, "fp16": 1}}'],
)  # fmt: skip
def test_a_broken_cache_is_measured_again_and_mended(text: str, own_cache: Path) -> None:
    cpu_matmul_speed(Measurement(SLOW))
    (kept,) = own_cache.glob("*.json")
    kept.write_text(text)
    measure = Measurement(FAST)
    assert "bf16" in cpu_matmul_speed(measure).fast
    assert "bf16" in cpu_matmul_speed(measure).fast
    assert measure.times == 1
    assert json.loads(kept.read_text())["tflops"] == FAST


def test_where_nothing_can_be_kept_it_is_measured_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measure = Measurement(SLOW)
    assert [cpu_matmul_speed(measure).fast for _ in range(2)] == [("fp32",)] * 2
    assert measure.times == 2


@pytest.mark.parametrize("change", ["cpu", "flags", "torch", "limit"])
def test_another_cpu_or_torch_is_measured_anew(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Measurement(SLOW)
    cpu_matmul_speed(measure)
    if change == "torch":
        monkeypatch.setattr(matmul_speed, "_version", lambda package: "99")
    elif change == "limit":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    else:
        other = {"cpu": {"name": "another", "flags": "avx512f"}}
        cpu = other.get(change, {"name": "a CPU", "flags": "avx512f amx_bf16"})
        monkeypatch.setattr(matmul_speed, "_cpu", lambda: cpu)
    cpu_matmul_speed(measure)
    assert measure.times == 2


# What is forced, on a CPU and on a GPU: the choice, and its words.
FORCED: dict[str, tuple[str, str]] = {
    "bf16,fp16,fp32": ("bf16", "bf16"),
    "bf16": ("bf16", "bf16"),
    "fp16": ("fp32", "fp16"),
    "fp16 fp32": ("fp32", "fp16"),
    "fp32": ("fp32", "fp32"),
    "": ("fp32", "fp32"),
}


@pytest.mark.parametrize("said", FORCED)
def test_each_capability_is_forced_by_environment(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAST_PRECISIONS, said)
    measure = Measurement(SLOW)
    found = cpu_matmul_speed(measure)
    assert measure.times == 0
    on_cpu, on_gpu = FORCED[said]
    why = f"{FAST_PRECISIONS}={said}"
    scaled = f"{why}: fp16 with loss scaling"
    assert found.best(gpu=False) == (on_cpu, why)
    assert found.best(gpu=True) == (on_gpu, scaled if on_gpu == "fp16" else why)


def test_an_unknown_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAST_PRECISIONS, "bf16,fp8")
    with pytest.raises(JobError, match="'fp8' is no precision") as caught:
        cpu_matmul_speed(Measurement(SLOW))
    assert caught.value.problems[0].fix == "name some of fp32, bf16, fp16"


@pytest.mark.parametrize(
    ("bf16", "expected"),
    [
        (True, ("bf16", "X1 is fast in bf16")),
        (False, ("fp16", "X1 is older than Ampere and has no bf16: fp16 with loss scaling")),
    ],
)
def test_gpus(bf16: bool, expected: tuple[str, str]) -> None:
    found: MatmulSpeed = gpu_matmul_speed("X1", bf16=bf16)
    assert found.best(gpu=True) == expected
