"""A real Chromium for tests of pages, which notes every error of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.exam.seeing_lab import CHROMIUM


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, *, width: int = 1280, dark: bool = False) -> Iterator[Any]:
    """A page whose scripts raise nothing, and which asks nobody but its own server."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    problems: list[str] = []
    asked: list[str] = []
    page.on("console", lambda told: problems.append(told.text) if told.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    own = page.url.split("/#")[0]
    context.close()
    strange = [url for url in asked if not url.startswith((own, "data:", "about:"))]
    assert not strange, strange
    known = ("400", "401", "404")  # wrong forms; the key is asked for; a run may be deleted
    wrong = [each for each in problems if not any(f"status of {code}" in each for code in known)]
    assert not wrong, wrong
