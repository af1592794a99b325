"""The run directory: what lies in it, and what is refused."""

from __future__ import annotations

import errno
import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardtune.checkpoint import run_logs
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import (
    notes_on,
    require_run,
    require_same_job,
    require_unfinished,
    require_unoccupied,
)
from shardtune.checkpoint.run_marker import read_marker, write_marker
from shardtune.checkpoint.seal import seal_folder
from shardtune.config.job_file import load_job
from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.errors import RunError
from tests.jobs import make_environment
from tests.reports import evaluation_line, make_report, step_line
from tests.synthetic import make_job

PLACE = "job.yaml:9: save.directory"


def begun(folder: Path, **sections: dict[str, Any]) -> RunDir:
    run = RunDir(folder)
    run.begin(make_job(str(folder), **sections), make_environment())
    return run


def lines(run: RunDir) -> list[Any]:
    return [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]


def test_the_job_that_is_written_can_be_read_and_is_the_same(tmp_path: Path) -> None:
    optimizer = {"type": "adamw", "eps": 1e-8, "betas": [0.9, 0.95]}
    adapter = {"type": "lora", "targets": ["q_proj", "v_proj"]}
    data = {"train": [{"path": "größe/x y.jsonl", "format": "chat", "name": "no"}]}
    train = {"learning_rate": 1e-5, "optimizer": optimizer}
    run = begun(tmp_path / "a" / "run", train=train, adapter=adapter, data=data)
    expected = make_job(str(tmp_path / "a" / "run"), train=train, adapter=adapter, data=data)
    assert load_job(run.job).job == expected


def test_a_rank_that_does_not_write_writes_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run", writes=False)
    run.begin(make_job("run"), make_environment())
    run.jsonl.log(step_line(1))
    run.forget_after(0)
    assert list(tmp_path.iterdir()) == []


def test_a_free_place_is_not_refused(tmp_path: Path) -> None:
    require_unoccupied(RunDir(tmp_path / "new"), PLACE)
    require_unoccupied(RunDir(tmp_path), PLACE)
    RunDir(tmp_path).prepare()  # for a run that didn't come to its beginning
    (tmp_path / "notes.txt").touch()
    require_unoccupied(RunDir(tmp_path), PLACE)


def test_a_run_is_never_overwritten_by_accident(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with pytest.raises(RunError) as caught:
        require_unoccupied(run, PLACE)
    (problem,) = caught.value.problems
    assert problem.place == PLACE
    assert problem.fact == f"{tmp_path / 'run'} holds a run already"
    assert "--resume" in problem.fix
    assert "--overwrite" in problem.fix


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(RunError, match="is a file"):
        require_unoccupied(RunDir(tmp_path / "run"), PLACE)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run directory: no job.yaml in it"):
        require_run(RunDir(tmp_path))


def test_a_run_is_resumed_with_the_job_it_was_begun_with(tmp_path: Path) -> None:
    run = begun(tmp_path, train={"learning_rate": 1e-3}, adapter={"type": "lora", "rank": 4})
    require_same_job(
        run,
        make_job(str(tmp_path), train={"learning_rate": 1e-3}, adapter={"type": "lora", "rank": 4}),
    )
    other = make_job(
        str(tmp_path),
        train={"learning_rate": 2e-3, "max_grad_norm": 2.0},
        adapter={"type": "lora", "rank": 8},
    )
    with pytest.raises(RunError) as caught:
        require_same_job(run, other)
    assert [(problem.place, problem.fact) for problem in caught.value.problems] == [
        ("adapter.rank", "is 8, but the run was begun with 4"),
        ("train.learning_rate", "is 0.002, but the run was begun with 0.001"),
        ("train.max_grad_norm", "is 2.0, but the run was begun with 1.0"),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"micro_batch": 1}},
        {"train": {"gradient_checkpointing": "full"}},
        {"train": {"optimizer": {"type": "adamw", "paged": True}}},
        {"data": {"workers": 2}},
        {"launch": {"processes": 2}},
        {"save": {"every": 7}},
        {"evaluate": {"every": 1}},
    ],
    ids=lambda changes: "-".join(f"{key}.{name}" for key in changes for name in changes[key]),
)
def test_what_changes_no_result_may_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    require_same_job(begun(tmp_path), make_job(str(tmp_path), **changes))


def test_a_run_may_become_longer(tmp_path: Path) -> None:
    run = begun(tmp_path, train={"steps": 10})
    require_same_job(run, make_job(str(tmp_path), train={"steps": 20, "schedule_start": 10}))
    require_same_job(run, make_job(str(tmp_path), train={"epochs": 2.0}))
    run.write_report(make_report(finished=True))
    run.result.mkdir()
    seal_folder(run.result)
    done = make_report().training.step
    for steps in (10, done):
        with pytest.raises(RunError, match=f"the run is finished: {done} steps") as caught:
            require_unfinished(run, make_job(str(tmp_path), train={"steps": steps}))
        assert f"--resume train.steps={2 * done}" in caught.value.problems[0].fix
    require_unfinished(run, make_job(str(tmp_path), train={"steps": done + 1}))
    with pytest.raises(RunError, match=r"train.schedule_start: is 3"):
        require_same_job(run, make_job(str(tmp_path), train={"steps": 10, "schedule_start": 3}))


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run directory"):
        require_same_job(RunDir(tmp_path), make_job(str(tmp_path)))


def test_what_a_killed_run_was_writing_is_swept_away(tmp_path: Path) -> None:
    run = begun(tmp_path)
    left = run.checkpoints / ".step-000004.0a1b2c3d.partial"
    left.mkdir(parents=True)
    run.prepare()
    assert not left.exists()
    assert run.job.exists()


