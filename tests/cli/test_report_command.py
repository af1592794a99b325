"""`shardtune report`, and the page that a fault leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardtune.checkpoint.overwrite import move_aside
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_marker import write_marker
from shardtune.cli.main import main
from shardtune.cli.start.fault_page import leaving_page
from shardtune.report.run_page import PAGE_FILE
from tests.jobs import make_environment
from tests.reports import evaluation_line, make_report, step_line
from tests.synthetic import make_job


def begun(folder: Path, *, rate: float = 1e-3) -> RunDir:
    run = RunDir(folder)
    job = make_job(str(folder))
    train = job.train.model_copy(update={"learning_rate": rate})
    run.begin(job.model_copy(update={"train": train}), make_environment())
    for step in range(1, 6):
        run.jsonl.log(step_line(step))
    run.jsonl.log(evaluation_line(5, "code", 1.0))
    return run


def test_the_page_goes_into_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begun(tmp_path / "run")
    run.write_report(make_report())
    for _ in range(2):  # its own page is replaced
        assert main(["report", str(run.path)]) == 0
    assert f"wrote {run.path / PAGE_FILE}" in capsys.readouterr().out
    text = (run.path / PAGE_FILE).read_text(encoding="utf-8")
    assert "train.weight_decay" not in text  # a default
    assert "data.train.0.path" in text
    move_aside(run)  # the page is the run's, and goes with it
    assert not (run.path / PAGE_FILE).exists()


def test_several_runs_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = begun(tmp_path / "a"), begun(tmp_path / "b", rate=2e-3)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "b"]) == 0
    text = Path("comparison.html").read_text(encoding="utf-8")
    assert "Comparison of a and b" in text
    assert "0.002" in text
    assert main(["report", str(first.path), str(second.path), "--out", "other.html"]) == 0
    assert Path("other.html").is_file()


def test_only_pages_of_ours_are_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, thesis = begun(tmp_path / "run"), tmp_path / "thesis.html"
    thesis.write_text("<h1>Mine</h1>")
    assert main(["report", str(run.path), "--out", str(thesis)]) == 2
    assert "exists already, and is no page of ours" in capsys.readouterr().err
    assert thesis.read_text() == "<h1>Mine</h1>"
    assert main(["report", str(run.path), "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert main(["report", str(tmp_path / "none"), str(tmp_path)]) == 2
    assert "2 problems" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_keeps_what_a_person_put_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path)
    marker = run.marker()
    assert marker is not None
    earlier = tuple(name for name in marker.names if name != PAGE_FILE)
    write_marker(tmp_path, replace(marker, names=earlier))
    (tmp_path / PAGE_FILE).write_text("mine")
    assert main(["report", str(tmp_path)]) == 2
    assert "--out report.html" in capsys.readouterr().err
    with pytest.raises(KeyError), leaving_page(run):
        raise KeyError
    assert (tmp_path / PAGE_FILE).read_text() == "mine"
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "x.html")]) == 0


def test_a_fault_and_a_stop_leave_a_page(tmp_path: Path) -> None:
    run = begun(tmp_path / "fails")
    with pytest.raises(KeyError), leaving_page(run):
        raise KeyError
    assert 'class="state failed"' in (run.path / PAGE_FILE).read_text(encoding="utf-8")
    run = begun(tmp_path / "stops")
    with leaving_page(run, stopped=lambda: True):
        pass
    assert 'class="state stopped"' in (run.path / PAGE_FILE).read_text(encoding="utf-8")


def test_a_run_that_ended_or_never_began_gets_none(tmp_path: Path) -> None:
    ended, never = begun(tmp_path / "ended"), RunDir(tmp_path / "never")
    ended.write_report(make_report())
    never.claim()
    for run in (ended, never):
        with leaving_page(run, stopped=lambda: True):
            pass
        assert not (run.path / PAGE_FILE).exists()
    with leaving_page(ended):
        pass
    assert not (ended.path / PAGE_FILE).exists()
