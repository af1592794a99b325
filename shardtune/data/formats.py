"""Rows to documents: what each format takes from a row, and which tokens of it are trained."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtune.core.model.chat_templates import TEMPLATE_KEY, TEMPLATE_TOKENS
from shardtune.core.step import IGNORED
from shardtune.data.chat_template import ChatTemplate
from shardtune.data.control_tokens import AS_TOKENS, ControlTokens
from shardtune.data.conversation import Conversation, read_conversation, read_tools
from shardtune.data.data_file import TURNS
from shardtune.data.encode import Encoder, Text, Tokens
from shardtune.data.records import BadRow, SourceRecord, Unreadable
from shardtune.errors import DataError, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardtune.config.job import Columns, DataSection, Source


MASK = "attention_mask"
"""The column in which tokenizers say which ids are no padding."""
HISTORY = "history"
"""The column of an instruction's earlier turns."""


class Missing(Unreadable):
    """A row lacks a column that it needs."""

    def __init__(self, column: str) -> None:
        super().__init__(f"no column {column!r}")
        self.missing = column


class RowFormat(ABC):
    """Reads rows of one format."""

    required: tuple[tuple[str, ...], ...]
    """Columns that every row has to have; where there are several names, one of them."""
    named: tuple[str, ...] = ()
    """Columns that a row may lack, but that the job names itself: some row has to have them."""
    can_split: bool = False
    """Whether a row may go on in another document: it is one text, not a question and an answer."""
    settings: tuple[str, ...]
    """What of the source's settings decides the result, for the cache's key."""
    template: ChatTemplate | None = None
    """What writes the rows; None where no chat template does."""
    control: ControlTokens = AS_TOKENS
    """What to do with control tokens in the text of rows."""

    def documents(self, rows: Sequence[SourceRecord]) -> list[Tokens | BadRow]:
        """A document, or the reason why there is none, for each row."""
        found = [self._try_to_read(row.value) for row in rows]
        good = [one for one in found if not isinstance(one, Unreadable)]
        encoded = iter(self._encode(good))
        documents: list[Tokens | BadRow] = []
        for row, one in zip(rows, found, strict=True):
            result: Tokens | Unreadable = one if isinstance(one, Unreadable) else next(encoded)
            if isinstance(result, Unreadable):
                missing = result.missing if isinstance(result, Missing) else ""
                documents.append(BadRow(row.number, result.reason, None, missing, result.culprit))
            else:
                documents.append(replace(result, content=_hash(one)))
        return documents

    def _try_to_read(self, row: dict[str, Any]) -> Any:
        try:
            return self.control.apply(self._read(row))
        except Unreadable as error:
            return error

    @abstractmethod
    def _read(self, row: dict[str, Any]) -> Any:
        """What `_encode` needs of the row; raises Unreadable if it isn't there."""

    @abstractmethod
    def _encode(self, found: list[Any]) -> Sequence[Tokens | Unreadable]:
        """The documents of many rows at once, which is much faster than one by one."""


def _hash(found: Any) -> int:
    """A hash of what a format has read of a row, which is the same under any tokenizer."""
    said = found.ids.tobytes() if isinstance(found, Tokens) else repr(found).encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")


def require_offsets(source: Source, tokenizer: Any) -> None:
    """Refuses a tokenizer without the engine that encodes many texts and keeps their offsets."""
    if not getattr(tokenizer, "is_fast", False):
        fact = f"the tokenizer ({type(tokenizer).__name__}) can't tell which characters a token is"
        fix = "use a model whose tokenizer has a tokenizer.json"
        raise DataError(Problem(source.path, fact, fix))


def make_format(source: Source, tokenizer: Any, control: ControlTokens = AS_TOKENS) -> RowFormat:
    """The format that a source asks for; raises DataError if the tokenizer can't serve it."""
    require_offsets(source, tokenizer)
    columns = source.columns
    if source.format == "source_target":
        fact = "format: source_target is for models with an encoder; this one is a decoder alone"
        fix = "use format: instruction, with columns: {instruction: SOURCE, output: TARGET}"
        raise DataError(Problem(source.path, fact, fix))
    if source.format == "completion":
        return _Completion(tokenizer, columns, control)
    if source.format == "pretokenized":
        return _Pretokenized(tokenizer, columns)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if (source.format == "chat" or source.template == "chat") and not has_template:
        fact = "needs a chat template, but the tokenizer has none"
        fix = f"use an instruct model, or set {TEMPLATE_KEY}: a file, or one of "
        fix += ", ".join(TEMPLATE_TOKENS)
        fix += ", or set template: plain" if source.format == "instruction" else ""
        raise DataError(Problem(source.path, fact, fix))
    if source.format == "chat":
        return _Chat(tokenizer, columns, control)
    if has_template and source.template != "plain":
        return _ChatInstruction(tokenizer, columns, control)
    return _PlainInstruction(tokenizer, columns, control)


