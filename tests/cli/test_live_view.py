"""The live view as a person has it before them: in a terminal of 80 columns, in a notebook, and as
JSON. Real runs of the tiny model."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from shardtune.core.runs.metrics import StepMetrics
from tests.hosts import ROOT
from tests.jobs import write_job

WIDTH = 80
STEPS = 6
ZERO3 = "{type: deepspeed, zero_optimization: {stage: 3}}"


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), "TERM": "xterm",
        "SHARDTUNE_FAST_PRECISIONS": "fp32",
    }  # fmt: skip


def in_terminal(folder: Path, *words: str) -> tuple[int, str]:
    """A command in a pseudo-terminal of 80 columns: its exit code, and all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    settings = {k: v for k, v in environment(folder).items() if k not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "shardtune", *words],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=settings, cwd=folder,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the last that had it open is gone
            break
        if not data:
            break
        seen += data
    os.close(ours)
    return process.wait(60), seen.decode()


def drawn(text: str) -> list[str]:
    """Lines without colours and without what moves the cursor."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    return [line for line in plain.split("\n") if line.strip()]


def job_in(folder: Path, **sections: str) -> Path:
    rows = [{"text": f"the number after {n} is {n + 1}"} for n in range(24)]
    for name, part in (("good", rows[:16]), ("held", rows[16:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    data = (
        "{train: [{path: good.jsonl, format: completion}], sequence_length: 32, "
        "eval: [{name: held, path: held.jsonl, format: completion}]}"
    )
    train = f"{{steps: {STEPS}, global_batch: 4, precision: fp32}}"
    told = {"data": data, "train": train, "evaluate": "{every: 3, samples: 0}"}
    return write_job(folder, **(told | sections))


def test_a_terminal_of_80_columns(tmp_path: Path) -> None:
    code, text = in_terminal(tmp_path, "train", str(job_in(tmp_path)))
    assert code == 0, text[-3000:]
    lines = drawn(text)
    bars = [line for line in lines if re.match(r"step \d+/6 ━", line)]
    assert bars, "the bar is drawn"
    assert all(len(line) <= WIDTH for line in bars)
    assert any(re.search(r" 100%  \d+:\d\d left$", line) for line in bars)
    assert any(re.match(r"loss \d+\.\d{4} .*lr .*grad ", line) for line in lines)
    assert any(re.match(r"held: loss .* \(before: .*\)  accuracy ", line) for line in lines)
    assert "\x1b[?25h" in text, "the cursor is back"


def test_show_of_a_deepspeed_job_in_80_columns(tmp_path: Path) -> None:
    job = job_in(tmp_path, strategy=ZERO3, launch="{processes: 2}")
    code, text = in_terminal(tmp_path, "show", job.name)  # a long path would be folded anywhere
    assert code == 0, text
    lines = drawn(text)
    assert all(len(line) <= WIDTH for line in lines)
    assert "strategy.zero_optimization.stage3_max_live_parameters" in lines
    start = lines[0].index("where it came from")
    third = [line[start:] for line in lines if len(line) > start and line[start - 1] == " "]
    assert min(map(len, third)) >= 5, "no column is a few letters wide"


@pytest.mark.long
def test_json_is_the_metrics_and_then_the_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardtune", "train", str(job_in(tmp_path)), "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    run = tmp_path / "runs/bad"
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert printed[:-1] == written
    steps = [StepMetrics.model_validate(line) for line in printed if line["kind"] == "step"]
    assert [line.step for line in steps] == list(range(1, STEPS + 1))
    report = json.loads((run / "report.json").read_text())
    assert printed[-1] == {"kind": "report", **report}
    assert done.stderr == "", "a quiet run that goes well says nothing"


NOTEBOOK = """
import sys, types

shown = []
class Handle:
    def update(self, page):
        shown.append(page)
def display(page, display_id):
    assert display_id is True
    shown.append(page)
    return Handle()
class ZMQInteractiveShell: pass
ipython, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
ipython.get_ipython = ZMQInteractiveShell
module.display, module.HTML = display, str
sys.modules.update({"IPython": ipython, "IPython.display": module})

import shardtune
report = shardtune.train(shardtune.load_job("job.yaml"))
print(len(shown), "6/6" in shown[-1], "held: loss" in shown[-1], report.training.step)
"""


@pytest.mark.long
def test_a_notebook_shows_the_panel(tmp_path: Path) -> None:
    """The kernel's part of IPython stands in for it: what it is asked to display is HTML."""
    job_in(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], cwd=tmp_path, env=environment(tmp_path),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    frames, *rest = done.stdout.split()
    assert int(frames) > 2, "it is drawn again and again"
    assert rest == ["True", "True", "6"], "and nothing else is printed"
