"""What holds for every test: tests marked `build` run where what they need is compiled already, or
when they are asked for; one that starts a process is marked `process`."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardtune.core.machine import Machine
from shardtune.core.matmul_speed import FAST_PRECISIONS
from shardtune.kernels.measure_matmul import widen_slow_products
from tests import async_io, processes

# Nothing is measured, so that `precision: auto` is the same on every CPU: fp32. A GPU has its own.
if not Machine.here().gpus:
    os.environ.setdefault(FAST_PRECISIONS, "fp32")
widen_slow_products()
platform.platform()  # starts `uname` the first time, and never again
processes.watch()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: dict[Callable[..., Any], bool] = {}
    for item in items:
        if isinstance(item, pytest.Function) and processes.reaches_a_start(item, seen):
            item.add_marker(pytest.mark.process)
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