class _Completion(RowFormat):
    """A text, and the end-of-text token after it. All of it is trained."""

    can_split = True

    def __init__(self, tokenizer: Any, columns: Columns, control: ControlTokens) -> None:
        self.control = control
        self._encoder = Encoder(tokenizer, control)
        self._end = tokenizer.eos_token_id
        self._text = columns.text
        self.required = ((self._text,),)
        self.settings = ("completion", self._text)

    def _read(self, row: dict[str, Any]) -> str:
        return text_column(row, self._text)

    def _encode(self, found: list[str]) -> list[Tokens]:
        texts = [Text(text, None) for text in found]
        return self._encoder.encode(texts, special=True, end=self._end)


class _Chat(RowFormat):
    """Turns, through the tokenizer's chat template. The assistant's are trained."""

    def __init__(self, tokenizer: Any, columns: Columns, control: ControlTokens) -> None:
        self.control = control
        self._encoder = Encoder(tokenizer, control)
        self.template: ChatTemplate = ChatTemplate(tokenizer)
        self._columns = TURNS if columns.messages == "auto" else (columns.messages,)
        self.required = (self._columns,)
        self._system = columns.system
        self.settings = ("chat", *self._columns, self._system)

    def _read(self, row: dict[str, Any]) -> Conversation:
        present = [column for column in self._columns if column in row]
        if not present:
            raise Missing(self._columns[0])
        turns = next((row[column] for column in present if row[column] is not None), None)
        tools = row.get("tools") or earlier_tools(row)
        return read_conversation(turns, tools, row.get(self._system))

    def _encode(self, found: list[Conversation]) -> list[Tokens | Unreadable]:
        texts = self.template.texts(found)
        good = [text for text in texts if isinstance(text, Text)]
        # The template writes the special tokens itself.
        tokens = iter(self._encoder.encode(good, special=False))
        return [next(tokens) if isinstance(text, Text) else text for text in texts]


class _ChatInstruction(_Chat):
    """An instruction and its answer, as a conversation of two turns."""

    def __init__(self, tokenizer: Any, columns: Columns, control: ControlTokens) -> None:
        super().__init__(tokenizer, columns, control)
        self._names = columns
        self.required = ((columns.instruction,), (columns.output,))
        self.named = renamed_columns(columns, "input", "system")
        self.settings = ("instruction", "chat", *instruction_settings(columns))

    def _read(self, row: dict[str, Any]) -> Conversation:
        system, question, answer = instruction_row(row, self._names)
        turns = [{"role": "system", "content": system}] if system else []
        for asked, said in (*earlier_turns(row), (question, answer)):
            turns.append({"role": "user", "content": asked})
            turns.append({"role": "assistant", "content": said})
        return Conversation(turns, given_tools(row))


class _PlainInstruction(RowFormat):
    """An instruction and its answer under plain headings, for a tokenizer without template."""

    def __init__(self, tokenizer: Any, columns: Columns, control: ControlTokens) -> None:
        self.control = control
        self._encoder = Encoder(tokenizer, control)
        self._end = tokenizer.eos_token_id
        self._names = columns
        self.required = ((columns.instruction,), (columns.output,))
        self.named = renamed_columns(columns, "input", "system")
        self.settings = ("instruction", "plain", *instruction_settings(columns))

    def _read(self, row: dict[str, Any]) -> Text:
        system, question, answer = instruction_row(row, self._names)
        require_template_for(row)
        prompt = plain_prompt(question, system)
        return Text(prompt + answer, [(len(prompt), len(prompt) + len(answer))])

    def _encode(self, found: list[Text]) -> list[Tokens]:
        return self._encoder.encode(found, special=True, end=self._end)


def plain_prompt(question: str, system: str = "") -> str:
    """What stands before an answer where no chat template is used."""
    opening = f"{system}\n\n" if system else ""
    return f"{opening}## Task\n{question}\n\n## Answer\n"


def plain_dialogue(turns: Sequence[Mapping[str, Any]]) -> str:
    """The last question of a dialogue where no chat template is used: such runs train one question
    with its answer."""
    said = {str(turn["role"]): str(turn["content"]) for turn in turns}
    return plain_prompt(said.get("user", ""), said.get("system", ""))


def learnt_plain(data: DataSection, tokenizer: Any) -> bool:
    """Whether a run learnt its instructions under plain headings."""
    sources = [source for source in data.train if source.format == "instruction"]
    return any(
        source.template == "plain" or (source.template == "auto" and not tokenizer.chat_template)
        for source in sources
    )