def test_metrics_after_a_step_are_forgotten(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for record in (
        evaluation_line(0, "held", 3.0),
        step_line(1),
        step_line(2),
        evaluation_line(2, "held", 2.0),
    ):
        run.jsonl.log(record)
    run.forget_after(1)
    assert [(line["kind"], line["step"]) for line in lines(run)] == [("evaluation", 0), ("step", 1)]
    run.jsonl.log(step_line(2))
    assert [line["step"] for line in lines(run)] == [0, 1, 2]


def test_a_line_that_a_crash_cut_off_is_forgotten(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.jsonl.log(evaluation_line(0, "held", 3.0))
    run.jsonl.log(step_line(1))
    text = run.metrics.read_text(encoding="utf-8")
    run.metrics.write_text(text + '{"kind": "step", "st', encoding="utf-8")
    assert run.jsonl.evaluations(step=0)["held"].loss == 3.0
    run.forget_after(1)
    assert run.metrics.read_text(encoding="utf-8") == text


def test_a_run_that_begins_again_begins_its_metrics_again(tmp_path: Path) -> None:
    begun(tmp_path).jsonl.log(step_line(1))
    run = begun(tmp_path)
    run.jsonl.log(step_line(1))
    assert len(lines(run)) == 1


def test_evaluations_are_found_by_their_step(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for record in (
        evaluation_line(0, "a", 3.0),
        evaluation_line(0, "b", 4.0),
        evaluation_line(5, "a", 1.0),
    ):
        run.jsonl.log(record)
    assert {name: found.loss for name, found in run.jsonl.evaluations(0).items()} == {
        "a": 3.0,
        "b": 4.0,
    }
    figures = EvalFigures(loss=1.0, perplexity=2.0, accuracy=0.5, labels=7)
    assert run.jsonl.evaluations(5) == {"a": figures}
    assert run.jsonl.evaluations(1) == {}


def test_answers_and_reports_come_back_as_they_were(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert run.read_answers() == []
    assert run.read_report() is None
    run.write_answers(["ja\n", "größer", ""])
    run.write_report(make_report(directory="größer"))
    assert run.read_answers() == ["ja\n", "größer", ""]
    assert run.read_report() == make_report(directory="größer")


@pytest.mark.parametrize("text", ['{"finished": true, "loss": 0.25}', '{"finis', "[]", ""])
def test_a_report_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    """It holds nobody up: the run's end writes it again, and a line says so."""
    run = begun(tmp_path)
    (tmp_path / "report.json").write_text(text)
    assert run.read_report() is None
    require_unfinished(run, make_job(str(tmp_path)))
    assert notes_on(run) == [
        f"{tmp_path / 'report.json'} can't be read; the run's end writes it again"
    ]


@pytest.mark.parametrize(
    "bad", ["{", "null", "[1]", "7", '{"step": "1"}', "\x00", "[" * 9999, '{"kind": "step"}']
)
def test_a_bad_line_of_the_metrics_is_left_out(tmp_path: Path, bad: str) -> None:
    run = begun(tmp_path)
    run.jsonl.log(evaluation_line(0, "held", 3.0))
    run.jsonl.log(step_line(1))
    good = run.metrics.read_text("utf-8")
    run.metrics.write_text(f"{bad}\n{good}{bad}\n", encoding="utf-8")
    assert run.jsonl.evaluations(step=0)["held"].loss == 3.0
    assert run.jsonl.epochs() == step_line(1).epoch
    assert notes_on(run) == [f"{run.metrics}: 2 lines can't be read, left out"]
    run.forget_after(1)
    assert run.metrics.read_text("utf-8") == good
    assert notes_on(run) == []


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    """A strict reader would stumble over NaN and Infinity."""
    run = begun(tmp_path)
    run.jsonl.log(step_line(1, loss=math.nan, grad_norm=math.inf))
    run.write_report(
        make_report(result={"path": "a", "kind": "lora", "largest_difference": math.nan})
    )
    assert lines(run)[0]["loss"] is lines(run)[0]["grad_norm"] is None
    found = run.read_report()
    assert found is not None
    assert found.result.largest_difference is None


@pytest.mark.parametrize("room", [0, 7])
def test_a_line_that_finds_no_room_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Also one of which a few bytes were written before the disk was full."""
    run = RunDir(tmp_path)
    texts = [step_line(number).to_json() + "\n" for number in (1, 2, 3)]
    run.jsonl.log(step_line(1))
    with limited_files(run.metrics.stat().st_size + room, monkeypatch):
        run.jsonl.log(step_line(2))
        assert run.metrics.read_text("utf-8") == texts[0]
        with pytest.raises(OSError, match=r"No space left|too large"):
            run.jsonl.sync()  # a checkpoint must not be there without them
    run.jsonl.log(step_line(3))
    run.jsonl.sync()
    assert run.metrics.read_text("utf-8") == "".join(texts)


@contextmanager
def limited_files(size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file can grow beyond `size`; the system's word for that is another, which we translate."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    monkeypatch.setattr(run_logs, "DISK_FULL", (errno.ENOSPC, errno.EFBIG))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        monkeypatch.undo()


def test_a_run_of_an_earlier_version_takes_a_name_unless_somebody_has_it(tmp_path: Path) -> None:
    run = begun(tmp_path)
    marker = read_marker(tmp_path)
    assert marker is not None
    write_marker(tmp_path, replace(marker, names=("job.yaml",)))
    (tmp_path / "track").mkdir()
    with pytest.raises(RunError, match="is not the run's"):
        run.own("track")
    (tmp_path / "track").rmdir()
    run.own("track")
    assert run.owns("track")
