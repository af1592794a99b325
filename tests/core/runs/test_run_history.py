"""A run directory as reports and dashboards read it: whole, torn, growing, begun anew."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from shardtune.core.runs.metrics import StepMetrics
from shardtune.core.runs.metrics_log import LogPosition, follow, read_tail
from shardtune.core.runs.run_history import (
    RunHistory,
    read_run_history,
    read_run_summary,
    thin,
)
from shardtune.core.runs.step_parts import PARTS
from tests.reports import evaluation_line, make_report, step_line

DEAD_TIME = 1_000_000_000.0


def write_run(folder: Path, *, steps: int = 3, end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [evaluation_line(0, "code", 2.0)]
    lines += [step_line(step, loss=3.0 / step) for step in range(1, steps + 1)]
    lines.append(evaluation_line(steps, "code", 1.0))
    text = "".join(line.to_json(ascii_only=True) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + end, encoding="utf-8")
    job = "train: {steps: 3, learning_rate: 1e-4}\ndata: {train: [{path: a.jsonl}], eval: []}\n"
    (folder / "job.yaml").write_text(job, encoding="utf-8")
    return folder


def age(folder: Path) -> None:
    """As if the run had written its last byte long ago."""
    for path in folder.iterdir():
        os.utime(path, (DEAD_TIME, DEAD_TIME))


def test_a_whole_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "report.json").write_text(make_report().to_json())
    (run / "answers.json").write_text('["I don\'t know"]')
    found = read_run_history(run)
    assert found.state == "done"
    assert [step.step for step in found.steps] == [1, 2, 3]
    assert found.tokens == (8, 16, 24)
    assert (found.tokens_at(0), found.tokens_at(2), found.tokens_at(9)) == (0, 16, 24)
    assert [each.loss for each in found.evaluations["code"]] == [2.0, 1.0]
    assert found.job["data.train.0.path"] == "a.jsonl"
    assert found.job["train.learning_rate"] == 1e-4
    assert found.job["data.eval"] is None
    assert (found.total_steps, found.bad_lines) == (3, 0)
    assert found.answers == ("I don't know",)


def test_bad_and_torn_lines_are_counted(tmp_path: Path) -> None:
    bad = 'not JSON\n{"kind": "step", "step": "many"}\n\xff\n{"kind": "step", "st'
    run = write_run(tmp_path / "run", end=bad)
    age(run)
    found = read_run_history(run)
    assert [step.step for step in found.steps] == [1, 2, 3]
    assert found.bad_lines == 4
    assert found.state == "failed"


def test_an_empty_folder_and_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        found = read_run_history(folder)
        assert found == RunHistory(folder, "failed")
        assert found.total_steps is None


def test_files_of_another_kind_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")  # to open it would wait for somebody who writes
    (tmp_path / "report.json").mkdir()
    (tmp_path / "forecast.json").write_text("[" * 100_000)
    (tmp_path / "job.yaml").write_text("a: [")
    found = read_run_history(tmp_path)
    assert (found.report, found.forecast, found.job, found.steps) == (None, None, {}, ())


def test_a_step_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    again = step_line(2, loss=9.0).to_json() + "\n"
    found = read_run_history(write_run(tmp_path / "run", end=again))
    assert [(step.step, step.loss) for step in found.steps] == [(1, 3.0), (2, 9.0), (3, 1.0)]


def test_following_a_log_that_grows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", end='{"kind": ')
    first = follow(run)
    assert (len(first.lines), first.unfinished, first.restarted) == (5, True, False)
    assert follow(run, first.position).lines == ()
    with (run / "metrics.jsonl").open("ab") as log:
        log.write(b"torn}\n" + step_line(4).to_json().encode() + b"\n")
    second = follow(run, first.position)
    assert [line.step for line in second.lines] == [4]
    assert (second.bad, second.unfinished) == (1, False)


def test_a_log_that_was_written_anew_is_read_from_its_start(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    position = follow(run).position
    fresh = write_run(tmp_path / "fresh", steps=9)
    (fresh / "metrics.jsonl").replace(run / "metrics.jsonl")
    found = follow(run, position)
    assert (found.restarted, len(found.lines)) == (True, 11)
    (run / "metrics.jsonl").unlink()
    gone = follow(run, found.position)
    assert (gone.lines, gone.position, gone.restarted) == ((), LogPosition(), True)


def test_a_tail_has_whole_lines_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=50, end='{"torn')
    tail = read_tail(run, most=2000)
    assert 2 <= len(tail) <= 8
    assert tail[-1].step == 50
    assert len(read_tail(run)) == 52
    assert read_tail(tmp_path / "missing") == ()


def test_a_tail_reaches_back_to_a_step_of_many_ranks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    zeros = dict.fromkeys((*PARTS, "positions"), 0)
    parts = {"steps": 1, "ranks": [zeros] * 256}
    lines = [step_line(4, parts=parts), *(evaluation_line(4, f"set {n}", 1.0) for n in range(9))]
    with (run / "metrics.jsonl").open("a") as log:
        log.write("".join(f"{line.to_json()}\n" for line in lines))
    assert len(lines[0].to_json()) > 1 << 14
    assert [step.step for step in read_run_summary(run).steps][-1] == 4


def test_a_run_of_a_later_version_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    later = json.loads(step_line(4).to_json()) | {"unheard_of": {"of": 1}}
    with (run / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(later) + "\n")
    report = json.loads(make_report().to_json()) | {"unheard_of": 1}
    report["training"] |= {"unheard_of": 1}
    (run / "report.json").write_text(json.dumps(report))
    found = read_run_history(run)
    assert (found.state, found.steps[-1].step, found.bad_lines) == ("done", 4, 0)


@pytest.mark.parametrize("most", [4, 10, 101])
def test_thinned_points_keep_extremes_and_ends(most: int) -> None:
    points = [float((7 * at) % 100) for at in range(1000)]
    points[333], points[666] = 1e6, -1e6
    found = thin(points, most, lambda value: value)
    assert len(found) <= most
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert {1e6, -1e6} <= set(found)
    assert thin(points, 1000, lambda value: value) == points


def test_points_without_a_value_are_thinned_away() -> None:
    steps: list[StepMetrics] = [step_line(n, loss=None if n % 2 else 1.0) for n in range(100)]
    kept = thin(steps, 20, lambda step: step.loss)
    assert all(step.loss is not None for step in kept[1:-1])


def test_recent_writes_tell_in_a_folder_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    for name in ("step-000003", "step-\u00b2"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "manifest.json").touch()
    assert read_run_history(run).state == "stopped"  # here it would hold the lock
    monkeypatch.setattr("shardtune.core.runs.run_state._is_local", lambda folder: False)
    assert read_run_history(run).state == "running"
    age(run)
    assert read_run_history(run).state == "stopped"


def test_states(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert read_run_history(run).state == "running"  # it wrote just now
    age(run)
    assert read_run_history(run).state == "failed"  # killed: no lock, no report
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert read_run_history(run).state == "running"
    os.close(descriptor)
    saved = run / "checkpoints" / "step-000003"
    saved.mkdir(parents=True)
    (saved / "manifest.json").touch()
    assert read_run_history(run).state == "stopped"  # preempted: a checkpoint of the last step
    (run / "logs").mkdir()
    line = {"kind": "failed", "time": time.time(), "rank": 1, "step": 3, "cause": "died"}
    (run / "logs" / "events.jsonl").write_text(json.dumps(line) + "\ntorn")
    found = read_run_history(run)
    assert (found.state, [event.cause for event in found.events]) == ("failed", ["died"])


@pytest.mark.parametrize("seconds", [-1e300, 1e12, 1e300])
def test_an_event_of_no_calendar_is_left_out(tmp_path: Path, seconds: float) -> None:
    run = write_run(tmp_path / "run")
    (run / "logs").mkdir()
    lines = [{"kind": "failed", "time": each, "rank": 1} for each in (seconds, 1e9)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "logs" / "events.jsonl").write_text(text)
    assert [event.time for event in read_run_history(run).events] == [1e9]
    report = make_report(finished=False)
    (run / "report.json").write_text(report.to_json())
    assert read_run_history(run).state == "stopped"
