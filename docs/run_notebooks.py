"""Runs the notebooks of docs/notebooks and keeps what they print and draw.

    python docs/run_notebooks.py [NAME ...]            run, and write the outputs into the files
    python docs/run_notebooks.py --check [NAME ...]    only run, for a test

A cell is run as Jupyter would: what it prints is kept, and its last expression is shown, as SVG
where it can be drawn. No package of Jupyter is needed. A notebook that measures nothing
(`same_everywhere` in its metadata) must print what its file has; exit code 1 if it doesn't.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("notebooks")


def run(notebook: dict[str, Any]) -> None:
    """Runs every code cell, one after the other, and puts its outputs into the notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            value = evaluate("".join(cell["source"]), names, f"cell {number}")
        cell["outputs"] = outputs(printed.getvalue(), value)


def evaluate(source: str, names: dict[str, Any], place: str) -> object:
    """The value of the last line, if it is an expression."""
    tree = ast.parse(source, place)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, place, "exec"), names)  # noqa: S102 - our own notebooks
        return None
    tree.body.pop()
    exec(compile(tree, place, "exec"), names)  # noqa: S102
    return eval(compile(ast.Expression(last.value), place, "eval"), names)  # noqa: S307


def outputs(printed: str, value: object) -> list[dict[str, Any]]:
    """As a notebook's file has them."""
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"name": "stdout", "output_type": "stream", "text": lines(printed)})
    if value is None:
        return found
    data: dict[str, Any] = {"text/plain": [f"<{type(value).__name__}>"]}
    if hasattr(value, "_repr_svg_"):
        data["image/svg+xml"] = lines(value._repr_svg_())
    else:
        data["text/plain"] = lines(repr(value))
    shown = {"data": data, "execution_count": None, "metadata": {}}
    return [*found, {"output_type": "execute_result", **shown}]


def printed(notebook: dict[str, Any]) -> list[str]:
    """What the cells print; pictures are drawn from the same figures."""
    shown = [each for cell in notebook["cells"] for each in cell.get("outputs", ())]
    return ["".join(each.get("text", ())) for each in shown]


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    names = options.names or [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]
    here, stale = Path.cwd(), []
    for name in names:
        path = FOLDER / f"{name}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        before = printed(notebook)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # runs leave their directories
            try:
                run(notebook)
            finally:
                os.chdir(here)
        print(f"{name}: {len(notebook['cells'])} cells")
        if options.check:
            if notebook["metadata"].get("same_everywhere") and printed(notebook) != before:
                stale.append(name)
        else:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            path.write_text(f"{text}\n", encoding="utf-8")
    for name in stale:
        print(f"{name} prints something else now: python docs/run_notebooks.py {name}")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
