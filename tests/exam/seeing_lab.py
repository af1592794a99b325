"""What the cases of `tests.exam.seeing` share: one short run, our commands, and a browser."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.exam.named_cases import NamedCase

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
STEPS = 6
PATIENCE = 300.0  # seconds to wait for what a process does

Theme = Literal["light", "dark"]


@dataclass
class Seen:
    """A page, and what went wrong while it was open."""

    page: Any
    problems: list[str] = field(default_factory=list)
    """Errors on the console, of scripts, and of the page's own policy."""
    requests: list[str] = field(default_factory=list)
    """What it asked for besides itself."""


@dataclass(frozen=True)
class SeeingLab:
    """A folder in which things are tried."""

    folder: Path
    pictures: bool = False

    @cached_property
    def run(self) -> Path:
        """The demo recipe, a few steps of it."""
        target = self.folder / "quickstart"
        if not (target / "result").is_dir():
            done = self.shardtune(
                "train", "recipes/quickstart.yaml", f"train.steps={STEPS}", "evaluate.every=3",
                "train.precision=fp32", f"save.directory={target}", "save.every=3",
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"the run that all cases need failed:\n{done.stderr}")
        return target

    def shardtune(self, *arguments: str, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
        """Runs a command of ours as a person would, in the repository's root."""
        return subprocess.run(
            [sys.executable, "-m", "shardtune", *arguments], cwd=ROOT, env=dict(os.environ),
            timeout=timeout, capture_output=True, text=True, check=False,
        )  # fmt: skip

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A command under way, whose processes are gone in the end whatever happens."""
        process = subprocess.Popen(
            [sys.executable, "-m", "shardtune", *arguments], cwd=ROOT, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            yield process
        finally:
            for each in [*self.ranks_of(process), process]:
                each.kill()
            process.communicate()

    def ranks_of(self, process: subprocess.Popen[str]) -> list[psutil.Process]:
        """The processes that a launcher has started."""
        if process.poll() is not None:
            return []
        return psutil.Process(process.pid).children()

    def wait_until(self, come: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        """Waits while the process lives, for some minutes at most."""
        deadline = time.monotonic() + PATIENCE
        while not come():
            if process.poll() is not None:
                raise RuntimeError(f"the command has ended:\n{process.communicate()[1]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing came in {PATIENCE:.0f} s")
            time.sleep(0.05)

    @contextmanager
    def open(self, file: Path, *, theme: Theme, width: int) -> Iterator[Seen]:
        """The file in a real Chromium without a network."""
        from playwright.sync_api import sync_playwright

        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            context = browser.new_context(
                viewport={"width": width, "height": 1000}, color_scheme=theme, offline=True
            )
            seen = Seen(context.new_page())
            seen.page.on("console", lambda said: _note(seen, said))
            seen.page.on("pageerror", lambda error: seen.problems.append(str(error)))
            seen.page.on("request", lambda asked: seen.requests.append(asked.url))
            seen.page.goto(file.as_uri())
            seen.requests.remove(file.as_uri())
            yield seen
            browser.close()


def _note(seen: Seen, said: Any) -> None:
    if said.type in ("error", "warning"):
        seen.problems.append(said.text)


SeeingCase = NamedCase[SeeingLab]
