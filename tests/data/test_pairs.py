"""Source-target pairs: what becomes of a row, how it is cut, and how a micro-batch is laid out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtune.config.job import Columns, DataSection, Source, TrainSource
from shardtune.core.step import IGNORED
from shardtune.data.dataset import PreparedSet
from shardtune.data.encode import Tokens
from shardtune.data.formats import make_format
from shardtune.data.loader import Loader
from shardtune.data.pairs import PAIRS, make_pair_format
from shardtune.data.prepare import prepare
from shardtune.data.records import BadRow, SourceRecord
from shardtune.errors import DataError
from tests.models.encoder_decoder import END, PAD, START, tokenizer


def sides(family: str, format: str, row: dict[str, Any], **settings: Any) -> tuple[str, str]:
    """The texts of source and target, special tokens included."""
    tokens = tokenizer(family)
    source = Source(path="some.jsonl", format=format, **settings)
    (found,) = make_pair_format(source, tokens, 64).documents([SourceRecord(1, row)])
    assert isinstance(found, Tokens), found
    border = int(found.trained.argmax())
    assert not found.trained[:border].any()
    assert found.trained[border:].all()
    return tokens.decode(found.ids[:border]), tokens.decode(found.ids[border:])


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_common_names_are_found(names: tuple[str, str]) -> None:
    row = {"id": "7", names[0]: "Read me.", names[1]: "Done."}
    assert sides("t5", "source_target", row) == ("Read me.<|im_end|>", "Done.<|im_end|>")


def test_a_tokenizer_that_begins_a_text_begins_both_sides() -> None:
    """As transformers' `text_target=` does for BART."""
    found = sides("bart", "source_target", {"source": "a", "target": "b"})
    assert found == ("<|im_start|>a<|im_end|>", "<|im_start|>b<|im_end|>")


@pytest.mark.parametrize(
    "columns",
    [
        {"source": "de", "target": "en"},
        {"source": "de"},  # `target` is one of the common names
        {"target": "en"},
    ],
)
def test_named_columns(columns: dict[str, str]) -> None:
    row = {"de": "ja", "en": "yes", "source": "ja", "target": "yes"}
    found = sides("t5", "source_target", row, columns=Columns(**columns))
    assert found == ("ja<|im_end|>", "yes<|im_end|>")


def test_a_prefix_stands_before_the_source() -> None:
    found = sides("t5", "source_target", {"source": "a", "target": "b"}, prefix="summarize: ")
    assert found == ("summarize: a<|im_end|>", "b<|im_end|>")


def test_an_instruction_is_a_source() -> None:
    row = {"system": "Be brief.", "instruction": "Add.", "input": "1, 2", "output": "3"}
    expected = ("Be brief.\n\nAdd.\n\n1, 2<|im_end|>", "3<|im_end|>")
    assert sides("t5", "instruction", row) == expected


def test_pretokenized_labels_have_a_length_of_their_own() -> None:
    """As seq2seq collators pad them: with -100 behind."""
    row = {"input_ids": [72, 105, END], "labels": [72, END, IGNORED, IGNORED]}
    assert sides("t5", "pretokenized", row) == ("Hi<|im_end|>", "H<|im_end|>")


PADDED = {"input_ids": [72, 105, END, PAD, PAD], "attention_mask": [1, 1, 1, 0, 0]}


@pytest.mark.parametrize("labels", [[72, END, PAD, PAD], [72, END, PAD, IGNORED], [72, END]])
def test_padding_of_pretokenized_rows_is_cut_off(labels: list[int]) -> None:
    """As `tokenizer(padding="max_length")` stores both sides."""
    found = sides("t5", "pretokenized", PADDED | {"labels": labels})
    assert found == ("Hi<|im_end|>", "H<|im_end|>")


def test_sources_may_be_padded_on_the_left() -> None:
    row = {"input_ids": [PAD, 72, END], "attention_mask": [0, 1, 1], "labels": [72, END]}
    assert sides("t5", "pretokenized", row) == ("H<|im_end|>", "H<|im_end|>")


