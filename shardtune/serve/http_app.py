"""OpenAI's HTTP interface over the models that are served."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shardtune.core.model.written_calls import CallSpelling
from shardtune.errors import did_you_mean
from shardtune.serve.call_stream import CallStream
from shardtune.serve.engine_thread import (
    Answering,
    Draining,
    EngineFailed,
    EngineThread,
    QueueFull,
    TookTooLong,
)
from shardtune.serve.generation_request import Finish, Piece, ToolCall
from shardtune.serve.openai_answers import AnswerWriter, Usage
from shardtune.serve.openai_requests import (
    ChatBody,
    CompletionBody,
    SamplingBody,
    TokenizeBody,
    VoteBody,
)
from shardtune.serve.page import page_reply
from shardtune.serve.sampling import TokenLogprob
from shardtune.serve.served_model import ChatPrompt, ServedModel, TemplateSettingError
from shardtune.web.http_guard import AccessRules, Guard, limited_body
from shardtune.web.replies import (
    DONE,
    STREAM_HEADERS,
    ApiError,
    Json,
    event,
    json_reply,
    no_such_path,
    with_refusals,
)

Body = TypeVar("Body", bound=BaseModel)
OPEN_PATHS = ("/", "/health")
"""They tell nothing of the models' answers: the page asks for the key itself."""
_aside = asyncio.to_thread  # a long prompt is read while the others are answered


@dataclass(frozen=True)
class ServerLimits:
    """What one client may cost."""

    body_bytes: int = 2 * 2**20
    answer_tokens: int = 4096
    waiting: int = 256
    seconds: float = 600


