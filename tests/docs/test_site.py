"""The site is built strictly: what leads nowhere is an error. Nothing comes from the network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.test_readme import ROOT


def build(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, on the documentation in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=folder,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_site_is_built_and_needs_no_network(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8"))
        fetched = [tag for tag in tags if re.search(r'(?:src|href)="?(?:https?:)?//', tag)]
        assert not fetched, page


def test_what_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "alone.md").write_text("# In no navigation\n", encoding="utf-8")
    with (tmp_path / "docs" / "index.md").open("a", encoding="utf-8") as page:
        page.write("\n[a page](nowhere.md), [a part of one](jobs.md#nowhere)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    assert built.stderr.count("WARNING") == 3, built.stderr
    for place in ("- alone.md", "'nowhere.md'", "'jobs.md#nowhere'"):
        assert place in built.stderr
