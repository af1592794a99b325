"""A run or a model that isn't there: what may have been meant is named, and not the hub alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardtune.checkpoint.near_names import MODEL_MARKS, near_folder
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import require_run
from shardtune.cli.load_served import ServingMemory, load_served
from shardtune.cli.open_model import open_model
from shardtune.errors import ModelError, RunError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, file in (("runs/quickstart", "job.yaml"), ("models/small", "config.json")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).touch()
    (tmp_path / "runs/quickstep").mkdir()  # holds nothing
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("runs/quikstart", "runs/quickstart"),
        ("run/quickstart", "runs/quickstart"),
        ("quickstart", "runs/quickstart"),
        ("./runs/quickstar", "runs/quickstart"),
        ("model/small", "models/small"),
        ("organisation/else", ""),
    ],
)
def test_the_nearest_folder_is_found(name: str, near: str, here: Path) -> None:
    assert near_folder(name, MODEL_MARKS) == near
    if "/" in name:  # the last two names are compared
        assert near_folder(here / name, MODEL_MARKS) == near


@pytest.mark.usefixtures("here")
def test_a_run_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(RunError, match="no such folder") as caught:
        require_run(RunDir(Path("runs/quikstart")))
    assert "did you mean runs/quickstart?" in str(caught.value)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "opening",
    [open_model, lambda name: load_served([name], ServingMemory())],
    ids=["evaluate", "serve"],
)
def test_what_looks_like_a_hub_id_may_be_a_run_misspelt(
    opening: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it would try again
    with pytest.raises(ModelError, match="neither a run nor a folder here") as caught:
        opening("runs/quikstart")
    assert "did you mean runs/quickstart?" in str(caught.value)
    with pytest.raises(ModelError, match="no hub id that this machine can reach") as caught:
        opening("run/quickstart")
    assert "did you mean runs/quickstart?" in str(caught.value)
    with pytest.raises(ModelError, match="name a run's directory, or"):
        opening("organisation/else")
