"""The page at `/`: one file, whose own script and style are allowed by their hashes alone."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse, Response

from shardtune.web.page_headers import page_headers

_FILE = Path(__file__).with_name("page.html")


def page_reply() -> Response:
    html, headers = _page()
    return HTMLResponse(html, headers=headers)


@cache
def _page() -> tuple[str, dict[str, str]]:
    html = _FILE.read_text(encoding="utf-8")
    return html, page_headers(*(_hash(html, tag) for tag in ("script", "style")))


def _hash(html: str, tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
