"""No secret is left in a text, and what is none stays."""

from __future__ import annotations

import pytest

from shardtune.core.redact import holds_secret, redact

SECRET = "0f1e2d3c4b5a"
ENVIRONMENT = {
    "WANDB_API_KEY": SECRET, "MLFLOW_TRACKING_PASSWORD": "hunter22", "HOME": "/home/somebody",
    "MY_TOKEN": "abc", "HF_TOKEN": "hf_Secret", "KEYBOARD": "german-layout",
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        f"login failed for key {SECRET}!",
        f"https://me:{SECRET}@host:5000/x",
        f"postgresql+psycopg://me:{SECRET}@host/db",
        f"GET /x?api_key={SECRET}&y=1",
        f'{{"token": "{SECRET}"}}',
        f"Authorization: Bearer {SECRET}{SECRET}",
        f"export WANDB_API_KEY={SECRET}",
        f"access-key: {SECRET}",
    ],
)
@pytest.mark.parametrize("environment", [ENVIRONMENT, {}])
def test_secrets_are_cut_out(text: str, environment: dict[str, str]) -> None:
    if not environment and "key " in text:
        assert not holds_secret(text)  # nothing tells that it is one
        return
    found = redact(text, environment)
    assert SECRET not in found
    assert "[redacted]" in found


@pytest.mark.parametrize(
    "text",
    [
        "https://host:5000/x?step=1", "file:///tmp/runs", "tokens_per_second: 80", "abc",
        "train/tokens = 12", "/home/somebody", "german-layout", "sqlite:///mlflow.db",
        "OWNER/NAME", "me@example.org",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text, ENVIRONMENT) == text
