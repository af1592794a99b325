"""The files of the page. They are read once; a path can name no other."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.responses import Response

from shardtune.web.page_headers import page_headers

_FOLDER = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE = "index.html"


@cache
def static_files() -> dict[str, tuple[str, str]]:
    """The text and the media type of each file, by its path in an address."""
    found = {
        f"/static/{path.name}": (path.read_text(encoding="utf-8"), _TYPES[path.suffix])
        for path in _FOLDER.iterdir()
        if path.suffix in _TYPES
    }
    return found | {"/": found.pop(f"/static/{PAGE}")}


def static_reply(path: str) -> Response:
    text, kind = static_files()[path]
    return Response(text, media_type=f"{kind}; charset=utf-8", headers=page_headers())