class _Pretokenized(RowFormat):
    """Token ids, with or without labels."""

    can_split = True

    def __init__(self, tokenizer: Any, columns: Columns) -> None:
        self._ids = columns.input_ids
        self._labels = columns.labels
        self._vocabulary = len(tokenizer)
        self.required = ((self._ids,),)
        self.named = renamed_columns(columns, "labels")
        self.settings = ("pretokenized", self._ids, self._labels)

    def _read(self, row: dict[str, Any]) -> Tokens:
        ids = integer_column(row, self._ids)
        if ids.min() < 0 or ids.max() >= self._vocabulary:
            wrong = int(ids[(ids < 0) | (ids >= self._vocabulary)][0])
            last = self._vocabulary - 1
            raise Unreadable(f"{self._ids!r} holds {wrong}, but token ids go from 0 to {last}")
        shown = shown_places(row, ids, self._ids)
        if row.get(self._labels) is None:
            return Tokens(ids[shown].astype(np.int32), np.ones(int(shown.sum()), dtype=np.bool_))
        labels = integer_column(row, self._labels)
        if len(labels) != len(ids):
            raise Unreadable(f"{len(ids)} {self._ids}, but {len(labels)} {self._labels}")
        trained = labels != IGNORED
        wrong_at = np.flatnonzero(trained & (labels != ids))
        if len(wrong_at):
            place = int(wrong_at[0])
            raise Unreadable(
                f"{self._labels!r} holds {labels[place]} at place {place} where {self._ids!r} "
                f"holds {ids[place]}; a label is the token at its own place, or {IGNORED}"
            )
        return Tokens(ids[shown].astype(np.int32), trained[shown])

    def _encode(self, found: list[Tokens]) -> list[Tokens]:
        return found


def instruction_row(row: dict[str, Any], columns: Columns) -> tuple[str, str, str]:
    """System prompt, question and answer of an instruction row."""
    question = text_column(row, columns.instruction)
    material = ""
    if columns.input != columns.instruction:  # `instruction: input` asks it once, not twice
        material = text_column(row, columns.input, optional=True)
    if material.strip():
        question = f"{question}\n\n{material}"
    system = text_column(row, columns.system, optional=True)
    return system if system.strip() else "", question, text_column(row, columns.output)


def earlier_turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Questions and answers that came before the row's own, as LLaMA-Factory's files have them: a
    list of pairs in the column `history`. Anything but a list in it is something else."""
    found = row.get(HISTORY)
    if not isinstance(found, list):
        return []
    for number, pair in enumerate(found, 1):
        texts = [each for each in pair if isinstance(each, str)] if isinstance(pair, list) else []
        if len(texts) != 2 or len(pair) != 2 or not all(map(str.strip, texts)):
            raise Unreadable(f"{HISTORY!r} holds no pair of a question and an answer at {number}")
    return [(asked, said) for asked, said in found]


def earlier_tools(row: dict[str, Any]) -> list[Any] | None:
    """Functions as OpenAI's files had them before there were tools."""
    found = row.get("functions")
    return found if isinstance(found, list) else None


def given_tools(row: dict[str, Any]) -> list[Any] | None:
    """The functions that an answer may call (xLAM has them beside a question). Anything but a list
    of functions in the column `tools` is something else."""
    try:
        found = read_tools(row.get("tools"))
    except Unreadable:
        return None
    functions = all(isinstance(tool, dict) and "function" in tool for tool in found or ())
    return found if functions else None


def require_template_for(row: dict[str, Any]) -> None:
    """Where a row becomes one question and its answer, turns before it and tools would be lost."""
    for column, held, what in (
        (HISTORY, earlier_turns(row), "earlier turns"),
        ("tools", given_tools(row), "functions"),
    ):
        if held:
            fact = f"{column!r} holds {what}, which take a chat template ({TEMPLATE_KEY})"
            raise Unreadable(fact)


def instruction_settings(columns: Columns) -> tuple[str, ...]:
    return columns.instruction, columns.input, columns.output, columns.system


def renamed_columns(columns: Columns, *keys: str) -> tuple[str, ...]:
    """What the job calls these columns, where it doesn't leave them at their usual names."""
    names = {key: getattr(columns, key) for key in keys}
    usual = type(columns).model_fields
    return tuple(name for key, name in names.items() if name != usual[key].default)


def text_column(row: dict[str, Any], column: str, *, optional: bool = False) -> str:
    """The text in a column. One that isn't optional has to hold something."""
    if column not in row:
        if optional:
            return ""
        raise Missing(column)
    value = row[column]
    if value != value:  # NaN, which pandas has for what isn't there
        value = None
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        what = "null" if value is None else f"{type(value).__name__} {str(value)[:40]}"
        raise Unreadable(f"{column!r} is {what}, not text")
    if not optional and not value.strip():
        raise Unreadable(f"{column!r} is empty")
    if "\0" in value:
        raise Unreadable(f"{column!r} holds a NUL character")
    return value


def integer_column(row: dict[str, Any], column: str) -> NDArray[np.int64]:
    if column not in row:
        raise Missing(column)
    value = row[column]
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        what = "an empty list" if value == [] else "not a list of integers"
        raise Unreadable(f"{column!r} is {what}")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise Unreadable(f"{column!r} holds a number that is no token id") from None


def shown_places(row: dict[str, Any], ids: NDArray[np.int64], column: str) -> NDArray[np.bool_]:
    """Which of the ids the row's attention mask shows; all where it has none."""
    if row.get(MASK) is None:
        return np.ones(len(ids), dtype=np.bool_)
    mask = integer_column(row, MASK)
    if len(mask) != len(ids):
        raise Unreadable(f"{len(ids)} {column}, but {len(mask)} in {MASK!r}")
    if not mask.any():
        raise Unreadable(f"{MASK!r} holds nothing but 0")
    shown: NDArray[np.bool_] = mask != 0
    return shown
