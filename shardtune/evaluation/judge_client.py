"""A judge: another model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from shardtune.errors import JobError, Problem

RETRIES = 4
_AGAIN = {408, 409, 429, 500, 502, 503, 504}


@dataclass(frozen=True)
class JudgeClient:
    """Asks `POST URL/chat/completions`, at temperature 0."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    seconds: float = 120.0
    """For one verdict."""
    pause: float = 1.0
    """Seconds before the second try; each further one waits twice as long."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            fix = "name the endpoint as https://HOST/v1"
            raise JobError(Problem("--judge-url", f"{self.url!r} is no http address", fix))

    def ask(self, system: str, text: str) -> str:
        """The judge's words; JobError if it doesn't answer."""
        body = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": 2048,
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": text},
            ],
        }
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        address = self.url.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(  # noqa: S310 (checked above)
            address, json.dumps(body).encode(), headers
        )
        for attempt in range(RETRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.seconds) as reply:  # noqa: S310
                    return _content(json.load(reply), address)
            except urllib.error.HTTPError as error:
                with error:
                    said = error.read(300).decode("utf-8", "replace").strip()
                if error.code not in _AGAIN or attempt == RETRIES:
                    raise _failed(address, f"HTTP {error.code}: {said}") from error
            except (OSError, ValueError) as error:
                if attempt == RETRIES:
                    raise _failed(address, str(error)) from error
            time.sleep(self.pause * 2**attempt)
        raise AssertionError("the last try returns or raises")


def _content(reply: object, address: str) -> str:
    try:
        return str(reply["choices"][0]["message"]["content"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError) as error:
        raise _failed(address, "the reply has no choices[0].message.content") from error


def _failed(address: str, fact: str) -> JobError:
    fix = "look at --judge-url and --judge-model; its key is read from the environment"
    return JobError(Problem(address, f"the judge doesn't answer: {fact}", fix))