def test_an_end_that_also_pads_ends_a_target_once() -> None:
    tokens = tokenizer("t5")
    tokens.pad_token = tokens.eos_token
    made = make_pair_format(Source(path="some.jsonl", format="pretokenized"), tokens, 64)
    for labels in ([72, 105, END, END, END], [72, 105, END], [72, 105]):
        (found,) = made.documents([SourceRecord(1, {"input_ids": [72], "labels": labels})])
        assert isinstance(found, Tokens), found
        assert found.ids.tolist() == [72, *labels[:3]]


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("source_target", {"text": "a"}, "no column 'source'"),
        ("source_target", {"document": "a"}, "no column 'summary'"),
        ("source_target", {"source": "a", "target": " "}, "'target' is empty"),
        ("pretokenized", {"input_ids": [1]}, "no column 'labels'"),
        ("pretokenized", {"input_ids": [1], "labels": [IGNORED]}, "nothing but -100"),
        ("pretokenized", {"input_ids": [1], "labels": [IGNORED, 2]}, "'labels' holds -100"),
        ("pretokenized", {"input_ids": [1], "labels": [PAD, PAD]}, "nothing but padding (256)"),
        ("pretokenized", PADDED | {"attention_mask": [0] * 5, "labels": [2]}, "nothing but 0"),
        ("pretokenized", PADDED | {"attention_mask": [1], "labels": [2]}, "5 input_ids, but 1 in"),
        ("pretokenized", {"input_ids": [999], "labels": [2]}, "'input_ids' holds 999"),
    ],
)
def test_rows_that_are_no_pair(format: str, row: dict[str, Any], reason: str) -> None:
    made = make_pair_format(Source(path="some.jsonl", format=format), tokenizer("t5"), 64)
    (found,) = made.documents([SourceRecord(3, row)])
    assert isinstance(found, BadRow)
    assert found.number == 3
    assert reason in found.reason


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"format": "chat"}, "format: chat makes one sequence"),
        ({"format": "completion"}, "format: completion makes one sequence"),
        ({"format": "instruction", "template": "chat"}, "a chat template makes one sequence"),
        ({"format": "source_target", "overflow": "split"}, "belongs to its target"),
    ],
)
def test_what_no_pair_can_be_made_of(settings: dict[str, Any], fact: str) -> None:
    with pytest.raises(DataError, match=fact):
        make_pair_format(Source(path="some.jsonl", **settings), tokenizer("t5"), 64)


def test_a_decoder_is_refused_pairs_with_what_to_write() -> None:
    source = Source(path="some.jsonl", format="source_target")
    with pytest.raises(DataError, match="instruction: SOURCE, output: TARGET"):
        make_format(source, tokenizer("t5"))


# A whole data set ---------------------------------------------------------------------------------

ROWS = [("abc", "x"), ("s" * 30, "t" * 30), ("de", "fgh")]


def prepared(folder: Path, rows: Sequence[tuple[str, str]] = ROWS, **settings: Any) -> PreparedSet:
    file = folder / "pairs.jsonl"
    lines = (json.dumps({"source": source, "target": target}) for source, target in rows)
    file.write_text("\n".join(lines), encoding="utf-8")
    section = section_of(file, **settings)
    found = prepare(
        section, tokenizer("t5"), frozenset({END}), cache=folder / "cache", quiet=True,
        kind="encoder_decoder",
    )  # fmt: skip
    return found.train[0]


def section_of(file: Path, **settings: Any) -> DataSection:
    source = TrainSource(path=str(file), format="source_target", name="pairs", **settings)
    return DataSection(train=(source,), sequence_length=12, target_length=8, shuffle=False)


