"""The list `track`: short and spelt out, told by a DeepSpeed file, and without secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardtune.config.auto import resolve
from shardtune.config.job_file import load_job
from shardtune.config.rules import check
from shardtune.config.trackers import (
    TRACKERS,
    CSVFiles,
    TensorBoard,
    WandB,
    tracker_labels,
)
from shardtune.core.host.machine import Machine
from shardtune.errors import JobError
from tests.jobs import write_job

HERE = Machine(cores=2, gpus=0)


@pytest.mark.parametrize(
    ("written", "kinds"),
    [
        ("tensorboard", ["tensorboard"]),
        ("[csv, {type: wandb, project: x}]", ["csv", "wandb"]),
        ("{type: mlflow}", ["mlflow"]),
        ("[]", []),
    ],
)
def test_it_may_be_written_short(written: str, kinds: list[str], tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, track=written)).job
    assert [each.type for each in job.track] == kinds
    again = type(job).model_validate_json(job.model_dump_json())
    assert again == job


def test_the_second_of_a_kind_has_a_number() -> None:
    assert tracker_labels((WandB(), CSVFiles(), WandB())) == ["wandb", "csv", "wandb-2"]


@pytest.mark.parametrize(
    ("written", "place", "fix"),
    [
        ("[wandbb]", "track.0.type", "did you mean 'wandb'?"),
        ("[{type: wandb, projekt: x}]", "track.0.projekt", "did you mean 'project'?"),
        ("[{type: csv, project: x}]", "track.0.project", "it belongs to `type: wandb`"),
    ],
)
def test_mistakes_are_named(written: str, place: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        load_job(write_job(tmp_path, track=written))
    (problem,) = caught.value.problems
    assert problem.place.endswith(place)
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("report_to", "use track: a list of"),
        ("wandb_project", "use track: [{type: wandb, project: NAME}]"),
        ("logging_dir", "use track: [{type: tensorboard, directory: DIR}]"),
    ],
)
def test_words_of_other_tools_are_answered(key: str, answer: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        load_job(write_job(tmp_path, **{key: "wandb"}))
    assert answer in caught.value.problems[0].fix


@pytest.mark.parametrize(
    "secret",
    [
        "{type: mlflow, tracking_uri: 'https://me:hunter22@host/x'}",
        "{type: mlflow, tracking_uri: 'https://host/x?token=hunter22'}",
        "{type: wandb, name: 'api_key=hunter22'}",
    ],
)
def test_a_secret_in_a_job_is_refused_and_not_repeated(secret: str, tmp_path: Path) -> None:
    loaded = load_job(write_job(tmp_path, track=f"[csv, {secret}]"))
    with pytest.raises(JobError) as caught:
        check(resolve(loaded.job, HERE).job, loaded.place)
    (problem,) = caught.value.problems
    assert "track.1." in problem.place
    assert "password or a token" in problem.fact
    assert "hunter22" not in str(problem)


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_job(write_job(tmp_path, track="[tensorboard, csv, trackio]"))
    job = resolve(loaded.job, HERE).job
    monkeypatch.setattr("shardtune.config.rules.find_spec", lambda name: None)
    with pytest.raises(JobError) as caught:
        check(job, loaded.place, HERE)
    (problem,) = caught.value.problems
    assert "trackio is not installed" in problem.fact
    assert problem.fix == "pip install 'shardtune[trackio]'"


def test_every_extra_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for kind in TRACKERS.values():
        assert all(f"\n{need.extra} = [" in text for need in kind.needs)


# DeepSpeed's monitors ----------------------------------------------------------------------------

MONITORS = {
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "first"},
    "wandb": {"enabled": True, "project": "mine", "team": "us", "group": None},
    "csv_monitor": {"enabled": True, "output_path": ""},
    "comet": {"enabled": False},
}


def with_file(folder: Path, content: dict[str, object], **sections: str) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(content, indent=2))
    return write_job(folder, strategy=f"{{type: deepspeed, config: {path}}}", **sections)


def test_monitors_of_deepspeed_become_trackers(tmp_path: Path) -> None:
    found = resolve(load_job(with_file(tmp_path, MONITORS)).job, HERE)
    assert found.job.track == (
        TensorBoard(directory="logs", name="first"),
        CSVFiles(),
        WandB(project="mine", entity="us"),
    )
    assert found.reasons["track", 0, "directory"].startswith("ds.json:")
    assert found.notes == ()


def test_a_job_with_trackers_of_its_own_keeps_them(tmp_path: Path) -> None:
    found = resolve(load_job(with_file(tmp_path, MONITORS, track="[csv]")).job, HERE)
    assert found.job.track == (CSVFiles(),)
    assert "its trackers are left out: the job has `track` itself" in found.notes[0]


def test_monitors_that_are_not_enabled_track_nothing(tmp_path: Path) -> None:
    off = {"wandb": {"enabled": False}, "csv_monitor": {"output_path": "logs"}}
    assert resolve(load_job(with_file(tmp_path, off)).job, HERE).job.track == ()


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"wandb": {"enabled": True, "project": 7}}, "project of a tracker"),
        ({"wandb": {"enabled": True, "projet": "mine"}}, "wandb.projet"),
    ],
)
def test_a_monitor_that_is_wrong_is_named(
    block: dict[str, object], told: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=told):
        resolve(load_job(with_file(tmp_path, block)).job, HERE)
