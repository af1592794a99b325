"""The page in a real Chromium: by keyboard, side by side with a vote, in the dark, on a phone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright comes with the extra dev"
)
pytest.importorskip("starlette", reason="the server comes with the extra serve")

from shardtune.web.http_guard import AccessRules  # noqa: E402
from tests.serve.served import Running, serving  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.long,  # a browser takes seconds to start
    pytest.mark.process,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("page")) as running:
        yield running


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1100, "height": 700})
    opened = context.new_page()
    problems: list[str] = []
    opened.on("console", lambda told: problems.append(told.text) if told.type == "error" else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    yield opened
    context.close()
    assert not [each for each in problems if "401" not in each]


def greedy(page: Any, tokens: int = 8) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_text("Settings").click()


def test_a_chat_by_keyboard_alone(page: Any, here: Running) -> None:
    page.goto(here.url)
    page.get_by_role("option", name="tuned").first.wait_for(state="attached")
    for _ in range(20):  # Tab reaches the message
        if page.evaluate("document.activeElement.id") == "prompt":
            break
        page.keyboard.press("Tab")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.get_by_text("Answered in").wait_for()
    assert page.locator(".turn.user").inner_text() == "You\nHello"
    assert len(page.locator(".turn.assistant span").inner_text()) > 0
    page.keyboard.type("And then?")  # the focus is back where one types
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.turn.assistant').length === 2")
    page.get_by_text("Answered in").wait_for()


def test_two_models_and_a_vote(page: Any, here: Running, tmp_path: Path) -> None:
    page.goto(here.url)
    page.get_by_label("Compare with").check()
    greedy(page)
    page.get_by_label("Message").fill("Which is better?")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Equally good").click()
    page.get_by_text("Vote written to").wait_for()
    votes = here.server._votes.read_text(encoding="utf-8").splitlines()
    vote = json.loads(votes[-1])
    assert (vote["left"], vote["right"], vote["choice"]) == ("tuned", "tiny", "tie")
    assert vote["prompt"] == [{"role": "user", "content": "Which is better?"}]
    assert vote["answers"] == [
        page.locator(".turn.assistant span").nth(place).inner_text() for place in range(2)
    ]
    assert vote["answers"][0] != vote["answers"][1]


def test_an_answer_can_be_stopped(page: Any, here: Running) -> None:
    page.goto(here.url)
    greedy(page, tokens=400)
    page.get_by_label("Message").fill("Hello")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    assert page.get_by_role("button", name="Send").is_enabled()


def test_a_phone_in_the_dark_scrolls_no_further_than_its_width(browser: Any, here: Running) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 700}, color_scheme="dark")
    page = context.new_page()
    page.goto(here.url)
    page.get_by_label("Compare with").check()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(21, 23, 28)"
    context.close()


def test_everything_to_press_has_a_name(page: Any, here: Running) -> None:
    page.goto(here.url)
    page.get_by_label("Compare with").check()
    for element in page.locator("button, select, input, textarea").all():
        name = element.evaluate(
            "e => e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent"
        )
        assert name.strip()


def test_the_page_asks_for_the_key_and_loads_nothing_else(page: Any, tmp_path: Path) -> None:
    with serving(tmp_path, access=AccessRules("secret")) as here:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(here.url)
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use").click()
        page.get_by_role("option", name="tuned").first.wait_for(state="attached")
        assert all(url.startswith((here.url, "data:")) for url in asked)
