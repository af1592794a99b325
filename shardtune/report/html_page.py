"""A self-contained HTML page: its style and script are inside, and nothing else may be loaded.

The page's own policy names both by their hashes. So a browser runs no other script, whatever a
model has said, and asks for nothing, with the network on or off.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from shardtune.core.files.regular_file import open_regular
from shardtune.report.markup import Markup, element, join, plain

GENERATOR = '<meta name="generator" content="shardtune report">'
_FOLDER = Path(__file__).parent


def html_page(title: str, *parts: Markup) -> str:
    """The whole file."""
    style, script = _own("run_page.css"), _own("run_page.js")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; base-uri \'none\'">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="referrer" content="no-referrer">\n{GENERATOR}\n'
        f"<title>{plain(title)}</title>\n<style>{style}</style>\n</head>\n"
    )
    body = element("main", Markup("\n"), *(join([part, "\n"]) for part in parts))
    return f"{head}<body>\n{body}\n<script>{script}</script>\n</body>\n</html>\n"


def section(title: str, *parts: str) -> Markup:
    """A part of the page under its heading; none where nothing is in it."""
    if not any(parts):
        return Markup("")
    return element("section", element("h2", title), *parts)


def is_ours(path: Path) -> bool:
    """Whether a file is a page that we wrote, and may be replaced."""
    try:
        with open_regular(path) as file:
            return GENERATOR.encode() in file.read(2000)
    except OSError:
        return False


@cache
def _own(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
