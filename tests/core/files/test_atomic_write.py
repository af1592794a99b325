"""A file or a folder that is written anew: whole, or as it was."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from shardtune.core.files.atomic_write import atomic_folder, atomic_write


def test_a_file_gets_its_new_content(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    atomic_write(path, "old")
    atomic_write(path, "größer\n")
    assert path.read_text(encoding="utf-8") == "größer\n"
    assert [each.name for each in tmp_path.iterdir()] == ["job.yaml"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    atomic_write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write(path, "half a surrogate pair: \ud800")
    assert path.read_text(encoding="utf-8") == "old"


def test_a_full_disk_is_named_with_the_file_and_keeps_no_half_of_it(small_disk: Path) -> None:
    path = small_disk / "job.yaml"
    atomic_write(path, "old")
    with pytest.raises(OSError, match="No space left on device") as error:
        atomic_write(path, "x" * (1 << 20))
    assert error.value.filename == str(path)
    assert [each.name for each in small_disk.iterdir()] == ["job.yaml"]
    assert path.read_text() == "old"


def replace_folder(target: Path, text: str) -> None:
    with atomic_folder(target, replace=True) as folder:
        (folder / "a").write_text(text)


class Killed(BaseException):
    """What no handler may take for an error to mend."""


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOTEMPTY, None])
def test_the_old_folder_is_back_if_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    target, rename = tmp_path / "result", Path.rename
    replace_folder(target, "old")

    def fail(path: Path, to: Path) -> Path:
        if to == target and not path.name.endswith(".old.partial"):
            raise Killed if number is None else OSError(number, "of a file system that is gone")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(Killed if number is None else OSError):
        replace_folder(target, "new")
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result"]


def test_a_folder_whose_replacing_was_killed_between_the_renames_is_not_lost(
    tmp_path: Path,
) -> None:
    target, old = tmp_path / "result", tmp_path / ".result.0a1b2c3d.old.partial"
    replace_folder(target, "old")
    target.rename(old)
    with pytest.raises(ValueError, match="no"), atomic_folder(target, replace=True):
        raise ValueError("no")
    assert (target / "a").read_text() == "old"
    target.rename(old)
    replace_folder(target, "new")
    assert (target / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
