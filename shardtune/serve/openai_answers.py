"""Answers in OpenAI's form: completions, the chunks of a stream, log-probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from shardtune.serve.generation_request import Piece, ToolCall
from shardtune.serve.sampling import TokenLogprob
from shardtune.serve.token_text import token_bytes, token_text
from shardtune.web.replies import Json

AnswerKind = Literal["chat", "text"]
_OBJECTS = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("text", False): "text_completion",
    ("text", True): "text_completion",
}


@dataclass
class Usage:
    """Tokens that were read and written."""

    prompt: int = 0
    written: int = 0

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
        }


@dataclass(frozen=True)
class AnswerWriter:
    """Writes the parts of one answer: they share an id, a time and the model's name."""

    kind: AnswerKind
    model: str
    tokenizer: Any
    logprobs: int | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _written: dict[int, int] = field(default_factory=dict, init=False)
    """Letters so far of each choice whose log-probabilities are told."""

    def envelope(self, choices: Sequence[Json], *, chunk: bool, usage: Usage | None = None) -> Json:
        prefix = "chatcmpl-" if self.kind == "chat" else "cmpl-"
        return {
            "id": prefix + self.id,
            "object": _OBJECTS[self.kind, chunk],
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        } | ({"usage": usage.as_json()} if usage else {})

    def opening(self, index: int) -> Json:
        """The first chunk of a chat's choice says who speaks."""
        delta = {"role": "assistant", "content": ""}
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.envelope([choice], chunk=True)

    def part(self, index: int, piece: Piece) -> Json:
        """A chunk's choice."""
        delta: Json = {"content": piece.text}
        if piece.calls:
            delta = {"tool_calls": [{"index": call.index, **_called(call)} for call in piece.calls]}
        said: Json = {"delta": delta} if self.kind == "chat" else {"text": piece.text}
        known = self._logprobs(index, piece.tokens) if piece.tokens else None
        return {"index": index, **said, "logprobs": known, "finish_reason": piece.finish}

    def whole(self, index: int, answer: Piece) -> Json:
        """A choice of an answer that isn't streamed."""
        message: Json = {"role": "assistant", "content": answer.text}
        if answer.calls:
            calls = [_called(call) for call in answer.calls]
            message |= {"content": answer.text or None, "tool_calls": calls}
        said: Json = {"message": message} if self.kind == "chat" else {"text": answer.text}
        known = self._logprobs(index, answer.tokens)
        return {"index": index, **said, "logprobs": known, "finish_reason": answer.finish}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> Json | None:
        if self.logprobs is None:
            return None
        if self.kind == "chat":
            return {"content": [self._entry(each) for each in tokens]}
        words = [token_text(self.tokenizer, each.token) for each in tokens]
        begin = self._written.get(index, 0)
        *begins, self._written[index] = accumulate(map(len, words), initial=begin)
        return {
            "tokens": words,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [self._likeliest(each) for each in tokens],
            "text_offset": begins,
        }

    def _likeliest(self, chosen: TokenLogprob) -> dict[str, float | None]:
        """With the chosen one, which needn't be among them. Halves of letters have one text."""
        found: dict[str, float | None] = {}
        for token, logprob in (*chosen.top, (chosen.token, chosen.logprob)):
            found.setdefault(token_text(self.tokenizer, token), logprob)
        return found

    def _entry(self, chosen: TokenLogprob) -> Json:
        assert chosen.logprob is not None
        top = [self._token(token, logprob) for token, logprob in chosen.top]
        return self._token(chosen.token, chosen.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        text, own = token_text(self.tokenizer, token), token_bytes(self.tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": list(own)}


def _called(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
