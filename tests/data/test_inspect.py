"""What `shardtune data` shows."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from shardtune.config.job import DataSection, Source, TrainSource
from shardtune.data.inspect import document_text, histogram, view
from shardtune.data.prepare import prepare
from shardtune.models import tiny

ROW = {"instruction": "Say hé 😀.", "output": "[bold]hé[/bold] 😀"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "code.jsonl").write_text(json.dumps(ROW) + '\n{"instruction": "a", "output": 5}\n')
    (folder / "words.jsonl").write_text(json.dumps({"text": "beep \x1b[31m\x07 \x9b done"}))
    section = DataSection(
        train=(TrainSource(path=str(folder / "code.jsonl"), format="instruction", weight=0.5),),
        eval=(Source(path=str(folder / "words.jsonl"), format="completion"),),
        bad_rows="skip",
    )
    return prepare(section, tokenizer, frozenset({tiny.END}), cache=folder, quiet=True)


def printed(shown, **settings):
    console = Console(file=io.StringIO(), width=120, **settings)
    console.print(shown)
    return console.file.getvalue()


def test_a_document_shows_what_is_trained(prepared, tokenizer):
    text = document_text(prepared.train[0], 0, tokenizer)
    assert text.plain == (
        "<|im_start|>user\nSay hé 😀.<|im_end|>\n<|im_start|>assistant\n"
        "‹[bold]hé[/bold] 😀<|im_end|>›\n"
    )
    trained = [span for span in text.spans if "green" in str(span.style)]
    coloured = "".join(text.plain[span.start : span.end] for span in trained)
    assert coloured == "‹[bold]hé[/bold] 😀<|im_end|>›"
    special = [
        text.plain[span.start : span.end] for span in text.spans if "magenta" in str(span.style)
    ]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]


def test_a_text_can_t_command_the_terminal(prepared, tokenizer):
    text = document_text(prepared.eval[0], 0, tokenizer)
    assert text.plain == "b‹eep ␛[31m␇ \ufffd done<|im_end|>›"


def test_the_numbers(prepared, tokenizer):
    shown = printed(view(prepared, tokenizer, 0))
    cells = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in shown.splitlines()
        if line.count("│") == 4
    }
    length = int(prepared.train[0].lengths[0])
    assert cells["format"] == ["instruction", "completion"]
    assert cells["weight"] == ["0.5", "1"]
    assert cells["rows"] == ["2", "1"]
    assert cells["documents"] == ["1", "1"]
    assert cells["bad rows"] == ["1", "0"]
    assert cells["length max"][0] == cells["tokens"][0] == str(length)
    assert cells["trained"][0] == f"{prepared.train[0].report.labels / length:.1%}"
    assert cells["ends trained"] == ["100.0%", "100.0%"]
    assert "‹trained›" not in shown


def test_examples_come_with_a_legend(prepared, tokenizer):
    shown = printed(view(prepared, tokenizer, 2))
    assert "‹trained›, not trained, special token" in shown
    assert "code:0 (train): " in shown
    assert "words:0 (eval): " in shown
    assert "code:1" not in shown
    assert "[bold]hé[/bold]" in shown
    assert "\x1b" not in shown
    assert "\x1b[" in printed(view(prepared, tokenizer, 1), force_terminal=True)


def test_a_blank_before_an_answer_is_kept(real_tokenizer, tmp_path):
    path = tmp_path / "talk.jsonl"
    turns = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Good day"}]
    path.write_text(json.dumps({"messages": turns}))
    section = DataSection(train=(TrainSource(path=str(path), format="chat"),))
    stops = frozenset({real_tokenizer.eos_token_id})
    (prepared,) = prepare(section, real_tokenizer, stops, cache=tmp_path, quiet=True).train
    text = document_text(prepared, 0, real_tokenizer).plain
    assert text.replace("‹", "").replace("›", "") == real_tokenizer.decode(
        prepared.rows[0]["input_ids"]
    )
    assert text.split("‹")[1].split("›")[0].strip() == f"Good day{real_tokenizer.eos_token}"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([8], "       █"),
        ([1, 3, 5, 7, 8], "▄▄▄█"),
        ([8] * 1000 + [1], " ▁     █"),  # the single one shows
    ],
)
def test_histogram(values, expected):
    assert histogram(np.array(values, dtype=np.int32), bars=len(expected) or 8) == expected
