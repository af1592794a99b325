"""Conversations written by the tokenizer's own chat template, and masked.

What is trained of an assistant's turn is what the model has to write itself: everything after the
prompt that the template gives it (`add_generation_prompt`), up to and with the turn's terminator.

Where that lies is found by rendering, not by knowing templates: the conversation up to a turn is
rendered with the generation prompt, and up to and with the turn; both are normally beginnings of
the whole. Some templates write a turn otherwise once others follow it (they drop the reasoning, or
end only the last turn with the end-of-text token). There the turn is replaced by another text: what
doesn't change lies outside of it. If that finds no answer either, the row is bad, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jinja2

from shardtune.core.host.render_limit import render_limit
from shardtune.data.conversation import ChatMessage, Conversation
from shardtune.data.encode import Text
from shardtune.data.records import Unreadable

# Roles whose words a template must repeat.
REPEATED_ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
)
END_OF_THOUGHT = "</think>"
"""What stands before it in a turn is reasoning, which templates may drop."""

# A template is a program of somebody else: what it may raise when a conversation isn't to its
# liking, on purpose or because it looks for a key that isn't there.
TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip

Rendered = str | Unreadable

# The plainest conversations of their kind: a template that fails with one can't write the kind.
_QUESTION: ChatMessage = {"role": "user", "content": "QUESTION"}
_ANSWER: ChatMessage = {"role": "assistant", "content": "ANSWER"}
_SYSTEM: ChatMessage = {"role": "system", "content": "SYSTEM PROMPT"}
_NOTHING: ChatMessage = {"type": "object", "properties": {}}
_FUNCTION: ChatMessage = {"name": "CALLED", "description": "a call", "parameters": _NOTHING}
_CALL: ChatMessage = {
    "id": "call00001",  # nine letters and digits, as Mistral's templates want it
    "type": "function",
    "function": {"name": "CALLED", "arguments": {}},
}
_CALLING: list[ChatMessage] = [
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "CALLED", "tool_call_id": "call00001", "content": "RESULT"},
    _ANSWER,
]
PROBES = {
    "a question and its answer": Conversation([_QUESTION, _ANSWER]),
    "system prompts": Conversation([_SYSTEM, _QUESTION, _ANSWER]),
    "tool calls": Conversation(_CALLING, [{"type": "function", "function": _FUNCTION}]),
}


class TemplateFault(Unreadable):
    """What the chat template can't write, whatever the row."""

    culprit = "template"


