"""The notebooks of the docs run from top to bottom, and keep what they showed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs.run_notebooks import evaluate, outputs

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_its_outputs_and_pictures(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    shown = [each for cell in cells for each in cell.get("outputs", ())]
    pictures = [each for each in shown if "image/svg+xml" in each.get("data", {})]
    assert len(pictures) >= 2
    assert all("Traceback" not in "".join(each.get("text", ())) for each in shown)


def test_a_cell_is_run_as_a_notebook_runs_it() -> None:
    names: dict[str, object] = {}
    assert evaluate("a = 2\na + 1", names, "cell") == 3
    assert evaluate("b = a", names, "cell") is None
    assert names["b"] == 2
    assert outputs("said\n", 3)[1]["data"]["text/plain"] == ["3"]


def is_same_everywhere(path: Path) -> bool:
    found: object = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("same_everywhere")
    return found is True


@pytest.mark.process
@pytest.mark.parametrize(
    "path",
    [
        path if is_same_everywhere(path) else pytest.param(path, marks=pytest.mark.long)
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(path: Path) -> None:
    """One that measures nothing prints what its file has."""
    command = [sys.executable, "-m", "docs.run_notebooks", "--check", path.stem]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
