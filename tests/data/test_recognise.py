"""A data set's format by its columns, and what a sample of its rows tells."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune.config.job import Columns, TrainSource
from shardtune.core.model.kind import ModelKind
from shardtune.data import recognise as module
from shardtune.data.recognise import (
    SAMPLE_ROWS,
    SampledSource,
    measure_lengths,
    recognise,
    sample_source,
)
from shardtune.errors import DataError
from shardtune.models import tiny
from shardtune.models.set_chat_template import set_chat_template

Row = dict[str, Any]
TURNS = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]


def sampled(folder: Path, *rows: Row) -> SampledSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return sample_source(str(path))


# A row, and the format and columns that it makes for a decoder alone, and for one with an encoder.
ROWS: dict[str, tuple[Row, tuple[str, Row] | None, tuple[str, Row] | None]] = {
    "alpaca": (
        {"instruction": "a", "input": "b", "output": "c", "text": "d"},
        ("instruction", {}), ("instruction", {}),
    ),
    "dolly": (
        {"instruction": "a", "context": "b", "response": "c", "category": "d"},
        ("instruction", {"output": "response", "input": "context"}),
        ("instruction", {"output": "response", "input": "context"}),
    ),
    "OpenOrca": (
        {"id": "1", "system_prompt": "s", "question": "a", "response": "b"},
        (
            "instruction",
            {"instruction": "question", "output": "response", "system": "system_prompt"},
        ),
        ("source_target", {"source": "question", "target": "response"}),
    ),
    "pairs": (
        {"input": "a", "output": "b"},
        ("instruction", {"instruction": "input"}),
        ("source_target", {"source": "input", "target": "output"}),
    ),
    "capitals": (
        {"Question": "a", "Answer": "b"},
        ("instruction", {"instruction": "Question", "output": "Answer"}),
        ("source_target", {"source": "Question", "target": "Answer"}),
    ),
    "summaries": (
        {"article": "a", "highlights": "b", "id": "c"},
        ("instruction", {"instruction": "article", "output": "highlights"}),
        ("source_target", {"source": "article", "target": "highlights"}),
    ),
    "messages": ({"messages": TURNS, "prompt": "a"}, ("chat", {}), None),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "a"}]}, ("chat", {}), None),
    "turns as JSON": ({"messages": json.dumps(TURNS)}, ("chat", {}), None),
    "turns": ({"dialog": TURNS}, ("chat", {"messages": "dialog"}), None),
    "text": ({"text": "a", "label": 1}, ("completion", {}), None),
    "content": ({"content": "a", "url": "b"}, ("completion", {"text": "content"}), None),
    "FLAN's": (
        {"inputs": "a", "targets": "b"},
        ("instruction", {"instruction": "inputs", "output": "targets"}),
        ("source_target", {"source": "inputs", "target": "targets"}),
    ),
    "ids": ({"input_ids": [1, 2], "attention_mask": [1, 1]}, ("pretokenized", {}), None),
    "ids and labels": (
        {"input_ids": [1, 2], "labels": [1, 2]}, ("pretokenized", {}), ("pretokenized", {}),
    ),
    "messages that are none": ({"messages": 3, "text": "a"}, ("completion", {}), None),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("name", ROWS)
def test_a_format_is_known_by_its_columns(name: str, kind: ModelKind, tmp_path: Path) -> None:
    row, alone, paired = ROWS[name]
    expected = alone if kind == "decoder" else paired
    source = sampled(tmp_path, row, row)
    if expected is None:
        with pytest.raises(DataError, match=r"a model with an encoder .* looked for .* source"):
            recognise(source, kind)
        return
    found = recognise(source, kind)
    assert (found.format, found.columns) == expected
    setting = TrainSource(path=source.path, format=found.format, columns=Columns(**found.columns))
    if name != "ShareGPT":  # whose row has no answer
        lengths = measure_lengths(source, setting, tiny.tokens(), frozenset(), kind)
        assert (len(lengths.lengths), lengths.unread) == (2, 0)


def test_columns_that_make_no_format_are_named_with_what_they_hold(tmp_path: Path) -> None:
    source = sampled(tmp_path, {"a": 1, "b": "x", "c": None, "d": [2]})
    with pytest.raises(DataError) as caught:
        recognise(source, "decoder")
    (problem,) = caught.value.problems
    assert "it has 'a' (int), 'b' (text), 'c' (nothing), 'd' (token ids); looked for" in str(
        problem
    )
    assert "text (completion); input_ids (pretokenized)" in problem.fact
    assert "columns: {text: NAME}" in problem.fix


PASTED: dict[str, tuple[list[Row], str, str]] = {
    "rated answers": (
        [{"prompt": "a", "completion": good, "label": good == "b"} for good in ("b", "c")],
        "KTO", "{instruction: prompt, output: completion}",
    ),
    "turns in two columns": (
        [{"prompt": TURNS[:1], "completion": TURNS[1:]}], "turns of one conversation", "{}",
    ),
    "nested": ([{"id": 1, "data": {"instruction": "a", "output": "b"}}], "holds objects", "{}"),
    "a list of instances": (
        [{"instruction": "a", "instances": [{"input": "", "output": "b"}] * 2}], "objects", "{}",
    ),
    "numbers": ([{"instruction": 1, "output": 2}], "hold numbers", "{}"),
}  # fmt: skip
"""Rows, a word of what is said of them, and the columns after the fix."""


@pytest.mark.skipif(shutil.which("jq") is None, reason="the fixes are commands of jq")
@pytest.mark.parametrize("name", PASTED)
def test_a_fix_works_as_it_is_pasted(name: str, tmp_path: Path) -> None:
    rows, told, columns = PASTED[name]
    with pytest.raises(DataError, match=told) as caught:
        recognise(sampled(tmp_path, *rows), "decoder")
    command = caught.value.problems[0].fix.partition("jq ")[2]
    command = command.replace("OLD", str(tmp_path / "rows.jsonl"))
    command = command.replace("NEW", str(tmp_path / "new.jsonl"))
    subprocess.run(f"jq {command}", shell=True, check=True)
    found = recognise(sample_source(str(tmp_path / "new.jsonl")), "decoder")
    assert found.columns == yaml.safe_load(columns)


PREFERENCES: dict[str, tuple[Row, str]] = {
    "texts": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "instruction"),
    "turns": ({"chosen": TURNS, "rejected": TURNS}, "chat"),
    "whole texts": ({"chosen": "a", "rejected": "b"}, "completion"),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_pairs_of_answers_are_told_how_the_better_one_is_trained(name: str, tmp_path: Path) -> None:
    row, format = PREFERENCES[name]
    source = sampled(tmp_path, row)
    with pytest.raises(DataError, match="preference training") as caught:
        recognise(source, "decoder")
    setting = yaml.safe_load("{" + caught.value.problems[0].fix.partition(": ")[2] + "}")
    assert setting["format"] == format
    tokenizer = tiny.tokens()
    set_chat_template(tokenizer, "zephyr")
    lengths = measure_lengths(
        source, TrainSource(path=source.path, **setting), tokenizer, frozenset(), "decoder"
    )
    assert (len(lengths.lengths), lengths.unread) == (1, 0)


def test_a_table_without_a_header_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{'word ' * 20},an answer\nanother question,another answer\n")
    with pytest.raises(DataError, match="the first line has to name the columns"):
        recognise(sample_source(str(path)), "decoder")


def test_rows_are_drawn_from_the_whole_set(tmp_path: Path) -> None:
    source = sampled(tmp_path, *({"text": f"{n}"} for n in range(4 * SAMPLE_ROWS)))
    drawn = [int(row.value["text"]) for row in source.sample]
    assert (source.rows, source.exact, len(drawn)) == (4 * SAMPLE_ROWS, True, SAMPLE_ROWS)
    assert sum(n >= 2 * SAMPLE_ROWS for n in drawn) > SAMPLE_ROWS // 3
    assert source == sample_source(source.path)


def test_of_a_large_file_only_some_parts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_WHOLE_BYTES", 100)
    monkeypatch.setattr(module, "SAMPLED_PARTS", 2)
    monkeypatch.setattr("shardtune.data.data_file.PART_BYTES", 1000)
    monkeypatch.setattr("shardtune.data.data_file.READ_BLOCK", 500)
    source = sampled(tmp_path, *({"text": f"{n:0100}"} for n in range(100)))
    assert len(source.opened.parts) > 4
    assert not source.exact
    assert source.rows == pytest.approx(100, abs=1)
    drawn = [int(row.value["text"]) for row in source.sample]
    assert len(drawn) < 50
    assert max(drawn) > 50


def test_copies_count_once(tmp_path: Path) -> None:
    source = sampled(tmp_path, *({"text": f"{n % 5}"} for n in range(40)))
    assert (source.rows, source.different_rows) == (40, 5)


@pytest.mark.parametrize(("text", "told"), [("", "it holds no rows"), ("{\n", "broken JSON")])
def test_a_file_without_a_row_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=told):
        sample_source(str(path))


def test_lengths_are_those_of_the_rows_that_can_be_read(tmp_path: Path) -> None:
    source = sampled(tmp_path, {"text": "abc"}, {"text": ""}, {"text": "abcdef"})
    tokenizer = tiny.tokens()
    setting = TrainSource(path=source.path, format="completion")
    stops = frozenset({tokenizer.eos_token_id})
    found = measure_lengths(source, setting, tokenizer, stops, "decoder")
    assert found.lengths.tolist() == [4, 7]  # a token a letter, and the end
    assert (found.targets, found.stopped, found.unread) == (None, 2, 1)


def test_sides_of_a_pair_are_measured_apart(tmp_path: Path) -> None:
    source = sampled(tmp_path, {"source": "abc", "target": "defgh"})
    setting = TrainSource(path=source.path, format="source_target")
    found = measure_lengths(source, setting, tiny.tokens(), frozenset(), "encoder_decoder")
    assert found.targets is not None
    assert (found.lengths.tolist(), found.targets.tolist()) == ([3], [6])


def test_a_set_of_which_no_row_can_be_read_is_refused(tmp_path: Path) -> None:
    source = sampled(tmp_path, {"messages": [{"role": "user"}]})
    setting = TrainSource(path=source.path, format="chat")
    with pytest.raises(DataError, match="none of 1 sampled rows can be read as chat: "):
        measure_lengths(source, setting, tiny.tokens(), frozenset(), "decoder")


def test_a_benchmarks_questions_are_named_as_such(tmp_path: Path) -> None:
    """As BFCL writes them: no other name for a column would make an answer of them."""
    asked = [[{"role": "user", "content": "How large is it?"}]]
    rows = [{"id": "simple_0", "question": asked, "function": [{"name": "f"}]}]
    with pytest.raises(
        DataError, match="'question' has questions, and no column has their"
    ) as caught:
        recognise(sampled(tmp_path, *rows), "decoder")
    (problem,) = caught.value.problems
    assert "'question' (lists of turns)" in problem.fact
    assert "assistant's turn behind its question" in problem.fix
    answered = [[*asked[0], {"role": "assistant", "content": "Small."}]]
    with pytest.raises(DataError) as caught:
        recognise(sampled(tmp_path, {"question": answered}), "decoder")
    assert "rename its columns" in caught.value.problems[0].fix
