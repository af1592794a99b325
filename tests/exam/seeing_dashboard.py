"""The dashboard in a real browser: a real run as it trains and is killed, many runs, a long run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.dashboard.browser import chromium, opened
from tests.dashboard.run_folders import write_long_metrics, write_run
from tests.exam.case import Findings
from tests.exam.seeing_lab import PICTURES, ROOT, SeeingCase, SeeingLab

ARRIVES = 3.0  # seconds in which a point is on the page
LISTED, DRAWN = 1.0, 2.0  # seconds for 200 runs, and for 100,000 steps
SHOWN_STEP = "() => parseInt(document.querySelector('.facts dd')?.textContent.replace(/\\D.*/, ''))"
JOB = (
    "recipes/quickstart.yaml", "model.name=tiny", "train.precision=fp32", "evaluate.samples=0",
    "launch.processes=2", "train.warmup_steps=1",
)  # fmt: skip


def live_run(lab: SeeingLab, found: Findings) -> None:
    """A run that trains: its points arrive, it is compared with an older one, and killed."""
    runs = lab.folder / "live"
    older = lab.shardtune(
        "train", *JOB, "train.steps=30", "train.learning_rate=0.004",
        f"save.directory={runs / 'older'}",
    )  # fmt: skip
    found.expect(f"the older run ends with 0 ({older.stderr[-300:]})", older.returncode == 0)
    with _dashboard(runs) as url, chromium() as browser, opened(browser) as page:
        page.set_default_timeout(120_000)
        page.goto(url)
        with _training(runs / "training") as launcher:
            page.get_by_role("link", name="training").wait_for()
            metrics = runs / "training" / "metrics.jsonl"
            while _last_step(metrics) < 3:
                time.sleep(0.2)
            page.get_by_role("row", name="training").get_by_text("running").wait_for()
            _tick_and_compare(lab, found, page)
            page.get_by_role("link", name="training").click()
            page.get_by_role("heading", name="training running").wait_for()
            lags = [_lag(page, metrics) for _ in range(5)]
            found.expect(f"a point is shown within {ARRIVES:g} s", max(lags) < ARRIVES)
            found.show(f"a point is shown {min(lags):.1f} to {max(lags):.1f} s after its line")
            page.get_by_text("Logs and stacks of the ranks").click()
            page.get_by_label("Log of the rank").get_by_text("loading the model").wait_for()
            if lab.pictures:
                while _last_step(metrics) < 60:
                    time.sleep(0.5)
                page.get_by_text("Logs and stacks of the ranks").click()
                page.evaluate("scrollTo(0, 0)")
                page.screenshot(path=PICTURES / "dashboard_run.png")
            launcher.send_signal(signal.SIGKILL)
            launcher.wait(30)
        with metrics.open("a") as file:  # as if it had been killed within a line
            file.write('{"kind": "step", "step": 999')
        # Without its launcher nobody says so: it is known by its silence. One that was killed right
        # after a checkpoint of its last step can't be told from one that was preempted.
        page.get_by_role("heading", name=re.compile("training (failed|stopped)")).wait_for()
        page.get_by_role("link", name="Runs", exact=True).click()
        ended = re.compile("^(failed|stopped)$")
        page.get_by_role("row", name="training").get_by_text(ended).wait_for()
        if lab.pictures:
            _more_pictures(browser, url, runs)


def _tick_and_compare(lab: SeeingLab, found: Findings, page: Any) -> None:
    for name in ("older", "training"):
        page.get_by_role("checkbox", name=f"Compare {name}").check()
    page.get_by_role("button", name="Compare 2 runs").click()
    page.get_by_role("row", name="train.learning_rate").wait_for()
    keys = page.locator("table").last.locator("tbody th").all_inner_texts()
    found.expect(f"the jobs differ in rate and steps: {keys}",
                 {"train.learning_rate", "train.steps"} <= set(keys))  # fmt: skip
    if lab.pictures:
        page.screenshot(path=PICTURES / "dashboard_compare.png")
    page.get_by_role("link", name="Runs", exact=True).click()


def _more_pictures(browser: Any, url: str, runs: Path) -> None:
    """The list with a few more runs, a plan, and a phone in the dark."""
    for at, (name, strategy) in enumerate((("sweep/rank-8", "ddp"), ("sweep/rank-16", "fsdp"))):
        losses = [1 + 4 / (1 + 0.2 * step) + 0.1 * (step % 3) + 0.2 * at for step in range(60)]
        adapter = {"type": "lora", "rank": 8 << at}
        write_run(
            runs / name, losses=losses, strategy={"type": strategy}, adapter=adapter, old=False
        )
    for width, dark, name in ((1280, False, "dashboard_list"), (390, True, "dashboard_phone")):
        with opened(browser, width=width, dark=dark) as page:
            page.set_viewport_size({"width": width, "height": 420 if width > 1000 else 780})
            page.goto(url)
            page.get_by_text("4 runs in").wait_for()
            if dark:
                page.get_by_role("link", name="older").click()
                page.get_by_role("img", name="Loss: last").wait_for()
            page.screenshot(path=PICTURES / f"{name}.png")
    with opened(browser) as page:
        page.goto(f"{url}/#/plan")
        page.get_by_label("Strategy").select_option("fsdp")
        page.get_by_role("button", name="Plan").click()
        page.wait_for_function("() => document.querySelector('img.picture')?.naturalWidth > 0")
        page.evaluate("() => document.getElementById('told').replaceChildren()")
        page.screenshot(path=PICTURES / "dashboard_plan.png", full_page=True)


def many_runs(lab: SeeingLab, found: Findings) -> None:
    """200 runs, by a server that has just started."""
    runs = lab.folder / "many"
    for number in range(200):
        losses = [3.0 / (1 + step / 9) for step in range(200)]
        write_run(runs / f"group-{number % 9}" / f"run-{number}", losses=losses)
    with _dashboard(runs) as url, chromium() as browser, opened(browser) as page:
        page.goto(f"{url}/#/plan")  # the page itself is loaded, the runs are not
        page.get_by_role("heading", name="Plan").wait_for()
        begun = time.monotonic()
        page.get_by_role("link", name="Runs", exact=True).click()
        page.wait_for_function("() => document.querySelectorAll('.runs tbody tr').length === 200")
        seconds = time.monotonic() - begun
    found.expect(f"200 runs are listed in {LISTED:g} s ({seconds:.2f})", seconds < LISTED)
    found.show(f"200 runs listed in {seconds:.2f} s")


def long_run(lab: SeeingLab, found: Findings) -> None:
    """100,000 steps, by a server that has just started: drawn, spike and all, and zoomed."""
    runs = lab.folder / "long"
    write_long_metrics(write_run(runs / "long"), 100_000, spike=54_321)
    with _dashboard(runs) as url, chromium() as browser, opened(browser) as page:
        page.goto(url)
        page.get_by_role("link", name="long").wait_for()
        begun = time.monotonic()
        page.get_by_role("link", name="long").click()
        chart = page.get_by_role("img", name="at step 100K").first
        chart.wait_for()
        seconds = time.monotonic() - begun
        found.expect(f"100,000 steps are drawn in {DRAWN:g} s ({seconds:.2f})", seconds < DRAWN)
        found.show(f"100,000 steps drawn in {seconds:.2f} s")
        points = page.evaluate("document.querySelector('.large path').getAttribute('d').length")
        found.expect("the curve is thinned", points < 20_000)
        told = page.locator(".large figcaption").first.inner_text()
        found.expect(f"the spike is told: {told}", "cut off: 99 at step 54,321" in told)
        begun = time.monotonic()
        chart.focus()
        page.keyboard.press("+")
        page.get_by_role("button", name="Show all steps").wait_for()
        zoomed = time.monotonic() - begun
        found.expect(f"a zoom takes less than a second ({zoomed:.2f})", zoomed < 1)


@contextmanager
def _dashboard(runs: Path) -> Iterator[str]:
    """`shardtune dashboard`, as a person starts it; gives its address."""
    command = [sys.executable, "-m", "shardtune", "dashboard", str(runs), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = (line.split() for line in process.stdout)
        yield next(words[1] for words in lines if words[:1] == ["page"]).rstrip("/")
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(20)
        process.stdout.close()
    assert code == 0, f"the dashboard ended with {code}"


@contextmanager
def _training(target: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that would go on for hours; it is killed in the end."""
    command = [
        sys.executable, "-m", "shardtune", "train", *JOB, "train.steps=20000",
        "train.learning_rate=0.002", "evaluate.every=20", f"save.directory={target}",
    ]  # fmt: skip
    with (target.parent / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, env=dict(os.environ)
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


def _lag(page: Any, metrics: Path) -> float:
    """Seconds from the writing of the newest step until the page shows it."""
    step, written = _last_step(metrics), metrics.stat().st_mtime
    page.wait_for_function(f"{SHOWN_STEP} >= {step}")
    seconds = time.time() - written
    time.sleep(0.7)
    return seconds


def _last_step(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    lines = metrics.read_text("utf-8").rpartition("\n")[0].splitlines()
    steps = [line["step"] for line in map(json.loads, lines) if line["kind"] == "step"]
    return steps[-1] if steps else 0


CASES = (
    SeeingCase("dashboard-live", "a run that trains, is compared and is killed", live_run),
    SeeingCase("dashboard-many", "200 runs in a folder", many_runs),
    SeeingCase("dashboard-long", "a run of 100,000 steps", long_run),
)
