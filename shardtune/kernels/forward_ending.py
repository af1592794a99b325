"""Reads in the source of a model's forward pass what it does with logits behind its output head.

Only what is plain is read: the head's answer is given to a name, operations give that name new
values, and it is returned as the keyword `logits` of an output of transformers. Whatever else may
happen to logits (inside the call that returns them, by position, in another function or a
decorator, in place, also under another name) is not understood, and whoever asks is told so.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any, NamedTuple

from torch import nn

_AS_IT_IS = ("float", "contiguous")
"""Methods that leave the values of logits alone."""


class Operation(NamedTuple):
    """An expression that gives logits a new value, and the condition under which it does."""

    expression: str
    condition: str = ""


class _NotPlain(Exception):
    """The forward pass does something that isn't understood here."""


class _Value(NamedTuple):
    """What a name is given."""

    expression: ast.expr
    condition: str
    """Empty where it is given in any case."""


@cache
def operations_behind_head(kind: type, heads: frozenset[str]) -> tuple[Operation, ...] | None:
    """What the forward pass of a model's class does with logits between its head, which has one of
    these names in the model, and its end. None where that isn't plain."""
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    if not _hands_on(kind):
        return None
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
        if isinstance(function, ast.FunctionDef):
            read = _ForwardPass(function, forward.__globals__)
            return _behind_head(read.values_of_logits(), heads)
    except (OSError, TypeError, SyntaxError, _NotPlain):
        pass  # nobody can read it, or it does more
    return None


def _hands_on(kind: type) -> bool:
    """Whether what is wrapped around a class's forward pass is known to leave its output alone:
    decorators of transformers or torch, and the way in which torch calls a module."""
    if kind.__call__ is not nn.Module.__call__:
        return False
    wrapper: Any = kind.forward  # type: ignore[attr-defined]
    while hasattr(wrapper, "__wrapped__"):
        # `functools.wraps` copies the name of the module, so where it was written says more.
        written_in = getattr(wrapper, "__globals__", {}).get("__name__", "")
        if written_in.split(".")[0] not in ("transformers", "torch"):
            return False
        wrapper = wrapper.__wrapped__
    return True


class _ForwardPass:
    """The source of a forward pass."""

    def __init__(self, function: ast.FunctionDef, scope: Mapping[str, Any]) -> None:
        self._function, self._scope = function, scope
        self._statements = list(_statements(function, ""))

    def values_of_logits(self) -> list[_Value]:
        """What the name is given, in order, that is returned as logits."""
        ends = (each for each, _ in self._statements if isinstance(each, ast.Return))
        returned = {name for each in ends for name in self._returned_as_logits(each.value)}
        if len(returned) != 1:
            raise _NotPlain
        return self._values(returned.pop())

    def _returned_as_logits(self, returned: ast.expr | None) -> set[str]:
        """The names that logits are returned under; none by a tuple, which has no such field."""
        match returned:
            case ast.IfExp(body=one, orelse=other):
                return self._returned_as_logits(one) | self._returned_as_logits(other)
            case ast.Tuple() | ast.BinOp(op=ast.Add(), left=ast.Tuple()):
                return set()
            case ast.Name(id=name):
                given = [each.expression for each in self._values(name)]
                if given and not any(isinstance(each, ast.Name) for each in given):
                    return set[str]().union(*map(self._returned_as_logits, given))
            case ast.Call(func=ast.Name(id=called), args=[], keywords=keywords):
                logits = [each.value for each in keywords if each.arg == "logits"]
                names = {each.id for each in logits if isinstance(each, ast.Name)}
                if names and _is_output(self._scope.get(called)):
                    return names
        raise _NotPlain

    def _values(self, name: str) -> list[_Value]:
        """What a name is given. Refuses whatever else may change it, or what it stands for."""
        names = self._names_of(name)
        found = [
            _Value(node.value, condition)
            for node, condition in self._statements
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and _targets(node) == [name]
        ]
        stored = 0
        for node in ast.walk(self._function):
            match node:
                case ast.Name(id=written, ctx=ast.Store() | ast.Del()):
                    stored += written == name
                case ast.arg(arg=written) if written == name:
                    raise _NotPlain
                case ast.Subscript() | ast.Attribute() if not isinstance(node.ctx, ast.Load):
                    _require_without(node, names)
                case ast.Call() if _is_in_place(node):
                    _require_without(node, names)
                case ast.AugAssign(target=target):
                    _require_without(target, names)
                case ast.Expr() | ast.Lambda():
                    _require_without(node, names)
                case ast.FunctionDef() if node is not self._function:
                    _require_without(node, names)
        if stored != len(found):
            raise _NotPlain
        return found

    def _names_of(self, name: str) -> set[str]:
        """The name, and others that are given the same tensor or a view of it."""
        names = {name}
        while True:
            more = {
                target
                for node, _ in self._statements
                if isinstance(node, ast.Assign | ast.AnnAssign)
                and node.value is not None
                and _viewed(node.value) in names
                for target in _targets(node)
            }
            if more <= names:
                return names
            names |= more