def test_each_side_is_cut_to_its_length(tmp_path: Path) -> None:
    """A source keeps its end, as the tokenizer would put it there; a target isn't taught one."""
    found = prepared(tmp_path)
    assert found.paired
    assert found.report.truncated == 1
    assert found.report.truncated_tokens == 31 + 31 - 12 - 8
    assert found.report.stops_trained == 2
    assert found.rows[1]["input_ids"] == [*b"s" * 11, END, *b"t" * 8]


def test_long_pairs_may_be_dropped(tmp_path: Path) -> None:
    found = prepared(tmp_path, overflow="drop")
    assert len(found.rows) == 2
    assert found.report.dropped == 1


def test_another_target_length_is_another_data_set(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    other = section_of(tmp_path / "pairs.jsonl").model_copy(update={"target_length": 31})
    (again,) = prepare(
        other, tokenizer("t5"), frozenset({END}), cache=tmp_path / "cache", quiet=True,
        kind="encoder_decoder",
    ).train  # fmt: skip
    assert first.digest != again.digest
    assert again.labels[1] == 31


def loader(
    folder: Path,
    ranks: int = 1,
    rows: Sequence[tuple[str, str]] = ROWS,
    micro_batch: int = 3,
) -> Loader:
    from shardtune.data.dataset import PreparedData

    made = prepared(folder, rows)
    return Loader(
        PreparedData((made,), ()), section_of(folder / "pairs.jsonl"), seed=0, global_batch=3,
        micro_batch=micro_batch, rank=ranks - 1, ranks=ranks, pad_id=PAD,
    )  # fmt: skip


def test_sources_and_targets_are_padded_apart(tmp_path: Path) -> None:
    data = loader(tmp_path)
    assert not data.packing
    ((batch,),) = data.steps(0, 1)
    assert batch.source_mask is not None
    assert batch.input_ids.shape == batch.source_mask.shape == (3, 12)
    assert batch.targets.shape == (3, 8)
    rows = {sample: row for row, sample in enumerate(batch.samples)}
    first = rows["pairs:0"]
    assert batch.input_ids[first].tolist() == [*b"abc", END, *[PAD] * 8]
    assert batch.source_mask[first].tolist() == [1] * 4 + [0] * 8
    assert batch.targets[first].tolist() == [*b"x", END, *[IGNORED] * 6]
    assert batch.labels == 2 + 8 + 4
    assert batch.tokens == batch.labels + 4 + 12 + 3


def test_a_rank_without_rows_reads_something(tmp_path: Path) -> None:
    """A mask of nothing would make numbers that are none, and their gradients with them."""
    ((batch,),) = loader(tmp_path, ranks=4).steps(0, 1)
    assert batch.labels == 0
    assert batch.source_mask is not None
    assert batch.source_mask.sum() == 1
    assert (batch.targets == IGNORED).all()


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_the_largest_micro_batch_has_the_longest_of_both_sides(
    tmp_path: Path, micro_batch: int
) -> None:
    """One pair has the longest source, another the longest target, and most have most of both."""
    rows = [("s" * 11, "t"), ("s", "t" * 7), *[("s" * 7, "t" * 6)] * 3]
    largest = loader(tmp_path, rows=rows, micro_batch=micro_batch).largest()
    assert len(largest) == 3 // micro_batch
    for batch in largest:
        assert batch.source_mask is not None
        assert batch.input_ids.shape == batch.source_mask.shape == (micro_batch, 12)
        assert batch.targets.shape == (micro_batch, 8)


def test_padding_is_counted_on_both_sides(tmp_path: Path) -> None:
    data = loader(tmp_path, rows=[("s" * 11, "t"), ("s", "t" * 7), ("s" * 2, "t" * 2)])
    ((batch,),) = data.steps(0, 1)
    computed = batch.input_ids.numel() + batch.targets.numel()
    assert computed == 3 * (12 + 8)
    assert data.padding_share(1) == pytest.approx(1 - batch.tokens / computed)


def test_ids_are_those_of_the_tokenizer() -> None:
    ids = tokenizer("bart")("Hi")["input_ids"]
    np.testing.assert_array_equal(ids, [START, *b"Hi", END])
