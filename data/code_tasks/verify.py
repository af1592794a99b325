"""Does an answer do what its row asks for, and is it written in the house style?

Each function takes an answer (and its tests) and yields what is wrong with it. The code that
runs here is the text of our own templates, nothing from outside.
"""

from __future__ import annotations

import ast
import re
import shlex
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from .schemas import Cell, database, records

SHELL_COMMANDS = {"awk", "comm", "cut", "du", "find", "for", "grep", "head", "sed", "sort"}
SHELL_COMMANDS |= {"tail", "tar", "tr", "uniq"}
MAX_BODY_LINES = 6


def faults(kind: str, answer: str, tests: Sequence[str]) -> Iterator[str]:
    """Everything that is wrong with one answer."""
    if "```" in answer:
        yield "has a markdown fence"
    if answer != answer.strip() or "\n\n" in answer:
        yield "has blank space around it or a blank line in it"
    yield from _CHECKS[kind](answer, tests)


def _python(answer: str, tests: Sequence[str]) -> Iterator[str]:
    try:
        tree = ast.parse(answer)
    except SyntaxError as error:
        yield f"does not parse: {error}"
        return
    yield from style_faults(tree)
    namespace: dict[str, object] = {}
    exec(compile(tree, "<answer>", "exec"), namespace)  # noqa: S102 - our own text
    with tempfile.TemporaryDirectory() as folder:
        namespace["tmp"] = Path(folder)
        yield from _untrue(tests, namespace)


def style_faults(tree: ast.Module) -> Iterator[str]:
    """The house style of a Python answer: one typed function, a one-line docstring, 1-6 lines."""
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        yield "is not exactly one function"
        return
    function = tree.body[0]
    if not function.args.args or any(arg.annotation is None for arg in function.args.args):
        yield "has an argument without a type"
    if function.returns is None:
        yield "has no return type"
    doc = ast.get_docstring(function, clean=False) or ""
    # An imperative ("Return ...") has no s at the end of its verb; "Returns ..." has.
    if not re.fullmatch(r"[A-Z][a-z-]*[a-rt-z] [^\n]+\.", doc):
        yield f"has no one-line imperative docstring: {doc!r}"
    body_lines = (function.end_lineno or 0) - function.body[0].lineno
    if not 1 <= body_lines <= MAX_BODY_LINES:
        yield f"has {body_lines} lines after the docstring, not 1 to {MAX_BODY_LINES}"


def _sql(answer: str, tests: Sequence[str]) -> Iterator[str]:
    if "\n" in answer or not answer.endswith(";"):
        yield "is not one line that ends in a semicolon"
    connection = database()
    try:
        rows = connection.execute(answer).fetchall()
    except sqlite3.Error as error:
        yield f"does not run: {error}"
        return
    if answer.startswith("SELECT") and not rows:
        yield "selects nothing, so its tests prove nothing"

    def query(text: str) -> list[tuple[Cell, ...]]:
        return connection.execute(text).fetchall()

    yield from _untrue(tests, {**records(), "rows": rows, "query": query})
    connection.close()


def _regex(answer: str, tests: Sequence[str]) -> Iterator[str]:
    if not (answer.startswith("^") and answer.endswith("$")):
        yield "is not anchored at both ends"
    try:
        pattern = re.compile(answer)
    except re.error as error:
        yield f"does not compile: {error}"
        return
    yield from _untrue(tests, {"pattern": pattern})


def _shell(answer: str, _tests: Sequence[str]) -> Iterator[str]:
    """Quotes must close, and each part of a pipe must start with a command that we know."""
    if "\n" in answer:
        yield "is not one line"
    try:
        words = list(shlex.shlex(answer, posix=True, punctuation_chars=True))
    except ValueError as error:
        yield f"is not shell syntax: {error}"
        return
    starts = [words[0], *(after for word, after in pairwise(words) if word == "|")]
    yield from (f"starts with {word!r}" for word in starts if word not in SHELL_COMMANDS)


def _untrue(tests: Sequence[str], namespace: dict[str, object]) -> Iterator[str]:
    if not tests:
        yield "has no test"
    for test in tests:
        yield from _outcome(test, namespace)


def _outcome(test: str, namespace: dict[str, object]) -> Iterator[str]:
    try:
        if not eval(test, namespace):  # noqa: S307 - our own text
            yield f"fails {test}"
    except Exception as error:  # noqa: BLE001 - a test may fail in any way; all are reported
        yield f"fails {test}: {error!r}"


_CHECKS: dict[str, Callable[[str, Sequence[str]], Iterator[str]]] = {
    "python": _python,
    "sql": _sql,
    "regex": _regex,
    "shell": _shell,
}
