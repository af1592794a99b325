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
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jinja2

from shardtune.core.host.render_limit import TEMPLATE_ERRORS, render_limit
from shardtune.data.conversation import REASONING, REASONING_KEYS, ChatMessage, Conversation
from shardtune.data.encode import Text
from shardtune.data.records import Unreadable

# Roles whose words a template must repeat.
REPEATED_ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
)
RESULT_ROLES = ("tool", "ipython")
THOUGHT_VARIABLES = ("enable_thinking", "thinking")
"""What templates call the choice whether an answer begins with reasoning."""
RESULT_TAGS = ("<tool_response>", "</tool_response>")
"""What Hermes' data has around a tool's result, and many templates write themselves."""
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
"""What stands before it in a turn is reasoning, which templates may drop."""

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
ASKED_OTHERWISE = "asks for an answer with"
"""How the reason begins where the generation prompt is no beginning of an answer."""
THOUGHTS = "reasoning beside the content"
INNER_THOUGHTS = "reasoning in the content"
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_THOUGHTFUL: ChatMessage = {**_ANSWER, REASONING: "BECAUSE"}
_INNER: ChatMessage = {**_ANSWER, "content": "<think>\nBECAUSE\n</think>\n\nANSWER"}
PROBES = {
    "a question and its answer": Conversation([_QUESTION, _ANSWER]),
    "system prompts": Conversation([_SYSTEM, _QUESTION, _ANSWER]),
    "tools": Conversation([_QUESTION, _ANSWER], _TOOLS),
    "tool calls": Conversation(_CALLING, _TOOLS),
    THOUGHTS: Conversation([_QUESTION, _THOUGHTFUL]),
    INNER_THOUGHTS: Conversation([_QUESTION, _INNER]),
}


class TemplateFault(Unreadable):
    """What the chat template can't write, whatever the row."""

    culprit = "template"


