"""The thread that owns the models: it steps the batches, and hands pieces to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from shardtune.serve.continuous_batching import ContinuousBatch
from shardtune.serve.generation_request import GenerationRequest, Piece
from shardtune.serve.sampling import RequestSampling
from shardtune.serve.served_model import ServedModel
from shardtune.serve.text_stream import TextStream

_log = logging.getLogger("shardtune")


class QueueFull(Exception):
    """More wait already than the server lets wait."""


class Draining(Exception):
    """The server is about to end, and takes nothing new."""


class EngineFailed(Exception):
    """The thread has ended by an error, and nobody will answer; its words say by which."""


class TookTooLong(Exception):
    """An answer was not finished within its time."""


class EngineThread:
    """Runs all batches in one thread. `open` and `cancel` may be called from any other.

    What fails inside a batch's work ends the requests of that work (`guarded`). An error anywhere
    else leaves batches that nobody can trust: it ends the thread, and all requests with it."""

    def __init__(
        self, batches: Sequence[ContinuousBatch], *, max_waiting: int, seconds: float
    ) -> None:
        self._batches = list(batches)
        self._max_waiting, self._seconds = max_waiting, seconds
        self._inbox: list[Callable[[], None]] = []
        self._submitted = 0  # of these, requests
        self._wake = threading.Condition()
        self._stop = False
        self.draining = False
        self.failed = ""
        """By which error the thread has ended; empty as long as it runs."""
        self._unanswered: set[GenerationRequest] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its step; what still runs is cancelled by whoever waits for it."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Requests that nobody computes yet."""
        return 0 if self.failed else self._submitted + sum(b.waiting for b in self._batches)

    @property
    def running(self) -> int:
        """Requests in batches."""
        return 0 if self.failed else sum(batch.running for batch in self._batches)

    def open(
        self,
        model: ServedModel,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: RequestSampling,
        stop: Sequence[str],
        tags: Sequence[str] = (),
    ) -> Answering:
        """A request of the running event loop; `tags` are shown even where they are special tokens.
        Raises QueueFull, Draining or EngineFailed."""
        if self.draining:
            raise Draining
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[Piece | None] = asyncio.Queue()

        def hear(piece: Piece) -> None:
            if piece.finish is not None:
                self._unanswered.discard(request)
            with suppress(RuntimeError):  # the loop has ended, and with it who listened
                loop.call_soon_threadsafe(heard.put_nowait, piece)

        text = TextStream(model.tokenizer, stop, prompt, tags)
        request = GenerationRequest(
            prompt, max_tokens, sampling, model.stops, text, hear, model.adapter
        )
        with self._wake:
            if self.failed:
                raise EngineFailed(self.failed)
            if self.waiting >= self._max_waiting:
                raise QueueFull
            self._unanswered.add(request)
            self._submitted += 1
            self._inbox.append(lambda: self._submit(model.batch, request))
            self._wake.notify()
        return Answering(
            request, heard, time.monotonic() + self._seconds, lambda: self._cancel(model, request)
        )

    def _submit(self, batch: ContinuousBatch, request: GenerationRequest) -> None:
        self._submitted -= 1
        batch.submit(request)

    def _cancel(self, model: ServedModel, request: GenerationRequest) -> None:
        with self._wake:
            self._inbox.append(lambda: model.batch.cancel(request))
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except Exception as error:  # noqa: BLE001  whatever it is, nobody shall wait for an answer
            first = str(error).strip().split("\n")[0]
            told = f"{type(error).__name__}: {first}"
            _log.exception("the engine has ended, and the server answers nothing more: %s", told)
            with self._wake:  # whoever opens a request now is refused, or is among these
                self.failed = told
                unanswered, self._inbox = list(self._unanswered), []
            for request in unanswered:
                request.give_up("error", told)

    def _step_until_stopped(self) -> None:
        busy = False
        while True:
            with self._wake:
                while not (busy or self._inbox or self._stop):
                    self._wake.wait()
                if self._stop:
                    return
                inbox, self._inbox = self._inbox, []
                for message in inbox:
                    message()
            left = [batch.step() for batch in self._batches]  # all of them, whoever is busy
            busy = any(left)


class Answering:
    """One answer on its way."""

    def __init__(
        self,
        request: GenerationRequest,
        heard: asyncio.Queue[Piece | None],
        deadline: float,
        cancel: Callable[[], None],
    ) -> None:
        self.request = request
        self._heard, self._deadline, self._cancel = heard, deadline, cancel
        self._over = False

    def cancel(self) -> None:
        """Frees its place, if it has one still."""
        if not self._over:
            self._over = True
            self._cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """As they come; whoever stops listening cancels it. Raises TookTooLong."""
        left = max(self._deadline - time.monotonic(), 0)
        # One timer for all pieces: a time limit for each would cost more than the piece.
        too_long = asyncio.get_running_loop().call_later(left, self._heard.put_nowait, None)
        try:
            while True:
                piece = await self._heard.get()
                if piece is None:
                    raise TookTooLong
                if piece.finish is not None:
                    self._over = True
                yield piece
                if piece.finish is not None:
                    return
        finally:
            too_long.cancel()
            self.cancel()
