"""With what a run was made."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from shardtune.core.runs.run_environment import GitRevision, RunEnvironment
from shardtune.core.world import World
from shardtune.training.environment import describe_environment


def describe(world: World) -> RunEnvironment:
    return describe_environment(world, "a" * 16, {"train": "b" * 64})


def test_versions_and_machine() -> None:
    found = describe(World(rank=0, size=3))
    assert found.python == platform.python_version()
    assert torch.__version__.startswith(found.packages["torch"].partition("+")[0])
    assert found.ranks == 3
    assert found.cores >= 1
    assert (found.run, found.data) == ("a" * 16, {"train": "b" * 64})
    assert RunEnvironment.model_validate_json(found.to_json()) == found


def test_secrets_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert "hf_very_secret" not in describe(World()).to_json()


def test_the_revision_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe(World()).git is None

    def git(*arguments: str) -> str:
        settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *settings, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init")
    (tmp_path / "a").write_text("a")
    git("add", "a")
    git("commit", "-m", "first")
    revision = git("rev-parse", "HEAD")
    assert describe(World()).git == GitRevision(revision=revision, changed=False)
    (tmp_path / "a").write_text("b")
    assert describe(World()).git == GitRevision(revision=revision, changed=True)


def test_without_git_there_is_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe(World()).git is None
