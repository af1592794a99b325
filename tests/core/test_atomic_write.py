"""A small file that is written anew: whole, or as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.core.atomic_write import atomic_write


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
