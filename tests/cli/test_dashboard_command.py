"""`shardtune dashboard` refuses what it can't show, or what others could see, before it listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.cli import web_options
from shardtune.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["dashboard", *words]) != 0
    return capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, str(tmp_path / "runs"))
    assert "no such folder" in told
    (tmp_path / "runs").write_text("")
    assert "is no folder" in refused(capsys, str(tmp_path / "runs"))


def test_an_address_that_others_reach_needs_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(web_options.API_KEY, raising=False)
    told = refused(capsys, str(tmp_path), "--host", "0.0.0.0")
    assert web_options.API_KEY in told


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(web_options, "find_spec", lambda name: None if name == "uvicorn" else name)
    told = refused(capsys, str(tmp_path))
    assert "uvicorn" in told
    assert "shardtune[serve]" in told
