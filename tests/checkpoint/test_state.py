"""Checkpoints: whole or not there, few, and found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardtune.checkpoint.state import load_state, newest, save_state
from shardtune.errors import RunError

TENSORS = {"weight.a.b": torch.arange(6.0).reshape(2, 3), "step.a.b": torch.tensor(3.0)}
NUMBERS = {"taken": 3.0, "scale": 65536.0}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    tensors = TENSORS | {"exp_avg.c": torch.arange(6.0).reshape(2, 3).t()}  # not contiguous
    path = save_state(tmp_path, 20, tensors, NUMBERS, keep=2)
    assert path == tmp_path / "step-000020"
    step, found, numbers = load_state(path)
    assert step == 20
    assert numbers == NUMBERS
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert names(path) == ["state.json", "state.safetensors"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    # By number, not by name: the seventh digit comes after a million steps.
    for step in (5, 10, 999_999, 1_000_000, 1_000_001):
        save_state(tmp_path, step, TENSORS, NUMBERS, keep=2)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]
    assert newest(tmp_path) == tmp_path / "step-1000001"


def test_an_old_one_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    save_state(tmp_path, 1, TENSORS, NUMBERS, keep=1)
    with pytest.raises(TypeError):
        save_state(tmp_path, 2, TENSORS, {"taken": object()}, keep=1)  # type: ignore[dict-item]
    assert names(tmp_path) == ["step-000001"]
    assert newest(tmp_path) == tmp_path / "step-000001"


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    for name in (".step-000009.12ab34cd.partial", "step-9", "step-000009.old", "notes"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path) is None
    save_state(tmp_path, 3, TENSORS, NUMBERS, keep=1)
    assert newest(tmp_path) == tmp_path / "step-000003"
    assert len(names(tmp_path)) == 5


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "no-numbers", "bad-numbers"])
def test_one_that_cannot_be_read_is_named(tmp_path: Path, damage: str) -> None:
    path = save_state(tmp_path, 3, TENSORS, NUMBERS, keep=1)
    tensors, numbers = path / "state.safetensors", path / "state.json"
    match damage:
        case "truncated":
            tensors.write_bytes(tensors.read_bytes()[:-5])
        case "empty":
            tensors.write_bytes(b"")
        case "missing":
            tensors.unlink()
        case "no-numbers":
            numbers.write_text('{"step": 3}', encoding="utf-8")
        case "bad-numbers":
            numbers.write_text('{"step": 3, ', encoding="utf-8")
    with pytest.raises(RunError, match="can't be read") as caught:
        load_state(path)
    (problem,) = caught.value.problems
    assert problem.place == str(path)
    assert "remove that folder" in problem.fix
