"""Slurm: its variables, the script we write for it, and that script run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardtune.cli.main import main
from shardtune.errors import JobError
from shardtune.launch.slurm_env import hosts, slurm_step, tasks_per_node

ROOT = Path(__file__).parents[2]
# As Slurm 23.11 sets them for the fourth task of `srun -N2 --ntasks-per-node=2`.
STEP = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[09-10]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),  # as `scontrol show hostnames` expands them
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("a[1-2].b.c", ["a1.b.c", "a2.b.c"]),
    ],
)
def test_lists_of_hosts(text: str, expected: list[str]) -> None:
    assert hosts(text) == expected


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_a_task_of_several_on_a_node_is_a_rank() -> None:
    step = slurm_step(STEP)
    assert step is not None
    assert not step.is_launcher
    told = step.rank_environment()
    assert told["RANK"], told["WORLD_SIZE"] == ("3", "4")
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert told["MASTER_ADDR"] == "gpu09"
    assert slurm_step(STEP | {"SLURM_PROCID": "0"}).port == step.port  # type: ignore[union-attr]
    assert slurm_step(STEP | {"SLURM_STEP_ID": "1"}).port != step.port  # type: ignore[union-attr]


def test_one_task_a_node_is_a_launcher() -> None:
    alone = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    step = slurm_step(STEP | alone)
    assert step is not None
    assert step.is_launcher


def test_outside_of_a_step_and_alone_in_one_slurm_does_not_matter() -> None:
    assert slurm_step({}) is None
    batch_script = {name: STEP[name] for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NODEID")}
    assert slurm_step(batch_script) is None
    assert slurm_step(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None


def test_variables_that_make_no_sense_are_a_problem() -> None:
    with pytest.raises(JobError, match="not as Slurm sets them"):
        slurm_step(STEP | {"SLURM_STEP_TASKS_PER_NODE": "many"})


# The script ---------------------------------------------------------------------------------------

SRUN = """#!{python}
# Stands in for srun: 2 nodes x 2 tasks on this machine, with the variables that Slurm sets.
import os, subprocess, sys
command = [word for word in sys.argv[1:]]
while command[0].startswith("--"):
    command.pop(0)
assert command[0] == "shardtune", command
step = str(len(open("steps").read()) if os.path.exists("steps") else 0)
open("steps", "a").write(".")
common = dict(
    SLURM_JOB_ID="4711", SLURM_STEP_ID=step, SLURM_STEP_NUM_TASKS="4", SLURM_STEP_NUM_NODES="2",
    SLURM_STEP_TASKS_PER_NODE="2(x2)", SLURM_STEP_NODELIST="127.0.0.[1-2]",
)
tasks = [
    subprocess.Popen(
        [sys.executable, "-m", *command],
        env=os.environ | common | dict(
            SLURM_PROCID=str(n), SLURM_LOCALID=str(n % 2), SLURM_NODEID=str(n // 2)),
    )
    for n in range(4)
]
codes = [task.wait() for task in tasks]
sys.exit(max(codes, key=abs))
"""
JOB = """\
model: {name: tiny}
data: {train: [{path: tales.jsonl, format: completion}], sequence_length: 32}
train: {steps: 3, global_batch: 8, precision: fp32, learning_rate: 0.1, optimizer: {type: sgd}}
strategy: {type: fsdp, sharding: hybrid, replicas: 2}
evaluate: {samples: 0}
save: {directory: runs/there}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}"}) + "\n" for n in range(32)]
    (tmp_path / "tales.jsonl").write_text("".join(lines))
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["slurm", "job.yaml", "--nodes", "2", "--gpus", "2", *words]) == 0
    return capsys.readouterr().out


def test_the_script_asks_for_what_was_wanted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(capsys, "train.seed=3", "--time", "1:00:00", "--partition", "large")
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --time=1:00:00",
        "#SBATCH --partition=large",
        "#SBATCH --exclusive",
    ):
        assert line in text.splitlines()
    assert "#SBATCH --ntasks-per-node=2  #" in text
    assert "srun --kill-on-bad-exit=1 shardtune train job.yaml train.seed=3 " in text
    assert "account" not in text


def test_a_node_of_one_gpu_has_one_rank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the job says of this machine: two nodes would start four ranks each."""
    sizes = ["--nodes", "2", "--gpus", "1", "strategy={type: ddp}", "launch.processes=4"]
    assert main(["slurm", "job.yaml", *sizes]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --ntasks-per-node=1  #" in text
    assert "launch.processes=4 launch.processes=1 " in text


@pytest.mark.parametrize("words", [("--gpus", "3"), ("--nodes", "0")])
def test_a_job_that_would_not_run_there_gets_no_script(
    folder: Path, words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"--nodes": "1", "--gpus": "2"} | dict([words])
    given = [word for pair in sizes.items() for word in pair]
    assert main(["slurm", "job.yaml", *given]) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.long  # test_slurm_real.py has a real Slurm
def test_the_script_trains_on_two_nodes_with_two_tasks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.sbatch").write_text(written(capsys))
    (folder / "srun").write_text(SRUN.format(python=sys.executable))
    (folder / "srun").chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}", "HOME": os.environ["HOME"],
        "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1",
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "4711", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "job.sbatch"], env=environment, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "runs" / "there" / "report.json").read_text())
    assert report["finished"]
    assert report["ranks"] == 4
    assert (folder / "steps").read_text() == "."  # at the first attempt
    metrics = folder / "runs/there/metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "step"]

    assert main(["train", "job.yaml", "strategy={type: ddp}", "save.directory=one"]) == 0
    rows = [json.loads(line) for line in Path("one/metrics.jsonl").read_text().splitlines()]
    alone = [row["loss"] for row in rows if row["kind"] == "step"]
    assert losses == pytest.approx(alone, abs=1e-5)
