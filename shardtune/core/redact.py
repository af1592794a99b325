"""Redaction: secrets are cut out of text before it is written or shown.

A secret is the value of an environment variable that is named like one (`WANDB_API_KEY`,
`MLFLOW_TRACKING_PASSWORD`, `HF_TOKEN`), a password in a URL, or what stands behind such a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "[redacted]"
_WORD = r"(?:api[_-]?key|token|password|passwd|secret|credential|signature|access[_-]?key)"
_NAME = re.compile(rf"(?i)(?:^|_){_WORD}s?(?:_|$)|_key$|_pat$")
_SHORTEST = 6  # letters of a value that is searched for; a shorter one is part of any text
_IN_URL = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@")
_BEHIND_WORD = re.compile(rf"(?i)([\w-]*{_WORD}[\"']?\s*[=:]\s*[\"']?)([^\s\"'&,;)\]]+)")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9+/=._-]{8,}")


def redact(text: str, environment: Mapping[str, str]) -> str:
    """The text without secrets."""
    values = [value for name, value in environment.items() if is_secret_name(name)]
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, REDACTED)
    text = _IN_URL.sub(rf"\1{REDACTED}@", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    return _BEHIND_WORD.sub(rf"\1{REDACTED}", text)


def holds_secret(text: str) -> bool:
    """Whether a value that a job gives has a password or a token in it, such as a URL."""
    return redact(text, {}) != text


def is_secret_name(name: str) -> bool:
    return _NAME.search(name) is not None
