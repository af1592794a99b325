"""In a whole run each decision is made once: by the launcher, which hands it to the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shardtune.checkpoint.run_dir import RunDir
from tests.jobs import write_job

WATCH = """
import functools, importlib, os, sys

def note(text):
    line = os.environ.get("RANK", "launcher") + " " + text + "\\n"
    file = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)

def noted(function):
    @functools.wraps(function)
    def noting(*args, **kwargs):
        note(function.__name__)
        return function(*args, **kwargs)
    return noting

def opened(event, args):
    if event == "open" and not isinstance(args[0], int) and os.fsdecode(args[0]) == "once.yaml":
        note("open")

sys.addaudithook(opened)
places = {"config.job_file": "load_job", "config.auto": "resolve", "plan.forecast": "forecast"}
for name, function in places.items():  # before anybody else imports them
    module = importlib.import_module("shardtune." + name)
    setattr(module, function, noted(getattr(module, function)))
"""
"""Runs first in every process of the run: notes who opens the job file, and who decides."""


@pytest.mark.long
def test_the_launcher_decides_and_the_ranks_are_told(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH, encoding="utf-8")
    rows = "".join(json.dumps({"text": "b" * n}) + "\n" for n in range(1, 9))
    (tmp_path / "good.jsonl").write_text(rows, encoding="utf-8")
    job = write_job(
        tmp_path,
        model="{name: tiny}",
        adapter="{type: lora, rank: 2}",
        data="{train: [{path: good.jsonl, format: completion}], sequence_length: 32}",
        train="{steps: 1, global_batch: 2, precision: fp32}",
        launch="{processes: 2}",
        save="{directory: run}",
    ).rename(tmp_path / "once.yaml")
    notes = tmp_path / "notes"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "shardtune", "train", job.name],
        cwd=tmp_path,
        env=os.environ | {"NOTES": str(notes), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = Counter(notes.read_text(encoding="utf-8").splitlines())
    assert seen["launcher open"] == seen["launcher load_job"] == 1
    assert seen["launcher resolve"] == 1
    assert seen["launcher forecast"] == 1
    for rank in ("0", "1"):
        assert seen[f"{rank} resolve"] == seen[f"{rank} forecast"] == 0
    predicted, report = RunDir(tmp_path / "run").read_forecast(), RunDir(tmp_path / "run")
    assert predicted is not None
    found = report.read_report()
    assert found is not None
    assert found.forecast is not None
    assert found.forecast.held_bytes.params.predicted == predicted.held_bytes["params"]
