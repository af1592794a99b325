"""A real Slurm: the script of `shardtune slurm`, preempted, requeued and resumed to the bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster import SlurmCluster, slurm_cluster

ROOT = Path(__file__).parents[2]
STEPS = 60
JOB = f"""\
model: {{name: tiny}}
adapter: {{type: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: [{{path: tales.jsonl, format: completion}}], sequence_length: 32}}
train: {{steps: {STEPS}, global_batch: 8, micro_batch: 1, precision: fp32, learning_rate: 1e-3}}
evaluate: {{samples: 0}}
launch: {{processes: 4, threads: 1}}
save: {{directory: there, every: 40, trace: true}}
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On storage that every node sees, with `shardtune` on the PATH."""
    folder = tmp_path_factory.mktemp("shared")
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}"}) + "\n" for n in range(64)]
    (folder / "tales.jsonl").write_text("".join(lines))
    (folder / "job.yaml").write_text(JOB)
    command = folder / "shardtune"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardtune "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> str:
    """The trace of a run on four ranks that nobody disturbs."""
    shardtune(folder, "train", "job.yaml", "save.directory=whole")
    return (folder / "whole" / "trace.jsonl").read_text("utf-8")


def environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": f"{folder}:{os.environ['PATH']}", "HOME": os.environ["HOME"],
        "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def shardtune(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["shardtune", *words], cwd=folder, env=environment(folder), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(cluster: SlurmCluster, folder: Path, run: str) -> int:
    """Submits the script as it is written; returns the number of the job."""
    asked = ["--nodes", "2", "--gpus", "2", f"save.directory={run}"]
    (folder / f"{run}.sbatch").write_text(shardtune(folder, "slurm", "job.yaml", *asked))
    done = subprocess.run(
        ["sbatch", f"{run}.sbatch"], cwd=folder, env=environment(folder) | cluster.environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(re.findall(r"\d+", done.stdout)[0])


def wait_for(cluster: SlurmCluster, job: int, folder: Path, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 400
    while not true():
        state = cluster.job(job)["JobState"]
        said = log(folder, job)
        assert state in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "COMPLETED"}, said
        assert time.monotonic() < deadline, f"{state}: {said}"
        time.sleep(0.05)


def log(folder: Path, job: int) -> str:
    path = folder / f"job-{job}.log"
    return path.read_text("utf-8", "replace") if path.exists() else ""


def trained(run: Path) -> int:
    trace = run / "trace.jsonl"
    return len(trace.read_text("utf-8").splitlines()) if trace.exists() else 0


PREEMPTIONS = {
    "signal": ["scancel", "--signal=TERM"],  # as before the time is up, or the partition is taken
    "requeue": ["scontrol", "requeue"],
}


@pytest.mark.parametrize("how", ["signal", pytest.param("requeue", marks=pytest.mark.long)])
def test_a_preempted_job_comes_back_and_ends_to_the_bit(
    cluster: SlurmCluster, folder: Path, whole: str, how: str
) -> None:
    job, run = submit(cluster, folder, how), folder / how
    wait_for(cluster, job, folder, lambda: trained(run) >= 3)
    cluster.ask(*PREEMPTIONS[how], str(job))
    preempted = re.compile(r"preempted after step (\d+), with a checkpoint")
    wait_for(cluster, job, folder, lambda: preempted.search(log(folder, job)) is not None)
    wait_for(cluster, job, folder, lambda: cluster.job(job)["Restarts"] == "1")
    wait_for(cluster, job, folder, lambda: cluster.job(job)["JobState"] == "COMPLETED")
    assert cluster.job(job)["ExitCode"] == "0:0"
    (done,) = preempted.findall(log(folder, job))
    assert 3 <= int(done) < STEPS
    assert f"resuming after step {done}," in log(folder, job)
    assert (run / "trace.jsonl").read_text("utf-8") == whole
    report = json.loads((run / "report.json").read_text("utf-8"))
    assert (report["finished"], report["ranks"]) == (True, 4)
