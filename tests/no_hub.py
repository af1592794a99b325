"""A hub whose name can't be looked up, as on a node without a network."""

from __future__ import annotations

import pytest


def lose_hub(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks it without a look first tries six times, in 24 s."""
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    patch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")
    patch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    patch.setattr("datasets.config.HF_ENDPOINT", "https://hub.invalid")
    for name in ("http", "https", "all", "no"):
        patch.delenv(f"{name}_proxy", raising=False)
        patch.delenv(f"{name}_proxy".upper(), raising=False)
