"""Tokenizers for the tests of preparation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtune.models import tiny

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A token for each byte, ChatML as its chat template: what is trained can be read back."""
    return tiny.tokens()


@pytest.fixture(scope="session", params=["smollm2", "mistral-v3"])
def real_tokenizer(request: pytest.FixtureRequest) -> Any:
    """Tokenizers of real models, where they are at hand."""
    folder = SHARED / "tokenizers" / request.param
    if not folder.is_dir():
        pytest.skip("needs ../shared/tokenizers")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not (SHARED / "data").is_dir():
        pytest.skip("needs ../shared/data")
    return SHARED / "data"
