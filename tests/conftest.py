"""What holds for every test: tests marked `build` run where what they need is compiled already, or
when they are asked for; one that starts a process is marked `process`; files marked `early` begin
first, so that no worker is left with minutes of them when the others have ended."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from shardtune.core.host.machine import Machine
from shardtune.core.host.matmul_speed import FAST_PRECISIONS
from shardtune.kernels.measure_matmul import widen_slow_products
from tests import async_io, processes

# Nothing is measured, so that `precision: auto` is the same on every CPU: fp32. A GPU has its own.
if not Machine.here().gpus:
    os.environ.setdefault(FAST_PRECISIONS, "fp32")
widen_slow_products()
platform.platform()  # starts `uname` the first time, and never again
processes.watch()
MNT_DETACH = 2


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis tries fewer examples where `make test-all` is to come; a busy machine is no
    failure."""
    quick = "not long" in config.option.markexpr
    settings.register_profile("shardtune", deadline=None, max_examples=25 if quick else 100)
    settings.load_profile("shardtune")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: dict[Callable[..., Any], bool] = {}
    for item in items:
        if isinstance(item, pytest.Function) and processes.reaches_a_start(item, seen):
            item.add_marker(pytest.mark.process)
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    for cases in _sampled(items).values():
        every = cases[0].get_closest_marker("sampled").args[0]
        for item in (item for number, item in enumerate(cases) if number % every):
            item.add_marker(pytest.mark.long)
    chosen = [item for item in items if item.get_closest_marker("build")]
    if not chosen:
        return
    asked = config.option.markexpr == "build"
    missing = async_io.missing()
    for item in chosen:
        if missing and not (asked and "compiled" in missing):
            item.add_marker(pytest.mark.skip(reason=missing))
        else:
            item.add_marker(pytest.mark.timeout(1800))


def _sampled(items: list[pytest.Item]) -> dict[str, list[Any]]:
    """The cases of each test of which `make test` takes one in so many."""
    found: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            found[item.nodeid.partition("[")[0]].append(item)
    return found


def pytest_runtest_logstart() -> None:
    processes.forget()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("build") and not async_io.is_compiled():
        async_io.compile_it()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    fault = processes.fault(item.nodeid)
    if fault and "not process" in item.config.option.markexpr:  # `make quick`
        pytest.fail(fault, pytrace=False)


class Logged(logging.Handler):
    """Log records that a test looks at. pytest's own plugin visits thousands of loggers, three
    times a test, and is left out (`-p no:logging`)."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> str:
        return "\n".join(record.getMessage() for record in self.records)


@pytest.fixture
def logged() -> Iterator[Logged]:
    """What is logged from now on, by loggers that don't hand it on, too."""
    known = list(logging.root.manager.loggerDict.values())
    alone = [each for each in known if isinstance(each, logging.Logger) and not each.propagate]
    handler = Logged()
    for logger in (logging.root, *alone):
        logger.addHandler(handler)
    yield handler
    for logger in (logging.root, *alone):
        logger.removeHandler(handler)


@pytest.fixture
def mount_disk() -> Iterator[Callable[[Path], None]]:
    """Puts 64 KiB of memory, as a disk, on a folder."""
    system, mounted = ctypes.CDLL(None), []

    def mount(place: Path) -> None:
        name = os.fsencode(place)
        if not hasattr(system, "mount") or system.mount(b"tmpfs", name, b"tmpfs", 0, b"size=64k"):
            pytest.skip("a disk of memory may not be mounted here")
        mounted.append(name)

    yield mount
    for name in mounted:
        system.umount2(name, MNT_DETACH)


@pytest.fixture
def small_disk(tmp_path: Path, mount_disk: Callable[[Path], None]) -> Path:
    """A disk of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount_disk(place)
    return place


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """New memory holds NaN, so whatever reads it before it is written shows."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[False, True], ids=["as here", "as on a GPU"])
def rows_of_lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether joint matrices have rows that begin with a line of the cache. A compiler is told how
    they lie in memory, and what is done step by step has to lie like that, too."""
    from shardtune.kernels import rope, stacked_linear, swiglu_lora

    def padded(like: Any, rows: int, columns: int) -> Any:
        return like.new_zeros(
            rows, -(-columns // stacked_linear.CACHE_LINE) * stacked_linear.CACHE_LINE
        )[:, :columns]

    for module in (stacked_linear, swiglu_lora, rope) if request.param else ():
        monkeypatch.setattr(module, "empty_aligned", padded)
    return bool(request.param)


def pytest_collection_finish() -> None:
    """What the imports left behind is no garbage: a collector that looks through it each time
    takes a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
