"""A run whose output nobody reads, and has no room for: it ends as any other."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = """\
model: {name: tiny}
data: {train: [{path: tales.jsonl, format: completion}], sequence_length: 32}
train: {steps: 60, global_batch: 4, precision: fp32, learning_rate: 0.1, optimizer: {type: sgd}}
evaluate: {samples: 0}
launch: {processes: 1, threads: 1}
save: {directory: run}
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the job and its data in the folder."""
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}"}) + "\n" for n in range(32)]
    (tmp_path / "tales.jsonl").write_text("".join(lines))
    (tmp_path / "job.yaml").write_text(JOB)
    return {
        "PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_a_blocked_pipe_and_a_full_disk_hurt_no_run(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    reads, writes = os.pipe()
    os.write(writes, bytes(fcntl.fcntl(writes, fcntl.F_GETPIPE_SZ)))  # not a byte more goes in
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardtune", "train", "job.yaml"],
            cwd=tmp_path, env=environment, stdout=writes, stderr=full, timeout=200, check=False,
        )  # fmt: skip
    os.close(writes)
    os.close(reads)
    assert done.returncode == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["finished"]
    log = (tmp_path / "run" / "logs" / "attempt-0" / "rank-0.log").read_text()
    assert "step 60/60" in log


@pytest.mark.long
def test_a_terminal_that_was_stopped_hurts_no_run(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Ctrl-S: nothing more can be written to it, and nobody may ever press Ctrl-Q."""
    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)
    done = subprocess.run(
        [sys.executable, "-m", "shardtune", "train", "job.yaml"],
        cwd=tmp_path, env=environment | {"TERM": "xterm"},
        stdin=theirs, stdout=theirs, stderr=theirs, timeout=200, check=False,
    )  # fmt: skip
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())["finished"]
