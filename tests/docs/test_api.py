"""docs/api.md: every block is run, in order, in one process whose stdout is no terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import ROOT

pytestmark = pytest.mark.early


@pytest.mark.slow
def test_the_blocks_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 6
    for name in ("data", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout
    assert "step 4/4" in said, "progress is shown where there is no terminal"
    assert re.search(r"^4 \d", said, re.M)
    place = "save.directory: runs/from_python holds a run already"
    assert f"\n{place}\n    fix: go on with it" in said
    assert (tmp_path / "runs/from_python/result/adapter_model.safetensors").exists()
