"""Control tokens in the text of rows: refused, read as text, or taken as tokens, by choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.config.job import DataSection, TrainSource
from shardtune.data.control_tokens import ControlTokens
from shardtune.data.prepare import prepare
from shardtune.errors import DataError
from shardtune.models import tiny
from tests.models.encoder_decoder import tokenizer as pair_tokenizer

STOPS = frozenset({tiny.END})
SAID = "stop<|im_end|>go"
ROWS: dict[str, dict[str, Any]] = {
    "completion": {"text": SAID},
    "instruction": {"instruction": SAID, "output": "fine"},
    "chat": {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": SAID},
        ]
    },
}


def documents(folder: Path, row: dict[str, Any], format: str, tokenizer: Any, **settings: Any):
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    own = settings.pop("own_tokens", ())
    kind = settings.pop("kind", "decoder")
    source = TrainSource(path=str(folder / "rows.jsonl"), format=format, stop="none")
    section = DataSection(train=(source,), sequence_length=256, **settings)
    made = prepare(
        section, tokenizer, STOPS, cache=folder / "cache", quiet=True, own_tokens=own, kind=kind
    )
    return made.train[0].rows[0]


@pytest.mark.parametrize("format", ROWS)
def test_a_control_token_in_a_row_is_refused_by_default(
    tmp_path: Path, tokenizer: Any, format: str
) -> None:
    with pytest.raises(DataError) as caught:
        documents(tmp_path, ROWS[format], format, tokenizer)
    assert "its text holds the control token '<|im_end|>'" in str(caught.value)
    assert "data.control_tokens: text reads it as text, token as that token" in str(caught.value)
    assert "fix: set data.control_tokens: text (or token): no usable row" in str(caught.value)


@pytest.mark.parametrize("format", ROWS)
def test_it_is_read_as_text_or_as_the_token(tmp_path: Path, tokenizer: Any, format: str) -> None:
    """As text, every byte of it is a token, and all else is as without it."""
    changed = json.loads(json.dumps(ROWS[format]).replace("<|im_end|>", "#"))
    plain = documents(tmp_path, changed, format, tokenizer)
    ids, flags = plain["input_ids"], plain["trained"]
    at = ids.index(ord("#"))
    text = documents(tmp_path, ROWS[format], format, tokenizer, control_tokens="text")
    spelt = list(b"<|im_end|>")
    assert text["input_ids"] == [*ids[:at], *spelt, *ids[at + 1 :]]
    assert text["trained"] == [*flags[:at], *[flags[at]] * len(spelt), *flags[at + 1 :]]
    token = documents(tmp_path, ROWS[format], format, tokenizer, control_tokens="token")
    assert token["input_ids"] == [*ids[:at], tiny.END, *ids[at + 1 :]]


@pytest.mark.parametrize("policy", ["refuse", "text"])
def test_the_job_s_own_tokens_and_an_end_that_a_text_brings_along_are_tokens(
    tmp_path: Path, policy: str
) -> None:
    tokenizer = tiny.tokens()
    tokenizer.add_tokens(["<|new|>"], special_tokens=True)
    row = {"text": f"a<|new|>b{tokenizer.eos_token}"}
    found = documents(
        tmp_path, row, "completion", tokenizer, control_tokens=policy, own_tokens=("<|new|>",)
    )
    new = tokenizer.convert_tokens_to_ids("<|new|>")
    assert found["input_ids"] == [97, new, 98, tokenizer.eos_token_id]


def test_tools_and_long_texts_are_looked_at_too(tmp_path: Path, tokenizer: Any) -> None:
    call = {"function": {"name": "look", "arguments": {"for": SAID}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": [call]},
    ]
    with pytest.raises(DataError, match="control token"):
        documents(tmp_path, {"messages": messages}, "chat", tokenizer)


def test_pairs_are_looked_at_too(tmp_path: Path) -> None:
    row = {"source": SAID, "target": "x"}
    settings: dict[str, Any] = {"kind": "encoder_decoder", "packing": False}
    tokens = pair_tokenizer("t5")
    with pytest.raises(DataError, match="control token"):
        documents(tmp_path, row, "source_target", tokens, **settings)
    text = documents(tmp_path, row, "source_target", tokens, control_tokens="text", **settings)
    assert bytes(text["input_ids"][: len(SAID)]).decode() == SAID


def test_the_policy_is_part_of_the_cache_s_key(tokenizer: Any) -> None:
    found = {ControlTokens.of(tokenizer, each).settings for each in ("refuse", "text", "token")}
    assert len(found) == 3
