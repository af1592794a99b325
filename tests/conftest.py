"""Tests marked `build` run where what they need is compiled already, or when they are asked for."""

from __future__ import annotations

import pytest

from shardtune.kernels.cpu_bf16 import widen_products
from tests import async_io

widen_products()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
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


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("build") and not async_io.is_compiled():
        async_io.compile_it()