class OpenAIServer:
    """The routes, over an engine that `app` starts and stops."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        limits: ServerLimits,
        access: AccessRules,
        votes: Path,
    ) -> None:
        self._models = {model.name: model for model in models}
        if len(self._models) < len(models):
            raise ValueError(f"two models have one name: {[model.name for model in models]}")
        self._limits, self._votes = limits, votes
        self._created = int(time.time())
        batches = {id(model.batch): model.batch for model in models}
        self.engine = EngineThread(
            list(batches.values()), max_waiting=limits.waiting, seconds=limits.seconds
        )
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", with_refusals(self._health)),
                Route("/v1/models", with_refusals(self._list)),
                Route("/v1/models/{name:path}", with_refusals(self._show)),
                Route("/v1/chat/completions", with_refusals(self._chat), methods=["POST"]),
                Route("/v1/completions", with_refusals(self._complete), methods=["POST"]),
                Route("/tokenize", with_refusals(self._tokenize), methods=["POST"]),
                Route("/votes", with_refusals(self._vote), methods=["POST"]),
            ],
            middleware=[Middleware(Guard, access=access, open_paths=OPEN_PATHS)],
            exception_handlers={404: no_such_path, 405: no_such_path},
            lifespan=self._lifespan,
        )

    def drain(self) -> None:
        """Takes no more requests: the server is about to end."""
        self.engine.draining = True

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.engine.start()
        yield
        self.engine.stop()

    async def _page(self, _: Request) -> Response:
        return page_reply()

    async def _health(self, _: Request) -> Response:
        engine = self.engine
        status = "failed" if engine.failed else "draining" if engine.draining else "ok"
        told: Json = {"status": status, "running": engine.running, "waiting": engine.waiting}
        if engine.failed:
            told["error"] = engine.failed
        return json_reply(told, 200 if status == "ok" else 503)

    async def _list(self, _: Request) -> Response:
        return json_reply({"object": "list", "data": list(map(self._card, self._models.values()))})

    async def _show(self, request: Request) -> Response:
        return json_reply(self._card(self._model(request.path_params["name"])))

    def _card(self, model: ServedModel) -> Json:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "shardtune",
            "max_model_len": model.context,
            "chat": model.render is not None,
        }

    async def _chat(self, request: Request) -> Response:
        body = await self._read(request, ChatBody)
        model = self._model(body.model)
        prompt = await _aside(_rendered, model, body.prompt)
        most = self._room(model, prompt, body.longest)
        writer = AnswerWriter("chat", model.name, model.tokenizer, body.told_logprobs)
        spelling = await _aside(lambda: model.spelling) if body.may_call else None
        return await self._answer(request, body, model, [(prompt, most)], writer, spelling)

    async def _complete(self, request: Request) -> Response:
        body = await self._read(request, CompletionBody)
        model = self._model(body.model)
        prompts = [
            await _aside(model.encode, each) if isinstance(each, str) else _known(model, each)
            for each in body.prompts
        ]
        sized = [(prompt, self._room(model, prompt, body.longest)) for prompt in prompts]
        writer = AnswerWriter("text", model.name, model.tokenizer, body.logprobs)
        return await self._answer(request, body, model, sized, writer)

    async def _tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeBody)
        model = self._model(body.model)
        chat = body.chat
        ids = await (
            _aside(_rendered, model, chat) if chat else _aside(model.encode, body.prompt or "")
        )
        told: Json = {"tokens": ids, "count": len(ids), "max_model_len": model.context}
        return json_reply(told | {"stop_token_ids": sorted(model.stops)})

    async def _vote(self, request: Request) -> Response:
        body = await self._read(request, VoteBody)
        line = json.dumps({"time": int(time.time()), **body.model_dump()}, ensure_ascii=False)
        try:
            with self._votes.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            fact = f"the vote can't be written to {self._votes}: {error.strerror}"
            raise ApiError(500, fact, "vote_not_written") from None
        return json_reply({"written": str(self._votes)})

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        raw = await limited_body(request, self._limits.body_bytes)
        try:
            return kind.model_validate_json(raw)
        except ValidationError as error:
            raise _refused(error) from None

    def _model(self, name: str) -> ServedModel:
        if name in self._models:
            return self._models[name]
        near = did_you_mean(name, self._models)
        hint = f"did you mean {near}?" if near else f"there is {', '.join(self._models)}"
        raise ApiError(
            404, f"no model is called {name[:200]!r}: {hint}", "model_not_found", "model"
        )

    def _room(self, model: ServedModel, prompt: Sequence[int], asked: int | None) -> int:
        """How many tokens the answer may have."""
        room = model.context - len(prompt)
        if not prompt:
            raise ApiError(400, "the prompt is empty", "empty_prompt", "prompt")
        if room < 1 or (asked is not None and asked > room):
            fact = (
                f"the prompt has {len(prompt)} tokens and {asked or 1} are asked for, but "
                f"{model.name} takes {model.context} together"
            )
            raise ApiError(400, fact, "context_length_exceeded", "max_tokens")
        return min(asked or room, room, self._limits.answer_tokens)

    async def _answer(
        self,
        request: Request,
        body: SamplingBody,
        model: ServedModel,
        prompts: Sequence[tuple[list[int], int]],
        writer: AnswerWriter,
        spelling: CallSpelling | None = None,
    ) -> Response:
        """The reply; `spelling` says what in it is a call of a function."""
        tags = spelling.tags if spelling else ()
        opened: list[Answering] = []
        try:
            for prompt, most in prompts:
                for answer in range(body.n or 1):
                    sampling = body.sampling(writer.logprobs, answer, model.defaults)
                    stops = body.stop_strings
                    opened.append(self.engine.open(model, prompt, most, sampling, stops, tags))
        except (QueueFull, Draining, EngineFailed) as refusal:
            for each in opened:
                each.cancel()
            if isinstance(refusal, EngineFailed):
                fact = f"the server answers nothing more: its engine failed ({refusal}); restart it"
                raise ApiError(503, fact, "engine_failed") from None
            if isinstance(refusal, Draining):
                raise ApiError(503, "the server is about to end", "draining") from None
            fact = f"{self._limits.waiting} requests wait already; try again later"
            raise ApiError(429, fact, "queue_full") from None
        usage = Usage(sum(len(prompt) for prompt, _ in prompts))
        watch = asyncio.create_task(_cancel_when_gone(request, opened))
        answers = [self._pieces(each, spelling) for each in opened]
        if body.stream:
            events = self._events(
                opened, answers, writer, usage if body.wants_usage else None, watch
            )
            return StreamingResponse(events, 200, STREAM_HEADERS, "text/event-stream")
        try:
            choices = await asyncio.gather(
                *(_whole(place, each, writer) for place, each in enumerate(answers))
            )
            usage.written = sum(each.request.written for each in opened)
        finally:
            watch.cancel()
            for each in opened:
                each.cancel()
        return json_reply(writer.envelope(choices, chunk=False, usage=usage))

    async def _events(
        self,
        opened: Sequence[Answering],
        answers: Sequence[AsyncIterator[Piece]],
        writer: AnswerWriter,
        usage: Usage | None,
        watch: asyncio.Task[None],
    ) -> AsyncIterator[bytes]:
        try:
            if writer.kind == "chat":
                for place in range(len(opened)):
                    yield event(writer.opening(place))
            async for place, piece in _merged(answers):
                # A token may give no text yet; its log-probability comes with those that do.
                if piece.text or piece.calls or piece.finish or writer.logprobs is not None:
                    yield event(writer.envelope([writer.part(place, piece)], chunk=True))
            if usage is not None:
                usage.written = sum(each.request.written for each in opened)
                yield event(writer.envelope([], chunk=True, usage=usage))
            yield DONE
        except ApiError as error:  # the status is sent already
            yield event(error.as_json())
        finally:
            watch.cancel()
            for each in opened:
                each.cancel()

    async def _pieces(
        self, answering: Answering, spelling: CallSpelling | None
    ) -> AsyncIterator[Piece]:
        calls = CallStream(spelling) if spelling else None
        try:
            async for piece in answering.pieces():
                if piece.finish == "error":
                    raise ApiError(500, f"the model failed: {piece.error}", "model_failed")
                if piece.finish == "cancelled":
                    raise ApiError(499, "the request was cancelled", "cancelled")
                for part in calls.pieces(piece) if calls else [piece]:
                    yield part
        except TookTooLong:
            seconds = f"{self._limits.seconds:g}"
            fact = f"the answer wasn't finished within {seconds} seconds"
            raise ApiError(504, fact, "timeout") from None


async def _whole(place: int, pieces: AsyncIterator[Piece], writer: AnswerWriter) -> Json:
    """The choice of an answer that isn't streamed."""
    text, tokens, calls = "", list[TokenLogprob](), list[ToolCall]()
    end: Finish = "stop"
    async for piece in pieces:
        text, end = text + piece.text, piece.finish or end
        tokens += piece.tokens
        calls += piece.calls
    return writer.whole(place, Piece(text, tuple(tokens), end, calls=tuple(calls)))


