"""Chat template parity: training, a result's folder and a server must see the same token ids.

A model that is good in the trainer and gibberish in the server was most often asked with another
template, or never told where to stop. So 20 dialogues that ship with the package are tokenized the
way that training does it, and by every other reader; the first id that differs is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shardtune.core.host.render_limit import TEMPLATE_ERRORS
from shardtune.data.chat_template import ChatTemplate
from shardtune.data.conversation import Conversation
from shardtune.data.encode import Encoder, Text
from shardtune.data.formats import plain_prompt
from shardtune.data.records import Unreadable
from shardtune.errors import Problem, RunError

TokenizeChat = Callable[[Conversation, bool], Sequence[int]]
"""Token ids of a conversation; True adds the generation prompt. Raises Unreadable where the
template refuses the conversation."""


@dataclass(frozen=True)
class ChatReader:
    """One way from messages to token ids, and the tokens at which it ends an answer."""

    name: str
    """As it stands in an error: `the folder merged/first`."""
    tokenize: TokenizeChat
    stops: frozenset[int]


@dataclass(frozen=True)
class TemplateParity:
    """What was compared."""

    compared: int
    """Dialogues whose ids were the same by every reader."""
    untrainable: Mapping[str, str]
    """Dialogues that training would refuse, and why; no reader is asked for these."""
    tokens: int


@cache
def parity_dialogues() -> Mapping[str, Conversation]:
    """The 20 dialogues, by name: system prompts, turns, tools, empty texts, unicode."""
    text = (files("shardtune.data") / "parity_dialogues.jsonl").read_text(encoding="utf-8")
    rows = map(json.loads, text.splitlines())
    return {row["name"]: Conversation(row["messages"], row.get("tools")) for row in rows}


def training_reader(tokenizer: Any, stops: frozenset[int]) -> ChatReader:
    """The training path: our template code and the tokenizer's engine, one whole text at once."""
    template, encoder = ChatTemplate(tokenizer), Encoder(tokenizer)
    has_template = bool(tokenizer.chat_template)

    def tokenize(conversation: Conversation, prompt: bool) -> Sequence[int]:
        if has_template:
            text = template.prompt(conversation) if prompt else _text(template, conversation)
        else:
            text = _plain(conversation, prompt)
        (tokens,) = encoder.encode([Text(text, None)], special=not has_template)
        return [int(each) for each in tokens.ids]

    return ChatReader("training", tokenize, stops)


def transformers_reader(name: str, tokenizer: Any, stops: frozenset[int]) -> ChatReader:
    """Plain transformers: what anybody gets who calls `apply_chat_template`."""

    def tokenize(conversation: Conversation, prompt: bool) -> Sequence[int]:
        if not tokenizer.chat_template:
            return list(tokenizer(_plain(conversation, prompt))["input_ids"])
        try:
            found = tokenizer.apply_chat_template(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=prompt,
                return_dict=True,
            )
        except TEMPLATE_ERRORS as error:
            raise Unreadable(f"the chat template refuses it: {error}") from None
        return list(found["input_ids"])

    return ChatReader(name, tokenize, stops)


def folder_reader(folder: Path) -> ChatReader:
    """The tokenizer and the stop tokens that plain transformers finds in a folder."""
    from transformers import AutoTokenizer, GenerationConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found = GenerationConfig.from_pretrained(folder).eos_token_id
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        fact = f"its tokenizer or generation_config.json can't be read: {reason}"
        raise RunError(Problem(str(folder), fact, "write the folder again")) from None
    stops = found if isinstance(found, list) else [found]
    known = frozenset(int(each) for each in stops if each is not None)
    return transformers_reader(f"the folder {folder.name}", tokenizer, known)


def require_parity(
    trained: ChatReader, others: Sequence[ChatReader], tokenizer: Any
) -> TemplateParity:
    """Refuses (RunError) unless every reader has the ids and the stop tokens of training.

    Each dialogue is compared twice: as a whole, and up to its last answer with the generation
    prompt, which is what a server sends to the model. `tokenizer` names ids in errors.
    """
    for other in others:
        if other.stops != trained.stops:
            by = f"training ends answers at {_named(trained.stops, tokenizer)}"
            fact = f"{by}, {other.name} at {_named(other.stops, tokenizer)}"
            raise RunError(Problem("stop tokens", fact, _FIX))
    untrainable: dict[str, str] = {}
    tokens = 0
    for name, whole in parity_dialogues().items():
        for conversation, prompt in ((whole, False), (whole.until(len(whole.messages) - 1), True)):
            try:
                expected = trained.tokenize(conversation, prompt)
            except Unreadable as error:
                untrainable[name] = error.reason
                break
            tokens += len(expected)
            for other in others:
                _compare(name, expected, other, conversation, prompt, tokenizer)
    compared = len(parity_dialogues()) - len(untrainable)
    if not compared:
        why = next(iter(untrainable.values()))
        fact = f"it can write none of the {len(untrainable)} dialogues; the first: {why}"
        raise RunError(Problem("chat template", fact, _FIX))
    return TemplateParity(compared, untrainable, tokens)


_FIX = "use the tokenizer, chat template and generation_config.json of the run's result folder"


def _compare(
    name: str,
    expected: Sequence[int],
    other: ChatReader,
    conversation: Conversation,
    prompt: bool,
    tokenizer: Any,
) -> None:
    try:
        found = other.tokenize(conversation, prompt)
    except Unreadable as error:
        fact = f"{name!r} is trained on, and {other.name} refuses it: {error.reason}"
        raise RunError(Problem("template parity", fact, _FIX)) from None
    for place, (ours, theirs) in enumerate(zip_longest(expected, found)):
        if ours != theirs:
            part = "the prompt of " if prompt else ""
            fact = (
                f"token {place} of {part}{name!r} is {_token(ours, tokenizer)} in training and "
                f"{_token(theirs, tokenizer)} by {other.name}"
            )
            raise RunError(Problem("template parity", fact, _FIX))


def _text(template: ChatTemplate, conversation: Conversation) -> str:
    (found,) = template.texts([conversation])
    if isinstance(found, Unreadable):
        raise found
    return found.text


def _plain(conversation: Conversation, prompt: bool) -> str:
    """A dialogue for a tokenizer without a template: its last question, as such runs train it."""
    if conversation.tools:
        raise Unreadable("without a chat template there are no tools")
    said = {message["role"]: message["content"] for message in conversation.messages}
    text = plain_prompt(said.get("user", ""), said.get("system", ""))
    return text if prompt else text + said["assistant"]


def _token(found: int | None, tokenizer: Any) -> str:
    if found is None:
        return "missing"
    return f"{found} ({tokenizer.convert_ids_to_tokens(found)!r})"


def _named(stops: frozenset[int], tokenizer: Any) -> str:
    return ", ".join(_token(each, tokenizer) for each in sorted(stops)) or "no token"
