"""Every file, module and test that README and the docs name is in the repository.

The changelog and the diary tell of the past and may name what is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_readme import PAGES, ROOT

NOW = [page for page in PAGES if page.name not in ("CHANGELOG.md", "LOG.md")]
OURS = r"https://github\.com/shardtune/shardtune/(?:blob|tree)/main/"
FILES = {path.name for folder in ("shardtune", "tests", "benchmarks", "docs", "data") for path in
         (ROOT / folder).rglob("*.py")}  # fmt: skip
NOT_OURS = {"pip", "pytest", "venv"}


def named(text: str) -> Iterator[str]:
    """What a page names and isn't there."""
    text = re.sub(r"\s+", " ", text)  # a command may run over the end of a line
    linked = re.findall(OURS + r"([\w./-]+)", text)
    text = re.sub(r"https?://\S+", "", text)
    paths = re.findall(r"(?<![\w/])(?:shardtune|tests|benchmarks|recipes|deploy)/[\w./*-]+", text)
    for path in linked + [path.rstrip(".") for path in paths if not path.endswith(".md")]:
        if not any(ROOT.glob(path)):
            yield path
    for path in re.findall(r"`([\w/]+\.py)`", text):
        inside = (ROOT / path, ROOT / "shardtune" / path)
        if not any(place.exists() for place in inside) and ("/" in path or path not in FILES):
            yield path
    for module in re.findall(r"python -m ([a-z_][\w.]*)", text):
        place = ROOT / module.rstrip(".").replace(".", "/")
        found = (place.with_suffix(".py"), place / "__main__.py")
        if module not in NOT_OURS and not any(path.exists() for path in found):
            yield f"python -m {module}"
    for script in re.findall(r"python (\w[\w/]*\.py)", text):
        if not (ROOT / script).exists():
            yield f"python {script}"
    for path, name in re.findall(r"pytest (tests/[\w/]+\.py) -k (\w+)", text):
        if (ROOT / path).exists() and name not in (ROOT / path).read_text(encoding="utf-8"):
            yield f"pytest {path} -k {name}"


@pytest.mark.parametrize("page", NOW, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert not list(named(page.read_text(encoding="utf-8")))


def test_what_is_gone_is_found() -> None:
    absent = "nothing" + "_like_it"  # in no test, not even in this one
    text = f"""`shardtune/gone.py`, `core/gone.py`, `gone.py`, tests/gone/test_it.py,
    recipes/gone_*.yaml, `python -m benchmarks.gone`, `pytest tests/docs/test_paths.py -k {absent}`
    [there](https://github.com/shardtune/shardtune/blob/main/deploy/gone.yaml)
    """
    assert len(set(named(text))) == 8
    assert not list(named("`shardtune/train.py`, `train.py`, `core/mesh.py`, recipes/gpu_*.yaml"))
