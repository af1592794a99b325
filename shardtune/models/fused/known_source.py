"""Class swaps by source: a layer gets a fused class only where its forward is what ours replaces.

Other libraries' layers are compared as syntax trees, so comments and line breaks don't count. A
layer whose source differs stays as it is: results are the same, and one line says what is lost.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

_log = logging.getLogger("shardtune")


@cache
def _forward_of(cls: type) -> ast.FunctionDef | None:
    """The forward of a class; None where its source can't be read."""
    forward: Any = cls.forward  # type: ignore[attr-defined]
    try:
        (written,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return written if isinstance(written, ast.FunctionDef) else None


def forward_is(
    cls: type, body: Sequence[str], parameters: Sequence[str] | None = None, *, lost: str
) -> bool:
    """Whether the forward of `cls` is `body`, statement by statement, and nothing decorates it."""
    written = _forward_of(cls)
    same = (
        written is not None
        and not written.decorator_list
        and [ast.unparse(line) for line in written.body] == list(body)
        and (parameters is None or [each.arg for each in written.args.args] == list(parameters))
    )
    return same or _refuse(cls, lost)


def forward_has(cls: type, statements: Iterable[str], *, lost: str) -> bool:
    """Whether all of `statements` are in the forward of `cls`."""
    written = _forward_of(cls)
    found = (
        {ast.unparse(node) for node in ast.walk(written) if isinstance(node, ast.stmt)}
        if (written is not None)
        else set()
    )
    return found.issuperset(statements) or _refuse(cls, lost)


def input_goes_to(cls: type, layers: Collection[str], *, lost: str) -> bool:
    """Whether the forward of `cls` uses its first argument for its shape, and as the input of each
    of `layers`, and for nothing else: so outputs computed before can stand in its place."""
    written = _forward_of(cls)
    if written is None or len(written.args.args) < 2:
        return _refuse(cls, lost)
    given = written.args.args[1].arg
    parents = {child: node for node in ast.walk(written) for child in ast.iter_child_nodes(node)}
    uses = [n for n in ast.walk(written) if isinstance(n, ast.Name) and n.id == given]
    called = [
        ast.unparse(parent.func)
        for use in uses
        if isinstance(parent := parents[use], ast.Call) and parent.args == [use]
    ]
    shapes = [
        use
        for use in uses
        if isinstance(parent := parents[use], ast.Attribute) and parent.attr == "shape"
    ]
    known = sorted(called) == sorted(f"self.{name}" for name in layers)
    return (known and len(called) + len(shapes) == len(uses)) or _refuse(cls, lost)


@cache
def say_once(fact: str) -> None:
    """A line about what isn't fused, once in a process."""
    _log.warning("%s", fact)


@cache
def _refuse(cls: type, lost: str) -> bool:
    """False, and one line that says so, once."""
    package = cls.__module__.split(".", 1)[0]
    _log.warning("%s of this %s has changed: %s", cls.__name__, package, lost)
    return False
