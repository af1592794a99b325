"""Jobs that the docs show are jobs, and commands are commands."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from shardtune.cli.main import parse
from shardtune.config.job_file import load_job
from tests.docs.test_readme import PAGES, ROOT, blocks
from tests.jobs import job_text

DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]


def shown(language: str) -> list[object]:
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}: {block.splitlines()[0]}")
        for page in DOCS
        for block in blocks(page, language)
    ]


@pytest.mark.parametrize("block", shown("yaml"))
def test_a_block_is_a_job_or_sections_of_one(block: str, tmp_path: Path) -> None:
    sections = yaml.safe_load(block)
    whole = yaml.safe_load(job_text())
    if "backend" in sections:  # Ludwig's, in the place of two of ours
        whole.pop("launch"), whole.pop("strategy", None)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(whole | sections), encoding="utf-8")
    load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize("block", shown("sh"))
def test_a_block_is_of_commands(block: str) -> None:
    for line in block.replace("\\\n", "").splitlines():
        words = shlex.split(line.partition(" > ")[0], comments=True)
        if "shardtune" in words:
            parse(words[words.index("shardtune") + 1 :])
