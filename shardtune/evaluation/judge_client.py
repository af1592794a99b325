"""A judge: another model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import IO

from shardtune.errors import JobError, Problem

LONGEST = 2048
"""Tokens of a verdict, with what a judge thinks before it."""
RETRIES = 4
_AGAIN = {408, 409, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class JudgeClient:
    """Asks `POST URL/chat/completions`, at temperature 0 where the judge lets one choose."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    seconds: float = 120.0
    """For one verdict."""
    pause: float = 1.0
    """Seconds before the second try; each further one waits twice as long."""
    _settings: dict[str, int] = field(
        default_factory=lambda: {"temperature": 0, "max_tokens": LONGEST}, repr=False
    )

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            fix = "name the endpoint as https://HOST/v1"
            raise JobError(Problem("--judge-url", f"{self.url!r} is no http address", fix))

    def ask(self, system: str, text: str) -> str:
        """The judge's words; JobError if it doesn't answer."""
        body: dict[str, object] = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": text},
            ],
        }
        address = self.url.rstrip("/") + "/chat/completions"
        tried = 0
        while True:
            settings = dict(self._settings)
            try:
                with self._open(address, {**body, **settings}) as reply:
                    return _content(json.load(reply), address)
            except urllib.error.HTTPError as error:
                said = _words(error)
                if error.code == 400 and self._drop_refused(said, settings):
                    continue
                if error.code not in _AGAIN or tried == RETRIES:
                    raise _failed(address, f"HTTP {error.code}: {said}") from error
            except (OSError, HTTPException, RecursionError, ValueError) as error:
                if tried == RETRIES:
                    raise _failed(address, str(error)) from error
            time.sleep(self.pause * 2**tried)
            tried += 1

    def _open(self, address: str, body: Mapping[str, object]) -> IO[bytes]:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(  # noqa: S310 (checked above)
            address, json.dumps(body).encode(), headers
        )
        reply: IO[bytes] = urllib.request.urlopen(request, timeout=self.seconds)  # noqa: S310
        return reply

    def _drop_refused(self, said: str, sent: Mapping[str, int]) -> bool:
        """Whether the judge refuses a setting that was sent; from now on it gets another, or none.
        Models that think first take no temperature, and call the limit `max_completion_tokens`."""
        named = set(re.findall(r"\b(temperature|max_tokens|max_completion_tokens)\b", said))
        if "temperature" in named & sent.keys():
            self._settings.pop("temperature", None)
        elif "max_tokens" in named & sent.keys():
            self._settings.pop("max_tokens", None)
            self._settings["max_completion_tokens"] = LONGEST
        elif named and "max_completion_tokens" in sent:  # with the prompt it may be too much
            self._settings.pop("max_completion_tokens", None)
        else:
            return False
        return True


def _content(reply: object, address: str) -> str:
    try:
        return str(reply["choices"][0]["message"]["content"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError) as error:
        raise _failed(address, "the reply has no choices[0].message.content") from error


def _words(error: urllib.error.HTTPError) -> str:
    """The beginning of what a refusal says; nothing where the connection breaks in it."""
    try:
        with error:
            return error.read(300).decode("utf-8", "replace").strip()
    except (OSError, HTTPException):
        return ""


def _failed(address: str, fact: str) -> JobError:
    fix = "look at --judge-url and --judge-model; its key is read from the environment"
    return JobError(Problem(address, f"the judge doesn't answer: {fact}", fix))
