"""A model that a disk doesn't take is a sentence, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardtune.checkpoint.model_folder import model_folder, require_place
from shardtune.errors import RunError

LARGE = 1 << 20


def by_safetensors(folder: Path) -> None:
    save_file({"weight": torch.zeros(LARGE, dtype=torch.uint8)}, folder / "model.safetensors")


def by_python(folder: Path) -> None:
    (folder / "model.bin").write_bytes(bytes(LARGE))


@pytest.mark.parametrize("write", [by_safetensors, by_python])
def test_a_full_disk(small_disk: Path, write: Callable[[Path], None]) -> None:
    told = r"No space left on device; .* MiB are free"
    with pytest.raises(RunError, match=told), model_folder(small_disk / "model") as partial:
        write(partial)
    assert list(small_disk.iterdir()) == []


def test_an_older_one_stays(small_disk: Path) -> None:
    with model_folder(small_disk / "model") as partial:
        (partial / "config.json").write_text("old")
    with pytest.raises(RunError), model_folder(small_disk / "model", replace=True) as partial:
        (partial / "config.json").write_bytes(bytes(LARGE))
    assert [path.name for path in small_disk.iterdir()] == ["model"]
    assert (small_disk / "model" / "config.json").read_text() == "old"


@pytest.mark.parametrize("place", ["/proc/model", "file/model", "file/in/it", "x" * 300])
def test_a_place_where_no_folder_can_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunError, match=r"(?s)no folder can be made: .*fix that, or name"),
        model_folder(tmp_path / place),
    ):
        pytest.fail("there is no folder to fill")
    with pytest.raises(RunError, match="no folder can be made"):
        require_place(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_no_fault_of_the_disk_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), model_folder(tmp_path / "model") as partial:
        (partial / "missing").read_text()
    assert list(tmp_path.iterdir()) == []