class ChatTemplate:
    """A tokenizer's chat template: conversations to texts with their trained spans."""

    def __init__(self, tokenizer: Any, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

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

    @cached_property
    def thought_setting(self) -> dict[str, bool]:
        """A value of a variable with which answers without reasoning begin as they are asked for;
        nothing where there is none."""
        turns = [Conversation([_QUESTION, _ANSWER] * count) for count in (1, 2)]
        for name in THOUGHT_VARIABLES:
            for value in (False, True):
                found = ChatTemplate(self._tokenizer, {name: value}).texts(turns)
                if all(isinstance(text, Text) for text in found):
                    return {name: value}
        return {}

    def thinks_with(self, setting: Mapping[str, bool]) -> bool:
        """Whether the template still writes answers with reasoning where its variables are set so:
        those with a field for it, or in the content."""
        asked = [PROBES[THOUGHTS], PROBES[INNER_THOUGHTS]]
        found = ChatTemplate(self._tokenizer, setting).texts(asked)
        return any(isinstance(text, Text) for text in found)

    def _masked(
        self, conversation: Conversation, whole: Rendered, around: list[tuple[Rendered, Rendered]]
    ) -> Text | Unreadable:
        try:
            return self._checked(conversation, whole, around)
        except Unreadable as error:
            return self._fault(conversation) or error

    def _checked(
        self, conversation: Conversation, whole: Rendered, around: list[tuple[Rendered, Rendered]]
    ) -> Text:
        """The same, raising Unreadable where something of the conversation is left out."""
        text = _raised(whole)
        _require_all(conversation, text)
        spans = []
        for turn, (before, after) in zip(conversation.trained, around, strict=True):
            start, end = self._span(conversation, turn, text, before, after)
            _require_whole_turn(conversation, turn, text[start:end], after)
            spans.append((start, end))
        if conversation.tools or any(
            message["role"] in RESULT_ROLES for message in conversation.messages
        ):
            asked = _outside(text, spans)
            _require_tools(conversation, asked)
            self._require_results(conversation, text, asked, spans)
        return Text(text, spans)

    def _require_results(
        self, conversation: Conversation, whole: str, asked: str, spans: Sequence[tuple[int, int]]
    ) -> None:
        """Raises if the template leaves out what a tool answered, which it may write as JSON, or
        writes it between the words of a turn (Gemma 4)."""
        for turn, message in enumerate(conversation.messages):
            content = message["content"]
            if message["role"] not in RESULT_ROLES or content.strip() in asked:
                continue
            named = f"turn {turn + 1} ({message['role']})"
            changed = self._text(conversation.replaced(turn, _other_than(content)))
            if changed == whole:
                raise Unreadable(f"the chat template leaves out {named}")
            first, last = _difference(whole, changed)
            if any(start < last and first < end for start, end in spans):
                raise Unreadable(f"the chat template writes {named} inside of an answer")

    def _fault(self, conversation: Conversation) -> TemplateFault | None:
        """Of the template that failed with this conversation, where not the row is to blame."""
        roles = {message["role"] for message in conversation.messages}
        calls = any(message.get("tool_calls") for message in conversation.messages)
        answers = [each for each in conversation.messages if each["role"] == "assistant"]
        has = {
            "system prompts": "system" in roles,
            "tools": bool(conversation.tools),
            "tool calls": calls or "tool" in roles,
            THOUGHTS: any(REASONING in answer for answer in answers),
            INNER_THOUGHTS: any(END_OF_THOUGHT in answer["content"] for answer in answers),
        }
        reasons = (self._probed[kind] for kind in PROBES if has.get(kind, True))
        return next((TemplateFault(reason) for reason in reasons if reason), None)

    @cached_property
    def _probed(self) -> dict[str, str]:
        """Why the template can't write each kind of conversation; nothing where it can."""
        return {kind: self._probe(kind) for kind in PROBES}

    def _probe(self, kind: str) -> str:
        probe = PROBES[kind]
        around = [
            (self._render_one(probe.until(turn), True), self._render_one(probe.until(turn + 1)))
            for turn in probe.trained
        ]
        try:
            self._checked(probe, self._render_one(probe), around)
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
        calls_alone = not content.strip() and bool(conversation.messages[turn].get("tool_calls"))
        if calls_alone:
            probe = conversation.with_other_arguments(turn)
        else:
            probe = conversation.replaced(turn, _other_than(content))
        first, last = _difference(whole, self._text(probe))
        if not calls_alone and (first >= last or whole[first:last].strip() not in content):
            raise Unreadable(f"the chat template's output for turn {turn + 1} can't be located")
        # The turn's own text when nothing follows it, and where its terminator starts there.
        alone = self._text(conversation.until(turn + 1))
        begin, end = _difference(alone, self._text(probe.until(turn + 1)))
        start = self._answer_start(
            conversation, turn, whole, before, first, alone[:begin], calls_alone
        )
        terminator = self._common_start(whole[last:], alone[end:]).rstrip()
        return start, last + len(terminator)

    def _answer_start(
        self,
        conversation: Conversation,
        turn: int,
        whole: str,
        before: Rendered,
        first: int,
        alone: str,
        calls_alone: bool,
    ) -> int:
        """Where the model's part of a turn starts, which has its own words from `first` on; where
        nothing follows the turn, `alone` stands before them."""
        if isinstance(before, str) and whole.startswith(before):
            return len(before)
        if self._prompt and whole[:first].endswith(self._prompt):
            return first
        if isinstance(before, str) and alone.startswith(before):
            # What is written earlier may move (Mistral's tools stand before the last question).
            start = first - len(alone) + len(before)
            shared = _common_length(whole[:start][::-1], before[::-1])
            asked = conversation.messages[turn - 1]["content"].strip() if turn else ""
            if (
                whole[start:first] == alone[len(before) :]
                and shared >= max(len(self._prompt), 1)
                and (self._prompt or asked in before[len(before) - shared :])
            ):
                return start
        # The prompt opens a line of reasoning, say, which turns of the past don't show. That is
        # how the model will see them; but its next answer must start as it is asked for.
        is_past = any(message["role"] == "user" for message in conversation.messages[turn + 1 :])
        if is_past and isinstance(before, str) and before.startswith(whole[:first]):
            return first
        if is_past and self._past_prompt:  # turns before it may be written otherwise, too
            _, found, lead = whole[:first].rpartition(self._past_prompt)
            if found and (not lead or (calls_alone and alone.endswith(lead))):
                return first - len(lead)
        raise Unreadable(
            f"the chat template {ASKED_OTHERWISE} {self._prompt!r}, but starts turn "
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

    @cached_property
    def _past_prompt(self) -> str:
        """What of it stands before an answer of the past; nothing where that starts otherwise."""
        try:
            asked = self._text(Conversation([_QUESTION]), prompt=True)
            past = self._text(Conversation([_QUESTION, _ANSWER, _QUESTION]))
        except Unreadable:
            return ""
        begun, _, _ = past.partition(_ANSWER["content"])
        return begun[len(asked) - len(self._prompt) :] if asked.startswith(begun) else ""

    @cached_property
    def _reasoning_key(self) -> str:
        """What the template calls a turn's reasoning beside its content; the most common name where
        it knows none."""
        return next(filter(self._knows_reasoning, REASONING_KEYS), REASONING)

    def _knows_reasoning(self, key: str) -> bool:
        try:
            (text,) = self._write([_reasoning_under(key, PROBES[THOUGHTS].messages)], None, False)
        except TEMPLATE_ERRORS:
            return False  # told where the template is asked for a row
        return _THOUGHTFUL[REASONING] in text

    @cached_property
    def _tags_results(self) -> bool:
        """Whether the template writes tags around a tool's result."""
        try:
            (text,) = self._write([_CALLING], _TOOLS, False)
        except TEMPLATE_ERRORS:
            return False
        return text.partition("RESULT")[0].rstrip().endswith(RESULT_TAGS[0])

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

    def _render_one(self, conversation: Conversation, prompt: bool = False) -> Rendered:
        try:
            return self._apply([conversation.messages], conversation.tools, prompt)[0]
        except TEMPLATE_ERRORS as error:
            return Unreadable(f"the chat template refuses it: {_told(error)}")

    def _apply(
        self, messages: list[list[ChatMessage]], tools: list[Any] | None, prompt: bool
    ) -> list[str]:
        if any(REASONING in message for turns in messages for message in turns):
            messages = [_reasoning_under(self._reasoning_key, turns) for turns in messages]
        if any(_is_tagged(each) for turns in messages for each in turns) and self._tags_results:
            messages = [[_untagged(message) for message in turns] for turns in messages]
        return self._write(messages, tools, prompt)

    def _write(
        self, messages: list[list[ChatMessage]], tools: list[Any] | None, prompt: bool
    ) -> list[str]:
        with render_limit(len(messages)):
            texts: list[str] = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._settings,
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


def _require_whole_turn(
    conversation: Conversation, turn: int, written: str, alone: Rendered
) -> None:
    """Raises if a turn to learn lacks its calls, whose names the tools may have as well, or its
    reasoning. That of the past may be left out, but not where nothing follows the turn."""
    message = conversation.messages[turn]
    for call in message.get("tool_calls") or ():
        if call.get("function", call).get("name", "") not in written:
            raise Unreadable(f"the chat template leaves out the tool calls of turn {turn + 1}")
    inner = message["content"].rpartition(END_OF_THOUGHT)[0].strip().removeprefix(THOUGHT)
    for thought in (inner.strip(), message.get(REASONING, "").strip()):
        if thought not in written and not (isinstance(alone, str) and thought in alone):
            raise Unreadable(f"the chat template leaves out the reasoning of turn {turn + 1}")


def _require_tools(conversation: Conversation, asked: str) -> None:
    """Raises if the template leaves out a tool that it was given."""
    for tool in conversation.tools or ():
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if name is not None and str(name) not in asked:
            raise Unreadable("the chat template leaves out the tools")


def _outside(whole: str, spans: Sequence[tuple[int, int]]) -> str:
    """What is not trained: calls, say, have the names of tools as well."""
    edges = [0, *(edge for span in spans for edge in span), len(whole)]
    return "".join(whole[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


def _reasoning_under(key: str, turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The turns with their reasoning under another name."""
    return [
        {key if name == REASONING else name: value for name, value in turn.items()}
        for turn in turns
    ]


def _is_tagged(message: ChatMessage) -> bool:
    """Whether this is a tool's result with tags around it."""
    content = message["content"].strip() if message["role"] in RESULT_ROLES else ""
    return content.startswith(RESULT_TAGS[0]) and content.endswith(RESULT_TAGS[1])


def _untagged(message: ChatMessage) -> ChatMessage:
    """The message without the tags, which the template writes."""
    if not _is_tagged(message):
        return message
    opening, closing = RESULT_TAGS
    inner = message["content"].strip().removeprefix(opening).removesuffix(closing)
    return {**message, "content": inner.strip("\n")}


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
