"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that is handed out is full of NaN, so that a number that nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
