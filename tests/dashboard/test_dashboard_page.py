"""The dashboard in a real Chromium: list, search, comparison, a live run, plans; by keyboard, for
screen readers, on a phone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra dev")
pytest.importorskip("starlette", reason="the server comes with the extra serve")

from shardtune.checkpoint.run_dir import RunDir
from shardtune.web.http_guard import AccessRules
from tests.dashboard.browser import chromium, opened
from tests.dashboard.run_folders import append_steps, serving, write_long_metrics, write_run
from tests.exam.seeing_lab import CHROMIUM
from tests.reports import task_line

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.process,
]
UNNAMED = """[...document.querySelectorAll('button, select, input, svg[role], img, a')]
    .filter(e => !(e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.alt ||
        e.textContent).trim()).map(e => e.outerHTML)"""
NUMBERS = """[...document.querySelectorAll('.large text[text-anchor=end]')]
    .map(e => Number(e.textContent)).filter(Number.isFinite)"""
BEYOND = """[...document.querySelectorAll('.plot text')].filter(e =>
    e.getBoundingClientRect().right > e.closest('svg').getBoundingClientRect().right + 1)
    .map(e => e.textContent)"""
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "older", adapter={"type": "lora", "rank": 8})
    write_run(root / "other", adapter={"type": "lora", "rank": 16}, losses=(4.0, 2.5, 1.5, 1.2))
    write_run(root / HOSTILE, strategy={"type": "fsdp"})
    write_run(
        root / "training", done=False, old=False,
        logs={"attempt-0/rank-0.log": f"hello {HOSTILE}\n", "attempt-0/stack-0.txt": "File x.py"},
    )  # fmt: skip
    with RunDir(root / "training").locked():  # as the launcher of a run that trains does
        yield root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with serving(root) as address:
        yield address


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with opened(browser) as page:
        yield page


def test_search_tick_and_compare_by_keyboard(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_text("4 runs in").wait_for()
    page.get_by_role("link", name=HOSTILE).wait_for()
    page.get_by_label("Search by name").focus()
    page.keyboard.type("lora rank>4")
    page.get_by_text("2 of 4 runs in").wait_for()
    for name in ("Compare older", "Compare other"):
        page.get_by_role("checkbox", name=name).focus()
        page.keyboard.press("Space")
    page.get_by_role("button", name="Compare 2 runs").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="2 runs compared").wait_for()
    differing = page.get_by_role("row", name="adapter.rank")
    assert sorted(differing.get_by_role("cell").all_inner_texts()) == ["16", "8"]
    chart = page.get_by_role("img", name="Loss: last")
    chart.first.focus()
    page.keyboard.press("End")
    page.get_by_text("tokens 24: ").wait_for()
    page.get_by_label("Aligned by").select_option("steps")
    page.get_by_role("img", name="at step 3").first.wait_for()


def test_a_point_arrives_while_the_page_is_open(page: Any, url: str, root: Path) -> None:
    run = root / "training"
    page.goto(url)
    page.get_by_role("link", name="training").click()
    page.get_by_role("heading", name="training running").wait_for()
    page.get_by_role("img", name="Loss: last 1 at step 3").wait_for()
    append_steps(run, 4, 0.25)
    begun = time.monotonic()
    page.get_by_role("img", name="Loss: last 0.25 at step 4").wait_for(timeout=10_000)
    assert time.monotonic() - begun < 3
    with (run / "metrics.jsonl").open("a") as file:  # a half-written line stops nothing
        file.write('{"kind": "step", "st')
        file.flush()
        page.wait_for_timeout(700)
        file.write('ep": 4, "loss": 1}\n')
        file.write(f"{task_line(4, 'sums', 0.5).to_json()}\n")
    append_steps(run, 5, 0.125)
    page.get_by_role("img", name="Loss: last 0.125 at step 5").wait_for(timeout=10_000)
    page.get_by_role("img", name="Score of each task: last 0.5 at step 4").wait_for()
    page.get_by_role("img", name="Speed, over all ranks: last 80 at step 5").wait_for()
    page.get_by_text("Logs and stacks of the ranks").click()
    page.get_by_label("Log of the rank").get_by_text(f"hello {HOSTILE}").wait_for()
    page.get_by_text("Last stack of rank 0, attempt 0").wait_for()


def test_a_run_that_is_deleted_while_it_is_shown(page: Any, url: str, root: Path) -> None:
    run = write_run(root / "doomed", done=False, old=False)
    page.goto(url)
    page.get_by_role("link", name="doomed").click()
    page.get_by_role("img", name="Loss: last 1 at step 3").wait_for()
    shutil.rmtree(run)
    page.get_by_text("This run's folder is gone.").wait_for(timeout=15_000)
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_text("4 runs in").wait_for()


def test_a_run_of_one_step(page: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "one", losses=(2.0,))
    with serving(tmp_path) as url:
        page.goto(url)
        page.get_by_role("link", name="one").click()
        page.get_by_role("img", name="Loss: last 2 at step 1").wait_for()
        names = page.locator("figure:visible figcaption b").all_inner_texts()
        below = page.locator(".plot").nth(2).locator("text").all_text_contents()
        points = page.locator("figure:visible circle").count()
    assert "Busy share of the ranks" not in names  # one rank doesn't know it
    assert len(names) == 5
    assert below[-1] == "1"
    assert points == len(names) + 2  # and both evaluations


def test_a_spike_leaves_the_rest_readable(page: Any, tmp_path: Path) -> None:
    for name in ("long", "longer"):
        write_long_metrics(write_run(tmp_path / name), 10_000, spike=5432)
    with serving(tmp_path) as url:
        page.goto(url)
        page.get_by_role("link", name="long", exact=True).click()
        page.get_by_text("cut off: 99 at step 5,432").wait_for()
        heights = page.evaluate(NUMBERS)
        beyond = page.evaluate(BEYOND)
        page.get_by_role("link", name="Runs", exact=True).click()
        for name in ("long", "longer"):
            page.get_by_role("checkbox", name=f"Compare {name}", exact=True).check()
        page.get_by_role("button", name="Compare 2 runs").click()
        page.get_by_text("cut off: 99 at tokens").wait_for()
    assert 4 < max(heights) < 20
    assert not beyond


def test_a_plan_with_its_picture_and_job(page: Any, url: str) -> None:
    page.goto(f"{url}/#/plan")
    page.get_by_label("Model").fill("smollm2-135m-instruct")
    page.get_by_label("Cluster").fill("2xA40")
    page.get_by_label("Strategy").select_option("fsdp")
    page.get_by_role("button", name="Plan").click()
    page.get_by_role("img", name="which states each rank holds").wait_for()
    drawn = "() => document.querySelector('img.picture').naturalWidth > 0"
    page.wait_for_function(drawn)
    assert "type: fsdp" in page.get_by_label("The job as YAML").inner_text()
    page.get_by_role("button", name="ddp", exact=True).click()
    page.get_by_text("type: ddp").wait_for()
    page.get_by_label("Cluster").fill("many")
    page.get_by_role("button", name="Plan").click()
    page.get_by_text("is neither a cluster nor a file").wait_for()


@pytest.mark.parametrize("where", ["", "#/plan", "run"])
def test_a_phone_in_the_dark_and_names_for_screen_readers(
    browser: Any, url: str, where: str
) -> None:
    with opened(browser, width=390, dark=True) as page:
        page.goto(f"{url}/{where if where != 'run' else ''}")
        page.get_by_role("heading", name="Plan").or_(page.get_by_text("4 runs in")).wait_for()
        if where == "run":
            page.get_by_role("link", name="older").click()
            page.get_by_role("heading", name="older done").wait_for()
            page.get_by_role("img", name="Loss: last").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        unnamed = page.evaluate(UNNAMED)
        assert not unnamed


def test_the_page_asks_for_the_key(page: Any, root: Path) -> None:
    with serving(root, AccessRules("secret")) as url:
        page.goto(url)
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use").click()
        page.get_by_text("4 runs in").wait_for()
