"""The bodies that OpenAI's clients send, as far as they are served.

A field that would change the answer and isn't served is refused: to ignore it in silence would give
another answer than was asked for. Fields that change nothing (`user`, `metadata`) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from shardtune.serve.sampling import RequestSampling
from shardtune.serve.sampling_defaults import SamplingDefaults
from shardtune.serve.served_model import ChatPrompt, ChatTurn, ServedModel


def _turn(message: dict[str, object]) -> dict[str, object]:
    """A message as templates expect it: content as a text, arguments of calls as an object."""
    if not isinstance(message.get("role"), str):
        raise ValueError("no role")
    turn = {name: value for name, value in message.items() if value is not None}
    content = turn.get("content", "")
    if isinstance(content, list):
        content = "".join(_text_part(part) for part in content)
    if not isinstance(content, str):
        raise ValueError("content is not a text")
    turn["content"] = content
    if isinstance(calls := turn.get("tool_calls"), list):
        turn["tool_calls"] = [_with_arguments(call) for call in calls]
    return turn


def _text_part(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError("content: only parts of type text are served")
    return text


def _with_arguments(call: object) -> object:
    """OpenAI sends a call's arguments as JSON text; templates write the object itself."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
    return {**call, "function": {**function, "arguments": arguments}}


# Templates loop over turns and tools, some of them in a loop of turns.
Turns = Annotated[
    list[Annotated[dict[str, object], AfterValidator(_turn)]], Field(min_length=1, max_length=2048)
]
Tools = Annotated[list[object], Field(max_length=512)]
TemplateSettings = Annotated[dict[str, object], Field(max_length=64)]
StopStrings = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
TextPrompts: TypeAlias = str | Annotated[list[str], Field(min_length=1)]


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")
    not_served: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Fields, and the values of each that say nothing."""

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> _Body:
        for name, harmless in self.not_served.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in harmless:
                raise ValueError(f"{name}={json.dumps(value)[:60]} isn't served; leave it out")
        return self


_NOT_SERVED: dict[str, tuple[object, ...]] = {
    "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "logit_bias": ({},), "response_format": ({"type": "text"},),
    # What vLLM takes besides.
    "min_p": (0,), "repetition_penalty": (1,), "length_penalty": (1,), "use_beam_search": (False,),
    "min_tokens": (0,), "ignore_eos": (False,), "stop_token_ids": ([],), "bad_words": ([],),
    "allowed_token_ids": (), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "prompt_logprobs": (), "truncate_prompt_tokens": (), "structured_outputs": (),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
}  # fmt: skip
"""Of completions of both kinds."""


class SamplingBody(_Body):
    """What completions of both kinds have."""

    model: str
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[str, Field(min_length=1)] | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(
        self, logprobs: int | None, answer: int, defaults: SamplingDefaults
    ) -> RequestSampling:
        """That of one of the `n` answers to a prompt: each has draws of its own."""
        told = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        own = {name: value for name, value in told.items() if value is not None}
        how = defaults.taken | own
        return RequestSampling(
            temperature=how.get("temperature", 1.0),
            top_p=how.get("top_p", 1.0),
            top_k=max(int(how.get("top_k", 0)), 0),
            seed=None if self.seed is None else self.seed + answer,
            logprobs=logprobs,
        )


class ChatBody(SamplingBody):
    """`/v1/chat/completions`."""

    not_served = _NOT_SERVED | {
        "functions": ([],), "modalities": (["text"],), "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True,),
        "audio": (), "prediction": (), "chat_template": (), "documents": ([],), "echo": (False,),
        "add_generation_prompt": (True,), "continue_final_message": (False,),
        "add_special_tokens": (False,),
    }  # fmt: skip
    messages: Turns
    tools: Tools | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateSettings | None = None

    @model_validator(mode="after")
    def _refuse_likeliest_of_nothing(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} requires logprobs to be true")
        return self

    @property
    def prompt(self) -> ChatPrompt:
        return ChatPrompt(self.messages, self.tools, True, self.chat_template_kwargs)

    @property
    def may_call(self) -> bool:
        """Whether functions that the answer calls are told as such."""
        return bool(self.tools) and (self.model_extra or {}).get("tool_choice") != "none"

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each; None tells nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(SamplingBody):
    """`/v1/completions`."""

    not_served = _NOT_SERVED | {"echo": (False,), "suffix": ("",), "add_special_tokens": (True,)}
    prompt: TextPrompts | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(each, int) for each in self.prompt):
            return [[each for each in self.prompt if isinstance(each, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]

    @property
    def longest(self) -> int:
        return self.max_tokens or 16  # as OpenAI has it


class TokenizeBody(_Body):
    """`/tokenize`: a text, or a dialogue as the template writes it."""

    not_served = {
        "chat_template": (), "continue_final_message": (False,), "return_token_strs": (False,)
    }  # fmt: skip
    model: str
    prompt: str | None = None
    messages: Turns | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    chat_template_kwargs: TemplateSettings | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.add_special_tokens not in (None, self.messages is None):
            told = "prompts have the tokenizer's special tokens, dialogues those of the template"
            raise ValueError(f"add_special_tokens can't be chosen: {told}; leave it out")
        return self

    @property
    def chat(self) -> ChatPrompt | None:
        if self.messages is None:
            return None
        settings = self.chat_template_kwargs
        return ChatPrompt(self.messages, self.tools, self.add_generation_prompt, settings)


class VoteBody(BaseModel):
    """`/votes`: which of two answers to the same prompt was better."""

    model_config = ConfigDict(extra="forbid")
    left: Annotated[str, Field(max_length=200)]
    right: Annotated[str, Field(max_length=200)]
    choice: Literal["left", "right", "tie", "neither"]
    prompt: list[dict[str, object]]
    answers: tuple[str, str]


def tokenized(
    model: ServedModel, turns: Sequence[ChatTurn], tools: Sequence[object] | None, *, asks: bool
) -> list[int]:
    """What `/tokenize` answers for a dialogue that comes as JSON."""
    sent = {"messages": list(turns), "tools": tools, "add_generation_prompt": asks}
    body = TokenizeBody.model_validate_json(json.dumps({"model": model.name, **sent}))
    assert body.chat is not None
    assert model.render is not None
    return model.render(body.chat)
