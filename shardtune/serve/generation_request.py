"""A request in a batch: its prompt, how to go on with it, and who hears of each piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from shardtune.serve.sampling import RequestSampling, TokenLogprob
from shardtune.serve.text_stream import TextStream

Finish = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls."""

    index: int
    """Its place among the answer's calls."""
    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True)
class Piece:
    """What a step adds to an answer. The last one says why it is the last."""

    text: str
    tokens: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    error: str = ""
    calls: tuple[ToolCall, ...] = ()
    """What is called behind the text."""


@dataclass(eq=False)
class GenerationRequest:
    """A prompt, how to go on with it, and who hears of each piece."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: RequestSampling
    stops: frozenset[int]
    text: TextStream
    hear: Callable[[Piece], None]
    adapter: str | None = None
    """None answers with the base model."""
    written: int = field(default=0, init=False)
    last: int = field(default=0, init=False)
    finished: bool = field(default=False, init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    """The prompt's and those written so far: what is read when it joins."""
    outgrown: bool = field(default=False, init=False)
    """Whether it waits to be read anew, because its keys are void (LongRoPE)."""

    def __post_init__(self) -> None:
        self.tokens += self.prompt

    @property
    def reserved(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt) + self.max_tokens

    @property
    def takes_likeliest(self) -> bool:
        """Whether its tokens are those with the largest logit, and nothing else is told of them."""
        return self.sampling.greedy and self.sampling.logprobs is None

    def take(self, chosen: TokenLogprob) -> None:
        """Notes a token and tells of it, and of the end if it is the last."""
        self.last, self.written = chosen.token, self.written + 1
        self.tokens.append(chosen.token)
        if chosen.token in self.stops:
            return self._end(Piece(self.text.end(), (), "stop"))
        text = self.text.add(chosen.token)
        if self.text.stopped:
            return self._end(Piece(text, (chosen,), "stop"))
        if self.written == self.max_tokens:
            text += self.text.end()
            finish: Finish = "stop" if self.text.stopped else "length"
            return self._end(Piece(text, (chosen,), finish))
        return self.hear(Piece(text, (chosen,)))

    def give_up(self, finish: Finish, error: str = "") -> None:
        """Ends it where it stands."""
        self._end(Piece("", (), finish, error))

    def _end(self, piece: Piece) -> None:
        self.finished = True
        self.hear(piece)


def guarded(rows: Sequence[GenerationRequest], work: Callable[[], None]) -> None:
    """Work that fails (no memory for a forward pass, say) ends its own requests, not the server."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  whatever a model's own code may raise
        first = str(error).strip().split("\n")[0]
        for request in rows:
            if not request.finished:
                request.give_up("error", f"{type(error).__name__}: {first}")


def choose_tokens(
    requests: Sequence[GenerationRequest],
    likeliest: Sequence[int],
    logits: Callable[[int], Tensor],
) -> None:
    """The next token of each, by its place: the likeliest, or what its sampling makes of its
    logits."""

    def choose(row: int, request: GenerationRequest) -> None:
        plain = request.takes_likeliest
        request.take(
            TokenLogprob(likeliest[row]) if plain else request.sampling.choose(logits(row))
        )

    for row, request in enumerate(requests):
        if not request.finished:
            guarded([request], partial(choose, row, request))