class ChatTemplate:
    """A tokenizer's chat template: conversations to texts with their trained spans."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def texts(self, conversations: Sequence[Conversation]) -> list[Text | Unreadable]:
        """The text of each conversation, or why the template can't write it."""
        # All renderings of a batch in three calls: the whole, and before and after each turn.
        turns = [(one, turn) for one in conversations for turn in one.trained]
        inner = [(one, turn) for one, turn in turns if turn + 1 < len(one.messages)]
        wholes = self._render(conversations, prompt=False)
        befores = iter(self._render([one.until(turn) for one, turn in turns], prompt=True))
        afters = iter(self._render([one.until(turn + 1) for one, turn in inner], prompt=False))
        return [
            self._masked(
                one,
                whole,
                [
                    # After the last message nothing is cut off: that is the whole again.
                    (next(befores), next(afters) if turn + 1 < len(one.messages) else whole)
                    for turn in one.trained
                ],
            )
            for one, whole in zip(conversations, wholes, strict=True)
        ]

    def prompt(self, conversation: Conversation) -> str:
        """What stands before an answer; raises Unreadable where the template can't write it."""
        return self._text(conversation, prompt=True)

    def _masked(
        self, conversation: Conversation, whole: Rendered, around: list[tuple[Rendered, Rendered]]
    ) -> Text | Unreadable:
        try:
            text = _raised(whole)
            _require_all(conversation, text)
            spans = [
                self._span(conversation, turn, text, before, after)
                for turn, (before, after) in zip(conversation.trained, around, strict=True)
            ]
        except Unreadable as error:
            return self._fault(conversation) or error
        return Text(text, spans)

    def _fault(self, conversation: Conversation) -> TemplateFault | None:
        """Of the template that failed with this conversation, where not the row is to blame."""
        roles = {message["role"] for message in conversation.messages}
        calls = any(message.get("tool_calls") for message in conversation.messages)
        has = {"system prompts": "system" in roles, "tool calls": calls or "tool" in roles}
        reasons = (self._probed[kind] for kind in PROBES if has.get(kind, True))
        return next((TemplateFault(reason) for reason in reasons if reason), None)

    @cached_property
    def _probed(self) -> dict[str, str]:
        """Why the template can't write each kind of conversation; nothing where it can."""
        return {kind: self._probe(kind) for kind in PROBES}

    def _probe(self, kind: str) -> str:
        try:
            _require_all(PROBES[kind], self._text(PROBES[kind]))
        except Unreadable as error:
            why = error.reason.removeprefix("the chat template ").removeprefix("refuses it: ")
            return f"can't write {kind}: {why}"
        return ""

    def _span(
        self,
        conversation: Conversation,
        turn: int,
        whole: str,
        before: Rendered,
        after: Rendered,
    ) -> tuple[int, int]:
        """Where the trained part of a turn lies in the whole."""
        if (
            isinstance(before, str)
            and isinstance(after, str)
            and whole.startswith(before)
            and whole.startswith(after)
            and len(before) < (end := len(after.rstrip()))
        ):
            return len(before), end
        return self._probed_span(conversation, turn, whole, before)

    def _probed_span(
        self, conversation: Conversation, turn: int, whole: str, before: Rendered
    ) -> tuple[int, int]:
        """The same for a turn that the template writes otherwise when others follow it."""
        content = conversation.messages[turn]["content"]
        probe = conversation.replaced(turn, _other_than(content))
        first, last = _difference(whole, self._text(probe))
        if first >= last or whole[first:last].strip() not in content:
            raise Unreadable(f"the chat template's output for turn {turn + 1} can't be located")
        start = self._answer_start(conversation, turn, whole, before, first)
        # The turn's own text when nothing follows it, and where its terminator starts there.
        alone = self._text(conversation.until(turn + 1))
        _, end = _difference(alone, self._text(probe.until(turn + 1)))
        terminator = self._common_start(whole[last:], alone[end:]).rstrip()
        return start, last + len(terminator)

    def _answer_start(
        self, conversation: Conversation, turn: int, whole: str, before: Rendered, first: int
    ) -> int:
        """Where the model's part of a turn starts whose content starts at `first`."""
        if isinstance(before, str) and whole.startswith(before):
            return len(before)
        if self._prompt and whole[:first].endswith(self._prompt):
            return first
        # The prompt opens a line of reasoning, say, which turns of the past don't show. That is
        # how the model will see them; but its next answer must start as it is asked for.
        is_past = any(message["role"] == "user" for message in conversation.messages[turn + 1 :])
        if is_past and isinstance(before, str) and before.startswith(whole[:first]):
            return first
        raise Unreadable(
            f"the chat template asks for an answer with {self._prompt!r}, but starts turn "
            f"{turn + 1} with {whole[max(0, first - 24) : first]!r}"
        )

    def _common_start(self, one: str, other: str) -> str:
        """The common beginning of both, in which no special token is cut in two."""
        common = []
        for ours, theirs in zip(
            self._units.finditer(one), self._units.finditer(other), strict=False
        ):
            if ours.group() != theirs.group():
                break
            common.append(ours.group())
        return "".join(common)

    @cached_property
    def _units(self) -> re.Pattern[str]:
        """Matches a special token or a single character."""
        tokens = sorted(self._tokenizer.get_added_vocab(), key=len, reverse=True)
        return re.compile("|".join([*map(re.escape, tokens), "."]), re.DOTALL)

    @cached_property
    def _prompt(self) -> str:
        """What the template writes to ask for an answer; some write nothing."""
        question = Conversation([{"role": "user", "content": "x"}])
        asked, plain = self._text(question, prompt=True), self._text(question)
        return asked[len(self._common_start(asked, plain)) :]

    def _text(self, conversation: Conversation, prompt: bool = False) -> str:
        return _raised(self._render_one(conversation, prompt))

    def _render(self, conversations: Sequence[Conversation], prompt: bool) -> list[Rendered]:
        """Each conversation as text; `prompt` asks for an answer at its end."""
        if not conversations:
            return []
        try:
            if not any(one.tools for one in conversations):  # tools are given once for a call
                return list(self._apply([one.messages for one in conversations], None, prompt))
        except TEMPLATE_ERRORS:
            pass  # one of them; now find out which
        return [self._render_one(one, prompt) for one in conversations]

    def _render_one(self, conversation: Conversation, prompt: bool) -> Rendered:
        try:
            return self._apply([conversation.messages], conversation.tools, prompt)[0]
        except TEMPLATE_ERRORS as error:
            return Unreadable(f"the chat template refuses it: {_told(error)}")

    def _apply(
        self, messages: list[list[ChatMessage]], tools: list[Any] | None, prompt: bool
    ) -> list[str]:
        with render_limit(len(messages)):
            texts: list[str] = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        return texts


def _require_all(conversation: Conversation, whole: str) -> None:
    """Raises if the template leaves out words of a message: it must not do so in silence."""
    for number, message in enumerate(conversation.messages, 1):
        content = message["content"].strip()
        if message["role"] == "assistant":
            content = content.rpartition(END_OF_THOUGHT)[2].strip()
        if message["role"] in REPEATED_ROLES and content not in whole:
            raise Unreadable(f"the chat template leaves out turn {number} ({message['role']})")
        for call in message.get("tool_calls") or ():
            name = call.get("function", call).get("name", "") if isinstance(call, dict) else ""
            if not name or str(name) not in whole:
                raise Unreadable(f"the chat template leaves out the tool calls of turn {number}")


def _other_than(content: str) -> str:
    """A content that differs from this one in its first and in its last character."""
    stripped = content.strip()
    edges = {stripped[:1], stripped[-1:], stripped.rpartition(END_OF_THOUGHT)[2].strip()[:1]}
    return next(letter for letter in "abcd" if letter not in edges)


def _difference(one: str, other: str) -> tuple[int, int]:
    """The stretch of `one` outside of which both are the same."""
    first = _common_length(one, other)
    room = min(len(one), len(other)) - first
    return first, len(one) - min(_common_length(one[::-1], other[::-1]), room)


def _common_length(one: str, other: str) -> int:
    """How many characters both start with, by halving: comparing slices is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _raised(rendered: Rendered) -> str:
    if isinstance(rendered, Unreadable):
        raise rendered
    return rendered


def _told(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"
