"""Strategies for several ranks on one, by the command: a first try on one GPU, or on one core."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import write_job


@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "strategy",
    ["{type: fsdp}", pytest.param("{type: fsdp, sharding: hybrid}", marks=pytest.mark.long)],
)
def test_one_rank_needs_no_others(strategy: str, tmp_path: Path) -> None:
    """Torch would look for other ranks by itself, and wait for minutes."""
    rows = "".join(json.dumps({"text": "b" * n}) + "\n" for n in range(1, 9))
    (tmp_path / "good.jsonl").write_text(rows, encoding="utf-8")
    job = write_job(tmp_path, strategy=strategy, train="{steps: 1, global_batch: 2}")
    done = subprocess.run(
        [sys.executable, "-m", "shardtune", "train", job.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/bad/result").is_dir()
