"""pyproject.toml declares what the package imports, and nothing that it doesn't."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {
    "resvg_py": "resvg-py",
    "yaml": "pyyaml",
    "mlflow": "mlflow-skinny",
    "flash_attn": "flash-attn-4",
    "rouge_score": "rouge-score",
    "lm_eval": "lm-eval",
    "llama_cpp": "llama-cpp-python",
}
"""Where a distribution is called otherwise than what is imported of it."""
WITH_OTHERS = {"triton": "torch", "fsspec": "datasets", "tokenizers": "transformers"} | {
    "pydantic_core": "pydantic",
    "referencing": "jsonschema",
}
"""What comes with another one, which pins its version."""
WHERE_LOADED = {"IPython"}
"""Imported only where a notebook has done so already."""
EXTRAS = ("dev", "docs", "bench")
"""Not of the package itself."""


@cache
def imported() -> frozenset[str]:
    """Top-level modules of others, wherever in a file they are imported."""
    names = frozenset(
        name.partition(".")[0]
        for file in (ROOT / "shardtune").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in _names(node)
    )
    return names - sys.stdlib_module_names - {"shardtune"} - WHERE_LOADED


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        yield node.module
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
        yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def declared() -> set[str]:
    """Distributions that plain `pip install shardtune`, or one of its extras, brings."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = text.partition("[project.scripts]")[0]
    lines = [
        line
        for line in project.splitlines()
        if not line.startswith(tuple(f"{extra} =" for extra in EXTRAS))
    ]
    kept = "\n".join(lines).partition('"pytest')[0]
    return set(re.findall(r'"([A-Za-z0-9_-]+)(?:\[[a-z0-9,]+\])?>=', kept)) - {"setuptools"}


def test_what_is_imported_is_declared() -> None:
    missing = {
        name
        for name in imported()
        if DISTRIBUTIONS.get(name, name) not in declared() and name not in WITH_OTHERS
    }
    assert not missing


def test_what_is_declared_is_imported() -> None:
    found = {DISTRIBUTIONS.get(name, name) for name in imported()}
    kernels = (ROOT / "shardtune/kernels/flash_attention.py").read_text(encoding="utf-8")
    found |= {"flash-attn-4"} if "flash_attn" in kernels else set()  # by the name of a constant
    assert not declared() - found


def test_each_has_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("dependencies = [")[2].partition("\ndev = [")[0]
    lines = [line for line in section.splitlines() if ">=" in line]
    assert lines
    assert all("#" in line for line in lines)