async def _merged(streams: Sequence[AsyncIterator[Piece]]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several answers as they come, each with its number."""
    if len(streams) == 1:
        async for piece in streams[0]:
            yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

    async def forward(place: int, stream: AsyncIterator[Piece]) -> None:
        try:
            async for piece in stream:
                queue.put_nowait((place, piece))
            queue.put_nowait(None)
        except ApiError as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(*each)) for each in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()


async def _cancel_when_gone(request: Request, opened: Sequence[Answering]) -> None:
    """A client that goes away frees its places."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for each in opened:
        each.cancel()


def _rendered(model: ServedModel, chat: ChatPrompt) -> list[int]:
    """The dialogue as token ids. A template is somebody else's program: it may refuse one."""
    if model.render is None:
        fact = f"the tokenizer of {model.name} has no chat template; ask /v1/completions"
        raise ApiError(400, fact, "no_chat_template")
    try:
        return model.render(chat)
    except TemplateSettingError as error:
        raise ApiError(400, str(error), "chat_template_kwargs", "chat_template_kwargs") from None
    except Exception as error:  # noqa: BLE001  jinja's errors, and whatever a lookup raises
        first = str(error).strip().split("\n")[0] or type(error).__name__
        fact = f"the chat template refuses the dialogue: {first}"
        raise ApiError(400, fact, "chat_template", "messages") from None


def _refused(error: ValidationError) -> ApiError:
    """The first mistake. Of a field that takes several kinds, that of the kind which was sent."""
    first = min(error.errors(), key=lambda each: each["type"] in ("string_type", "int_type"))
    if not first["loc"]:
        none = first["type"] in ("json_invalid", "model_type")
        told = first["msg"].removeprefix("Value error, ")
        return ApiError(400, told, "invalid_json" if none else None)
    # Between the names stand those of kinds: `str`, `list[str]`.
    names = [str(part) for part in first["loc"] if str(part).isalnum() or "_" in str(part)]
    place = ".".join(name for name in names if name != "str")
    return ApiError(400, f"{place}: {first['msg'].removeprefix('Value error, ')}", None, place)


def _known(model: ServedModel, ids: list[int]) -> list[int]:
    size = model.batch.vocabulary
    if any(token >= size for token in ids):
        raise ApiError(400, f"token ids go from 0 to {size - 1}", None, "prompt")
    return ids
