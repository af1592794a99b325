"""Completion: the script of a shell offers commands, options and keys."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from shardtune.cli.main import main
from shardtune.config.job_keys import override_keys


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def offered(script: str, *words: str) -> set[str]:
    """What bash would offer for the last of `words`."""
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shardtune 2> /dev/null\n"
    show = 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    bash = ["bash", "--norc", "-c", script + ask + show]
    done = subprocess.run(bash, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = script("bash", capsys)
    assert offered(found, "shardtune", "tr") == {"train", "track"}
    assert {"merge", "models"} <= offered(found, "shardtune", "m")
    assert offered(found, "shardtune", "train", "--resu") == {"--resume"}
    assert offered(found, "shardtune", "merge", "r", "--d") == {"--dtype"}
    assert offered(found, "shardtune", "train", "job.yaml", "train.warmup") == {
        "train.warmup_ratio=",
        "train.warmup_steps=",
    }
    assert offered(found, "shardtune", "merge", "train.w") == set(), "which takes no keys"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_the_same_words(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = script(shell, capsys)
    for word in ("train", "completion", "resume", "adapter.rank", "data.train.0.path"):
        assert word in found
    if shutil.which(shell) is not None:
        checked = subprocess.run([shell, "-n"], input=found, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_keys_are_those_that_an_override_can_set() -> None:
    keys = override_keys()
    assert {"train.steps", "adapter.rank", "strategy.type", "data.eval.0.columns.text"} <= {*keys}
    assert "train" not in keys
    assert "data.train" not in keys
