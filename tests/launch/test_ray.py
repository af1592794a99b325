"""Ray, really started and stopped: losses as on one machine, also after a worker was killed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardtune.cli.main import main
from shardtune.config.job import LocalLaunch, RayLaunch
from shardtune.config.job_file import load_job
from shardtune.errors import JobError
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from tests.jobs import write_job

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "ray_qlora_zero2.yaml"
BLOCK = """\
backend:
  type: ray
  trainer:
    use_gpu: true
    strategy:
      type: deepspeed
      zero_optimization:
        stage: 2
"""
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed (shardtune[ray])"
)


# Ludwig's block ----------------------------------------------------------------------------------


def test_the_recipe_holds_the_block_as_ludwig_users_write_it() -> None:
    assert BLOCK in RECIPE.read_text()


def test_the_block_means_launch_and_strategy() -> None:
    loaded = load_job(RECIPE, ["backend.trainer.num_workers=2"])
    launch, strategy = loaded.job.launch, loaded.job.strategy
    assert isinstance(launch, RayLaunch)
    assert (launch.workers, launch.use_gpu, launch.address) == (2, True, None)
    assert isinstance(strategy, DeepSpeed)
    assert strategy.zero_optimization.stage == 2
    assert loaded.job.backend is None
    line = RECIPE.read_text().splitlines().index("    use_gpu: true") + 1
    assert loaded.origin(("launch", "use_gpu")) == f"{RECIPE}:{line}"
    assert loaded.origin(("launch", "workers")) == "command line"
    assert loaded.origin(("strategy", "zero_optimization", "stage")).startswith(str(RECIPE))


def test_a_local_block(tmp_path: Path) -> None:
    path = write_job(tmp_path, launch="{}")
    text = path.read_text().replace("launch: {}\n", "")
    path.write_text(text + "backend: {type: local, trainer: {num_workers: 3}}\n")
    launch = load_job(path).job.launch
    assert isinstance(launch, LocalLaunch)
    assert launch.processes == 3


@pytest.mark.parametrize(
    ("block", "fact"),
    [
        ("{type: ray}", "`backend` and `launch` both say how the job runs"),
        ("{type: horovod}", "is \"horovod\"; it must be 'ray' or 'local'"),
        ("{type: ray, trainer: {use_gpus: true}}", "unknown key"),
    ],
)
def test_what_is_wrong_with_a_block_is_said(tmp_path: Path, block: str, fact: str) -> None:
    path = write_job(tmp_path, backend=block)
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert fact in str(caught.value)
    assert f"{path}:" in str(caught.value)


# Ray itself --------------------------------------------------------------------------------------

JOB = """\
model: {name: tiny}
data: {train: [{path: tales.jsonl, format: completion}], sequence_length: 32}
train: {steps: STEPS, global_batch: 4, precision: fp32, learning_rate: 0.1, optimizer: {type: sgd},
  schedule: constant}
evaluate: {samples: 0}
save: {directory: run, every: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}"}) + "\n" for n in range(32)]
    (tmp_path / "tales.jsonl").write_text("".join(lines))
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {
        "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_worker_niceness": "0",  # Ray's own 15 lets other tests take every core for minutes
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "shardtune", "train", *words],
        cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "step"]


def ours(folder: Path) -> list[psutil.Process]:
    """Every process that was started in the folder, or by one that was."""
    cache = str(folder / "cache")
    return [each for each in psutil.process_iter() if _environment(each) == cache]


def _environment(process: psutil.Process) -> str:
    try:
        return process.environ().get("XDG_CACHE_HOME", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def listening(processes: list[psutil.Process]) -> set[str]:
    pids = {process.pid for process in processes}
    return {
        connection.laddr.ip
        for connection in psutil.net_connections("inet")
        if connection.pid in pids and connection.status == "LISTEN"
    }


def assert_nobody_is_left(folder: Path) -> None:
    _, alive = psutil.wait_procs(ours(folder), timeout=20)
    assert not alive


def workers(folder: Path) -> list[psutil.Process]:
    return [each for each in ours(folder) if "RayTrainWorker" in " ".join(each.cmdline())]


def dashboards(folder: Path) -> list[list[str]]:
    """The commands of Ray's dashboard, which has other duties besides showing pages."""
    lines = [each.cmdline() for each in ours(folder)]
    return [words for words in lines if any(word.endswith("dashboard.py") for word in words)]


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 500) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_worker_is_started_again_and_the_run_ends_as_an_undisturbed_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray with two workers, one killed between two checkpoints, beside two local processes."""
    (folder / "job.yaml").write_text(JOB.replace("STEPS", "60"))
    process = start(folder, "job.yaml", "launch={type: ray, workers: 2, use_gpu: false}")
    metrics = folder / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(losses(folder / "run")) >= 5, process)
        reached = listening(ours(folder))
        assert reached
        assert reached <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        assert all("--disable-frontend" in words for words in dashboards(folder))
        workers(folder)[0].kill()
        said, _ = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, said
    assert "its Ray worker died without an error report" in said
    assert "going on from the last checkpoint (restart 1 of 3)" in said
    assert "step 60/60" in said
    assert_nobody_is_left(folder)

    monkeypatch.chdir(folder)
    local = ["launch={processes: 2, threads: 1}", "save.directory=local"]
    assert main(["train", "job.yaml", *local]) == 0
    assert losses(folder / "run") == pytest.approx(losses(folder / "local"), abs=1e-6)
    assert len(losses(folder / "run")) == 60


@pytest.mark.long
@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hung_worker_is_named_and_the_run_goes_on(folder: Path) -> None:
    """As in a local run: one worker is stopped, and the others wait for it."""
    (folder / "job.yaml").write_text(JOB.replace("STEPS", "60"))
    process = start(folder, "job.yaml", "launch={type: ray, workers: 2, use_gpu: false}")
    metrics = folder / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(losses(folder / "run")) >= 5, process)
        workers(folder)[0].suspend()
        said, _ = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, said
    assert "the process is stopped (SIGSTOP)" in said
    assert "going on from the last checkpoint (restart 1 of 3)" in said
    assert len(losses(folder / "run")) == 60
    assert_nobody_is_left(folder)


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_recipe_trains_on_two_workers_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("deepspeed", "bitsandbytes"):
        pytest.importorskip(package)
    for name in ("recipes", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    few = [
        "model.name=tiny", "train.steps=3", "train.warmup_steps=0", "evaluate.max_new_tokens=4",
        "train.precision=fp32",
    ]  # fmt: skip
    recipe = "recipes/ray_qlora_zero2.yaml"
    on_cpu = ["backend.trainer.use_gpu=false", "backend.trainer.num_workers=2"]
    process = start(tmp_path, recipe, *few, *on_cpu, "save.directory=ray")
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert_nobody_is_left(tmp_path)

    monkeypatch.chdir(tmp_path)
    local = ["backend.type=local", "backend.trainer.num_workers=2", "save.directory=local"]
    text = (ROOT / recipe).read_text().replace("    use_gpu: true\n", "")
    (tmp_path / "local.yaml").write_text(text)
    assert main(["train", "local.yaml", *few, *local]) == 0
    assert losses(tmp_path / "ray") == pytest.approx(losses(tmp_path / "local"), abs=1e-5)


@needs_ray
@pytest.mark.long
def test_a_cluster_without_gpus_can_not_count_them(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB.replace("STEPS", "2"))
    process = start(folder, "job.yaml", "launch={type: ray}")
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 2, said
    assert "there is to be one worker for each GPU, and the Ray cluster has none" in said
    assert_nobody_is_left(folder)
