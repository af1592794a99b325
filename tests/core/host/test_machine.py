"""What is found out about the machine, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardtune.core.host import machine
from shardtune.core.host.machine import Machine


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_only_the_cores_that_we_may_use_are_counted() -> None:
    allowed = os.sched_getaffinity(0)
    assert Machine.here().cores == len(allowed)
    code = (
        f"import os; os.sched_setaffinity(0, {{{min(allowed)}}})\n"
        "from shardtune.core.host.machine import Machine; print(Machine.here().cores)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_as_many_gpus_as_torch_sees() -> None:
    import torch

    assert Machine.here().gpus == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("said", "found"), [("3", 3), ("4,2", 4), ("", None), ("0", None), ("many", None)]
)
def test_threads_that_the_environment_asks_for(
    said: str, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP 5.2, 21.1.2: a list of positive numbers, the first for the outermost level."""
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert Machine.here().omp_threads == found


# How the driver reads the variable: NVIDIA's CUDA programming guide, "CUDA environment variables".
VISIBLE = {
    None: 4, "": 0, "-1": 0, "0": 1, "0,2": 2, " 1 , 3 ": 2,
    "0,1,2,3,4,5": 4, "GPU-8932f937": 1, "0,-1,1": 1,
}  # fmt: skip


@pytest.mark.parametrize("visible", VISIBLE)
def test_of_four_gpus(visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.setattr(machine, "Path", lambda driver: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Machine.here().gpus == VISIBLE[visible]


def test_a_machine_without_the_driver_has_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "Path", lambda driver: tmp_path / "nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert Machine.here().gpus == 0
