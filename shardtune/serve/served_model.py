"""A model under the name that clients ask for, with its adapter, template and stop tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from shardtune.core.host.render_limit import render_limit
from shardtune.core.model.written_calls import CallSpelling, template_spelling
from shardtune.serve.continuous_batching import ContinuousBatch
from shardtune.serve.sampling_defaults import SamplingDefaults

ChatTurn: TypeAlias = Mapping[str, object]
"""A message in OpenAI's form: role, content, and what a template may ask for besides."""


@dataclass(frozen=True)
class ChatPrompt:
    """A dialogue that waits for an answer, and what the template is told with it."""

    turns: Sequence[ChatTurn]
    tools: Sequence[object] | None = None
    asks: bool = True
    """Whether the generation prompt follows (`add_generation_prompt`)."""
    template_settings: Mapping[str, object] | None = None

    """Variables of the template (`chat_template_kwargs`)."""


class TemplateSettingError(ValueError):
    """A template setting that would do something else than set a variable of the template."""


RenderChat: TypeAlias = Callable[[ChatPrompt], list[int]]


@dataclass(frozen=True)
class ServedModel:
    """One name of `/v1/models`. Several of them may share a batch: adapters over one base."""

    name: str
    batch: ContinuousBatch
    adapter: str | None
    tokenizer: Any
    stops: frozenset[int]
    """Tokens that end an answer."""
    context: int
    """Tokens that a prompt and its answer may have together."""
    render: RenderChat | None
    """A dialogue as token ids; None where the tokenizer has no chat template."""
    source: str
    """The run or model that it was loaded from."""
    base: str
    """The model that was trained; the source itself where nothing was."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """How it is sampled where a request says nothing."""

    @cached_property
    def spelling(self) -> CallSpelling | None:
        """How it calls functions; None where its template has no spelling that we read."""
        return call_spelling(self.tokenizer, self.render)

    def encode(self, text: str) -> list[int]:
        """A text as it is, with the tokenizer's own special tokens around it."""
        return list(self.tokenizer(text)["input_ids"])


def template_renderer(tokenizer: Any) -> RenderChat | None:
    """By the tokenizer's own chat template, as in training."""
    if tokenizer.chat_template is None:
        return None
    # Who asks may set variables of the template, but not bring a template (`chat_template`).
    ours = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)

    def render(chat: ChatPrompt) -> list[int]:
        settings = dict(chat.template_settings or {})
        if refused := sorted(ours & settings.keys()):
            raise TemplateSettingError(f"{refused[0]} is no variable of the template; leave it out")
        with render_limit():
            text = tokenizer.apply_chat_template(
                [dict(turn) for turn in chat.turns],
                tools=list(chat.tools) if chat.tools else None,
                tokenize=False,
                add_generation_prompt=chat.asks,
                **settings,
            )
        # The template has written the special tokens: the tokenizer must not write them again.
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return render


def call_spelling(tokenizer: Any, render: RenderChat | None) -> CallSpelling | None:
    """How calls are written in what is rendered."""
    if render is None:
        return None

    def text(turns: Sequence[ChatTurn], tools: Sequence[object], asks: bool) -> str:
        ids = render(ChatPrompt(turns, tools, asks))
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    return template_spelling(text)
