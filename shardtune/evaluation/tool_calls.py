"""Function calls in a model's answer, and whether they are the right ones (BFCL's AST check)."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardtune.core.model.written_calls import Call, json_calls

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"```(?:json|python|tool_code)?\n(.*?)(?:```|\Z)", re.DOTALL)
_IGNORED = re.compile(r"[ ,./\-_*^]")
"""What BFCL leaves out of strings before it compares them."""


def parse_calls(answer: str) -> list[Call]:
    """The calls of an answer: `<tool_call>` blocks, JSON with name and arguments, or Python calls.
    Empty where there are none, or where one of them can't be read."""
    blocks = _TAGGED.findall(answer) or _FENCED.findall(answer) or [answer.strip()]
    calls: list[Call] = []
    for block in blocks:
        found = json_calls(block) or _python_calls(block)
        if not found:
            return []
        calls += found
    return calls


def matches_truth(calls: Sequence[Call], truth: Any) -> bool:
    """Whether each call of `truth` was made, and no other. It is written as BFCL does:
    `[{"name": {"argument": [allowed values]}}]`, with "" where an argument may be left out."""
    expected = [item for entry in truth or () for item in entry.items()]
    if len(calls) != len(expected):
        return False
    left = list(expected)
    for call in calls:  # calls that run side by side may come in any order
        match = next((item for item in left if _is_call(call, *item)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _is_call(call: Call, name: str, allowed: Mapping[str, Sequence[Any]]) -> bool:
    if call.name != name or set(call.arguments) - set(allowed):
        return False
    return all(
        any(_same(call.arguments[key], value) for value in values)
        if key in call.arguments
        else "" in values
        for key, values in allowed.items()
    )


def _same(given: Any, allowed: Any) -> bool:
    if isinstance(given, bool) or isinstance(allowed, bool):
        return given is allowed
    if isinstance(given, str) and isinstance(allowed, str):
        return _letters(given) == _letters(allowed)
    if isinstance(given, (list, tuple)) and isinstance(allowed, (list, tuple)):
        return len(given) == len(allowed) and all(map(_same, given, allowed))
    if isinstance(given, Mapping) and isinstance(allowed, Mapping):
        # Inside an object BFCL lists the allowed values, too.
        return set(given) <= set(allowed) and all(
            any(_same(given[key], value) for value in _listed(values))
            if key in given
            else "" in _listed(values)
            for key, values in allowed.items()
        )
    return bool(given == allowed)


def _listed(values: Any) -> Sequence[Any]:
    return values if isinstance(values, list) else [values]


def _letters(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


def _python_calls(text: str) -> list[Call] | None:
    """`f(a=1)` or `[f(a=1), g(b="x")]`; arguments must be literals with a name."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args:
            return None
        try:
            arguments = {
                word.arg: ast.literal_eval(word.value)
                for word in node.keywords
                if word.arg is not None
            }
        except (ValueError, RecursionError):
            return None
        calls.append(Call(ast.unparse(node.func), arguments))
    return calls
