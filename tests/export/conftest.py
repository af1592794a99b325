"""One finished run for all tests of exports: none of them changes it."""

from __future__ import annotations

import pytest

from shardtune.export.source import ExportSource
from tests.export.tuned import finished


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> ExportSource:
    return finished(tmp_path_factory.mktemp("llama"))
