"""Conversations as people store them: OpenAI's form, ShareGPT's, objects written as JSON text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shardtune.data.records import Unreadable
from shardtune.errors import did_you_mean

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user",
    "prompter": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "model": "assistant", "tool": "tool", "function": "tool",
    "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "ipython": "ipython", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
"""The names that data sets give to speakers, and what chat templates call them."""
CALLS = ("function_call", "tool_call")
"""Speakers whose words are a call, as ShareGPT's files have it."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""What data sets and chat templates call an assistant's reasoning beside its content."""
REASONING = REASONING_KEYS[0]

MEDIA = ("image", "audio", "video")

ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages with the roles and keys that chat templates expect."""

    messages: list[ChatMessage]
    tools: list[Any] | None = None

    @property
    def trained(self) -> list[int]:
        """The turns to learn; `weight: 0` excepts one, as in OpenAI's files, `train: false`, as in
        Axolotl's, or `loss: false`, as in ms-swift's."""
        return [
            place
            for place, message in enumerate(self.messages)
            if message["role"] == "assistant"
            and message.get("weight", 1) != 0
            and message.get("train") is not False
            and message.get("loss") is not False
        ]

    def until(self, end: int) -> Conversation:
        return Conversation(self.messages[:end], self.tools)

    def replaced(self, turn: int, content: str) -> Conversation:
        messages = list(self.messages)
        messages[turn] = {**messages[turn], "content": content}
        return Conversation(messages, self.tools)

    def with_other_arguments(self, turn: int) -> Conversation:
        """The same with other arguments in the first call of a turn."""
        messages = list(self.messages)
        first, *others = messages[turn]["tool_calls"]
        function = first["function"]
        arguments = {} if function["arguments"] else {"a": "b"}
        changed = {**first, "function": {**function, "arguments": arguments}}
        messages[turn] = {**messages[turn], "tool_calls": [changed, *others]}
        return Conversation(messages, self.tools)


def read_conversation(turns: Any, tools: Any = None, system: Any = None) -> Conversation:
    """A conversation in OpenAI's or in ShareGPT's form; raises Unreadable for anything else.

    `system` is a system prompt that stands beside the turns, in a column of its own. What should be
    a list or an object may be JSON text: a table's column has one type, so people write it so.
    """
    turns = _structure(turns, "the turns are")
    if not isinstance(turns, list) or not turns:
        raise Unreadable("the turns are not a list" if turns else "there are no turns")
    messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise Unreadable("no assistant turn, so there is nothing to learn")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, read_tools(tools))


def read_tools(value: Any) -> list[Any] | None:
    """The functions that a model may call; None where there are none."""
    tools = _structure(value, "'tools' is")
    if tools and not isinstance(tools, list):
        raise Unreadable("'tools' is not a list")
    return [_tool(tool) for tool in tools or ()] or None


def _tool(value: Any) -> Any:
    """A tool as servers give it to chat templates: a function in its wrapping."""
    tool = _structure(value, "a tool is")
    if not isinstance(tool, dict) or "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    function = {key: inner for key, inner in tool.items() if (key, inner) != ("type", "function")}
    return {"type": "function", "function": function}


def _structure(value: Any, what: str) -> Any:
    """The value, or what it stands for where it is JSON text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Unreadable(f"{what} text, but no JSON (json.dumps writes it)") from None


def _message(turn: Any, number: int) -> ChatMessage:
    if not isinstance(turn, dict):
        raise Unreadable(f"turn {number} is not an object")
    # A table gives every row the keys of all the others, with nothing in them.
    message = {key: value for key, value in turn.items() if value is not None}
    if "from" in message and "role" not in message:
        message["role"] = message.pop("from")
    if "value" in message and "content" not in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str):
        wanted = "'role' and 'content', or 'from' and 'value'"
        raise Unreadable(f"turn {number} has {_listed(turn)}, but a turn has {wanted}")
    if role.lower() not in ROLES:
        near = did_you_mean(role.lower(), ROLES)
        hint = f"did you mean {near!r}?" if near else f"known are {', '.join(ROLES)}"
        raise Unreadable(f"turn {number} has the unknown role {role!r}: {hint}")
    message["role"] = ROLES[role.lower()]
    if message.get("weight", 1) not in (0, 1):
        weight = message["weight"]
        raise Unreadable(
            f"turn {number} has the weight {weight!r}, and a turn is learnt (1) or not (0)"
        )
    if role.lower() in CALLS:
        message["tool_calls"], message["content"] = message.pop("content", None), ""
    elif "function_call" in message and "tool_calls" not in message:  # OpenAI's earlier form
        message["tool_calls"] = message.pop("function_call")
    if message.get("tool_calls"):
        message["tool_calls"] = _calls(message["tool_calls"], number)
    reasoning = [message.pop(key, None) for key in REASONING_KEYS]
    if thought := next((each for each in reasoning if isinstance(each, str) and each.strip()), ""):
        message[REASONING] = thought
    message["content"] = content = _content(message, number)
    if message["role"] == "assistant" and not content.strip() and not message.get("tool_calls"):
        raise Unreadable(f"turn {number} (assistant) is empty")
    return message


def _calls(value: Any, number: int) -> list[Any]:
    """Tool calls as chat templates expect them: names with arguments that are objects."""
    found = _structure(value, f"the tool calls of turn {number} are")
    calls = found if isinstance(found, list) else [found]
    return [_call(call, number) for call in calls]


def _call(call: Any, number: int) -> dict[str, Any]:
    call = _structure(call, f"a tool call of turn {number} is")
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unreadable(f"turn {number} has a tool call without a name")
    named = f"the arguments of the tool call {function['name']!r} in turn {number} are"
    arguments = _structure(function.get("arguments", {}), named)
    if arguments is not None and not isinstance(arguments, dict):
        raise Unreadable(f"{named} no object")
    around = {key: value for key, value in call.items() if key not in ("function", *function)}
    return {"type": "function", **around, "function": {**function, "arguments": arguments or {}}}


def _content(message: ChatMessage, number: int) -> str:
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if not isinstance(content, str):
        what = "no content" if content is None else f"content of type {type(content).__name__}"
        raise Unreadable(f"turn {number} ({message['role']}) has {what}, not text")
    if "\0" in content:
        raise Unreadable(f"turn {number} ({message['role']}) holds a NUL character")
    return content


def _part(part: Any, number: int) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    kind = str(part.get("type", "")) if isinstance(part, dict) else ""
    if any(medium in kind for medium in MEDIA):
        raise Unreadable(f"turn {number} has a part of type {kind!r}, and only text is trained")
    if not isinstance(text, str):
        raise Unreadable(f"turn {number} has a part that is not text")
    return text


def _listed(keys: dict[str, Any]) -> str:
    return ", ".join(map(repr, list(keys)[:8])) or "no keys"
