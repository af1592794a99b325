"""Only regular files are opened, and nothing waits for one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from shardtune.core.files.regular_file import open_regular, other_kind, read_regular


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"123")
    assert read_regular(file, 3) == b"123"
    (tmp_path / "link").symlink_to(file)
    assert read_regular(tmp_path / "link", 3) == b"123"
    assert other_kind(file) == other_kind(tmp_path) == other_kind(tmp_path / "nothing") == ""
    with pytest.raises(OSError, match="has more than 2 bytes"):
        read_regular(file, 2)


def odd(folder: Path) -> dict[str, Path]:
    """One of each kind that isn't a file, by what is said about it."""
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
    return {
        "a named pipe": folder / "pipe",
        "a socket": folder / "s",
        "a device": Path("/dev/zero"),
        "a link that leads nowhere": folder / "loop",
    }


def test_what_is_no_file_is_named_and_nothing_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    for kind, path in odd(Path()).items():
        assert other_kind(path).startswith(f"is {kind}")
        with pytest.raises(OSError, match=kind):
            open_regular(path)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")
    with pytest.raises(OSError, match="NUL"):
        open_regular(tmp_path / "a\0b")


def test_a_link_is_refused_where_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="is a link, not a file"):
        open_regular(tmp_path / "link", follow_links=False)
