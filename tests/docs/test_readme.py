"""What the README tells people to type exists and works; what it links to is there."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardtune.cli.main import main, parse

pytestmark = pytest.mark.early

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Every line of a shell block in README that starts with `shardtune`."""
    lines = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("shardtune")]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_command_parses(command: list[str]) -> None:
    parse(command)


@pytest.mark.slow
@pytest.mark.process
def test_the_commands_work_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder laid out as the repository, with the tiny model and few steps."""
    for name in ("recipes", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("/set max_tokens 4\nHello\n"))  # to `chat`
    few = ["model.name=tiny", "train.steps=4", "train.warmup_steps=1", "save.every=2"]
    few += ["evaluate.max_new_tokens=8", "evaluate.every=2"]
    assert main(["train", "recipes/quickstart.yaml", *few]) == 0  # what `make demo` runs
    for command in commands():
        small = few if command[0] in ("train", "data", "show") else []
        assert main([*command, *small]) == 0, command
    said = capsys.readouterr().out
    assert "token accuracy" in said
    assert (tmp_path / "merged" / "quickstart" / "config.json").is_file()


@pytest.mark.parametrize("block", blocks(ROOT / "README.md", "yaml"))
def test_a_job_in_the_readme_is_a_job(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "job.yaml").write_text(block)
    assert main(["show", str(tmp_path / "job.yaml")]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_anchors_that_the_readme_links_to_are_headings() -> None:
    """Links between pages are the site's to check; README isn't part of it."""
    for path, anchor in re.findall(r"\]\(([\w/.-]*)#([\w-]+)\)", (ROOT / "README.md").read_text()):
        page = ROOT / (path or "README.md")
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{path}#{anchor}"


def test_the_map_is_complete() -> None:
    text = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"^ {4,6}([\w.]+/?) ", text, re.MULTILINE))
    package = ROOT / "shardtune"
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    files = {path.name for path in package.glob("[!_]*.py")}
    assert rooms | files <= listed


@pytest.mark.parametrize("script", ["make_tables.py", "draw.py", "make_scenarios.py"])
def test_what_is_generated_is_up_to_date(script: str) -> None:
    command = [sys.executable, str(ROOT / "docs" / script), "--check"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, check=False).returncode == 0