def _viewed(value: ast.expr) -> str:
    """The name of which `value` may be a view: a part, an attribute, or what a method gives."""
    match value:
        case ast.Name(id=name):
            return name
        case ast.Subscript(value=inner) | ast.Attribute(value=inner):
            return _viewed(inner)
        case ast.Call(func=ast.Attribute() as method):
            return _viewed(method)
    return ""


def _is_in_place(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id=called) | ast.Attribute(attr=called):
            if called.endswith("_"):
                return True
    return any(each.arg in ("out", "inplace") for each in call.keywords)


def _statements(node: ast.AST, condition: str) -> Iterator[tuple[ast.stmt, str]]:
    """All of them in their order, but for those of functions inside, with the condition of each."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, condition
        if isinstance(child, ast.If) and not condition:
            yield from _statements(ast.Module(child.body, []), ast.unparse(child.test))
            yield from _statements(ast.Module(child.orelse, []), "else")
        elif not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.expr):
            yield from _statements(child, "inside another statement")


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each.id if isinstance(each, ast.Name) else "" for each in targets]


def _is_output(found: object) -> bool:
    from transformers.utils import ModelOutput

    return isinstance(found, type) and issubclass(found, ModelOutput)


def _require_without(node: ast.AST, names: Set[str]) -> None:
    if any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node)):
        raise _NotPlain


def _behind_head(values: Sequence[_Value], heads: frozenset[str]) -> tuple[Operation, ...]:
    """Of all values of logits those that follow the head's answer."""
    operations: list[Operation] = []
    answered = False
    for expression, condition in values:
        if isinstance(expression, ast.Constant) and expression.value is None:
            continue
        factor = _factor_of_head(expression, heads)
        if factor is None:
            operations.append(Operation(ast.unparse(expression), condition))
            continue
        if operations and (answered or condition):
            raise _NotPlain
        answered = True
        # Whatever the name stood for before is gone.
        operations = [Operation(f"logits * {factor}", condition)] if factor else []
    if not answered:
        raise _NotPlain
    return tuple(operations)


def _factor_of_head(value: ast.expr, heads: frozenset[str]) -> str | None:
    """By what the head's answer is multiplied; empty where it is taken as it is, None where `value`
    is something else."""
    match value:
        case ast.Call(func=ast.Attribute(value=inner, attr=method), args=[], keywords=[]):
            return _factor_of_head(inner, heads) if method in _AS_IT_IS else None
        case ast.BinOp(op=ast.Mult(), left=left, right=ast.Attribute() as factor):
            return ast.unparse(factor) if _factor_of_head(left, heads) == "" else None
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="self"), attr=called), args=[hidden], keywords=[]
        ):
            inside = {each.attr for each in ast.walk(hidden) if isinstance(each, ast.Attribute)}
            return "" if called in heads and not inside & heads else None
    return None
