"""A reader of Go templates, as far as our Modelfiles use them: what Ollama will make of messages.

Known are texts, fields, `range .Messages`, `if`, `else if`, `else`, `end`, and the functions `eq`,
`ne`, `and`, `or`; a dash beside the braces takes blanks away, as in Go.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shardtune.data.conversation import Conversation

_ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_RANGE = re.compile(r"range (?:\$i, \$m := )?\.Messages")


@dataclass(frozen=True)
class OllamaMessage:
    """A message as Ollama gives it to a template."""

    role: str
    content: str


@dataclass
class _Block:
    """What stands between two actions of a template; branches of an `if` have a condition."""

    action: str = ""
    branches: list[tuple[str, list[_Node]]] = field(default_factory=lambda: [("", [])])

    @property
    def inner(self) -> list[_Node]:
        return self.branches[-1][1]


_Node: TypeAlias = "str | _Block"


@dataclass(frozen=True)
class _Scope:
    system: str
    messages: Sequence[OllamaMessage]
    place: int | None = None


def collate(conversation: Conversation, default_system: str) -> tuple[str, list[OllamaMessage]]:
    """The system prompt and the messages, as Ollama prepares them: a model's own system prompt
    where none is given, and neighbours with one role in one message."""
    given = [OllamaMessage(each["role"], each["content"]) for each in conversation.messages]
    if default_system and given[0].role != "system":
        given.insert(0, OllamaMessage("system", default_system))
    found: list[OllamaMessage] = []
    for each in given:
        if found and found[-1].role == each.role:
            each = OllamaMessage(each.role, f"{found.pop().content}\n\n{each.content}")
        found.append(each)
    return "\n\n".join(each.content for each in found if each.role == "system"), found


def render_go(template: str, conversation: Conversation, default_system: str = "") -> str:
    """The prompt that Ollama sends to the model."""
    system, messages = collate(conversation, default_system)
    return _render(_parse(template).inner, _Scope(system, messages))


def _parse(template: str) -> _Block:
    stack, last = [_Block()], 0
    trim = False
    for found in _ACTION.finditer(template):
        text = template[last : found.start()]
        text = text.lstrip() if trim else text
        stack[-1].inner.append(text.rstrip() if found[1] else text)
        trim, last = bool(found[3]), found.end()
        action = found[2]
        if action == "end":
            stack.pop()
        elif action == "else" or action.startswith("else if "):
            stack[-1].branches.append((action.removeprefix("else").strip(), []))
        elif _RANGE.fullmatch(action) or action.startswith("if "):
            block = _Block("range", [("", [])]) if action.startswith("range") else _Block("if", [])
            if block.action == "if":
                block.branches.append((action, []))
            stack[-1].inner.append(block)
            stack.append(block)
        else:
            stack[-1].inner.append(_Block(action))
    rest = template[last:]
    stack[-1].inner.append(rest.lstrip() if trim else rest)
    if len(stack) != 1:
        raise ValueError("an action of the template isn't ended")
    return stack[0]


def _render(nodes: Sequence[_Node], scope: _Scope) -> str:
    return "".join(node if isinstance(node, str) else _block(node, scope) for node in nodes)


def _block(block: _Block, scope: _Scope) -> str:
    if block.action == "range":
        places = range(len(scope.messages))
        inner = block.inner
        return "".join(_render(inner, _Scope(scope.system, scope.messages, n)) for n in places)
    if block.action == "if":
        for condition, nodes in block.branches:
            if not condition or _value(condition.removeprefix("if "), scope):
                return _render(nodes, scope)
        return ""
    return str(_value(block.action, scope))


def _value(text: str, scope: _Scope) -> str | int | bool:
    """A field, a literal, or a function with its arguments."""
    words = _words(text)
    if len(words) > 1:
        function, *arguments = words
        values = [_value(each, scope) for each in arguments]
        match function:
            case "eq":
                return values[0] == values[1]
            case "ne":
                return values[0] != values[1]
            case "and":
                return all(values)
            case "or":
                return any(values)
        raise ValueError(f"{function} is no function of these templates")
    word = words[0]
    if word.startswith("("):
        return _value(word[1:-1], scope)
    if word.startswith('"'):
        return shlex.split(word)[0] if word != '""' else ""
    if word.isdigit():
        return int(word)
    if word in (".System", "$.System"):
        return scope.system
    if scope.place is not None:
        message = scope.messages[scope.place]
        match word:
            case ".Role":
                return message.role
            case ".Content":
                return message.content
            case "$i":
                return scope.place
    raise ValueError(f"{word} is no field of these templates")


def _words(text: str) -> list[str]:
    """Splits at blanks outside of brackets and quotes."""
    return re.findall(r'\([^()]*\)|"[^"]*"|[^\s()"]+', text)
