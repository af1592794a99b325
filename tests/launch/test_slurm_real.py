"""A real Slurm: the script of `shardtune slurm`, preempted, requeued and resumed to the bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
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
pytestmark = [pytest.mark.slow, pytest.mark.early, pytest.mark.timeout(900)]


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
def whole(folder: Path) -> Callable[[int], str]:
    """The trace of a run on so many ranks that nobody disturbs."""

    @cache
    def trace(ranks: int) -> str:
        asked = [f"launch.processes={ranks}", f"save.directory=whole-{ranks}"]
        shardtune(folder, "train", "job.yaml", *asked)
        return (folder / f"whole-{ranks}" / "trace.jsonl").read_text("utf-8")

    return trace


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


def submit(cluster: SlurmCluster, folder: Path, run: str, gpus: int) -> int:
    """Submits the script as it is written; returns the number of the job."""
    asked = ["--nodes", "2", "--gpus", str(gpus), f"save.directory={run}"]
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


@pytest.mark.parametrize(
    ("how", "gpus"),
    [
        ("signal", 2),
        pytest.param("requeue", 2, marks=pytest.mark.long),
        pytest.param("signal", 1, marks=pytest.mark.long),  # a node's only task starts its rank
    ],
)
def test_a_preempted_job_comes_back_and_ends_to_the_bit(
    cluster: SlurmCluster, folder: Path, whole: Callable[[int], str], how: str, gpus: int
) -> None:
    run = folder / f"{how}-{gpus}"
    job = submit(cluster, folder, run.name, gpus)
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
    assert (run / "trace.jsonl").read_text("utf-8") == whole(2 * gpus)
    report = json.loads((run / "report.json").read_text("utf-8"))
    assert (report["finished"], report["ranks"]) == (True, 2 * gpus)
