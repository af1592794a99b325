"""Preparation: cut to length, counted, kept by content, made once."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtune.config.job import Columns, DataSection, Source, TrainSource
from shardtune.data import cache_digests as digests
from shardtune.data import data_file
from shardtune.data import prepare as prepare_module
from shardtune.data import prepared_cache as store
from shardtune.data import tokenize as tokenise
from shardtune.data.control_tokens import AS_TOKENS
from shardtune.data.dataset import PreparedData
from shardtune.data.encode import Tokens
from shardtune.data.loader import Loader
from shardtune.data.prepare import prepare
from shardtune.data.tokenize import DocumentIndex, RowCounts, _cut
from shardtune.errors import DataError
from shardtune.models import tiny

STOPS = frozenset({tiny.END})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(*words):
    return [{"text": word} for word in words]


def run(section, tokenizer, cache, **settings):
    return prepare(section, tokenizer, STOPS, cache=cache, quiet=True, **settings)


def one(path, tokenizer, cache, *, format="completion", length=64, section=None, **settings):
    """A single set to train on."""
    source = TrainSource(path=str(path), format=format, **settings)
    section = DataSection(train=(source,), sequence_length=length, **(section or {}))
    return run(section, tokenizer, cache).train[0]


def pairs(prepared):
    return [(row["input_ids"], row["trained"]) for row in prepared.rows]


def test_documents_and_report(tmp_path, tokenizer):
    path = write(tmp_path / "words.jsonl", texts("ab", "c" * 9, "d"))
    prepared = one(path, tokenizer, tmp_path / "cache", length=8, weight=0.5)
    assert pairs(prepared) == [
        ([97, 98, tiny.END], [False, True, True]),
        ([99] * 8, [False] + [True] * 7),
        ([100, tiny.END], [False, True]),
    ]
    assert prepared.name == "words"
    assert prepared.weight == 0.5
    assert prepared.lengths.tolist() == [3, 8, 2]
    assert prepared.labels.tolist() == [2, 7, 1]
    assert prepared.lengths.dtype == prepared.labels.dtype == np.int32
    assert dataclasses.asdict(prepared.report) == {
        "name": "words", "path": path, "format": "completion", "rows_read": 3, "documents": 3,
        "tokens": 13, "labels": 10, "truncated": 1, "truncated_tokens": 2, "split": 0,
        "dropped": 0, "untrained": 0, "bad": 0, "stops_trained": 2, "unit": "a row",
        "notes": (
            "1 of 3 rows are longer than data.sequence_length (8): 2 tokens at their ends "
            "are not trained; overflow: split trains them as further documents",
        ),
    }  # fmt: skip


def test_several_formats_and_evaluation_sets(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    section = DataSection(
        train=(
            TrainSource(path=write(tmp_path / "words.jsonl", texts("one")), format="completion"),
            TrainSource(
                path=write(tmp_path / "talk.jsonl", [{"messages": turns}]), format="chat", weight=2
            ),
        ),
        eval=(
            Source(
                path=write(tmp_path / "ids.jsonl", [{"input_ids": [1, 2, 3]}]),
                format="pretokenized",
                name="held-out",
            ),
        ),
    )
    prepared = run(section, tokenizer, tmp_path / "cache")
    assert [part.name for part in prepared.train] == ["words", "talk"]
    assert [part.weight for part in prepared.train] == [1.0, 2.0]
    assert [(part.name, part.weight) for part in prepared.eval] == [("held-out", 1.0)]
    assert pairs(prepared.eval[0]) == [([1, 2, 3], [False, True, True])]


# What _cut makes of a row of 10 tokens, 4 at a time, of which those marked x are trained: the
# kept pieces as (first token, trained marks), and which counter goes up.
CUTS = [
    ("truncate", "..xxxxxxxx", [(0, "..xx")], "truncated"),
    ("truncate", "......xxxx", [], "untrained"),
    ("split", "..xxxxxxxx", [(0, "..xx"), (4, ".xxx"), (8, ".x")], "split"),
    ("split", ".......xxx", [(4, "...x"), (8, ".x")], "split"),
    ("split", "....x.....", [], "untrained"),  # only the first of a piece, which nothing predicts
    ("drop", "xxxxxxxxxx", [], "dropped"),
]


@pytest.mark.parametrize(("overflow", "marks", "expected", "counter"), CUTS)
def test_overflow(overflow, marks, expected, counter):
    tally = RowCounts()
    row = Tokens(np.arange(10, dtype=np.int32), np.array([mark == "x" for mark in marks]))
    pieces = list(_cut(row, 4, overflow, tally))
    assert [
        (int(piece.ids[0]), "".join(".x"[int(mark)] for mark in piece.trained)) for piece in pieces
    ] == expected
    assert getattr(tally, counter) == 1
    assert tally.truncated + tally.split + tally.dropped + tally.untrained == 1
    assert tally.truncated_tokens == (6 if counter == "truncated" else 0)
    assert tally.longest == 10


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(2, 16),
    st.sampled_from(["truncate", "split", "drop"]),
)
def test_no_cut_loses_a_row_uncounted(marks, length, overflow):
    tally = RowCounts()
    row = Tokens(np.arange(len(marks), dtype=np.int32), np.array(marks))
    pieces = list(_cut(row, length, overflow, tally))
    assert (not pieces) == (tally.dropped + tally.untrained == 1)
    for piece in pieces:
        assert 1 < len(piece.ids) <= length
        assert piece.trained.any()
        assert not piece.trained[0]
        assert (np.diff(piece.ids) == 1).all()
        kept = np.array(marks)[piece.ids]
        assert (piece.trained[1:] == kept[1:]).all()


def made(cache):
    return sorted(path.name for path in (cache / "data").iterdir() if not path.name.startswith("."))


def test_what_was_prepared_is_found_again(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path / "words.jsonl", texts("one", "two"))
    first = one(path, tokenizer, tmp_path / "cache")
    monkeypatch.setattr(prepare_module, "tokenize", None)  # nothing may be tokenised again
    again = one(path, tokenizer, tmp_path / "cache")
    assert pairs(again) == pairs(first)
    assert again.report == first.report
    assert (again.labels == first.labels).all()
    copy = write(tmp_path / "copy.jsonl", texts("one", "two"))
    moved = one(copy, tokenizer, tmp_path / "cache", name="other")
    assert moved.report == dataclasses.replace(first.report, name="other", path=copy)


def test_everything_that_decides_the_result_is_in_the_key(tmp_path, tokenizer):
    path = tmp_path / "words.jsonl"
    write(path, [{"text": "one", "body": "two", "instruction": "a", "output": "b"}])
    cache = tmp_path / "cache"
    other = tiny.tokens()
    other.chat_template = other.chat_template.replace("\\n", " ")
    longer = tiny.tokens()
    longer.add_tokens(["one"])

    variants = [
        lambda: one(path, tokenizer, cache),
        lambda: one(path, tokenizer, cache, length=32),
        lambda: one(path, tokenizer, cache, overflow="drop"),
        lambda: one(path, tokenizer, cache, columns=Columns(text="body")),
        lambda: one(path, tokenizer, cache, format="instruction"),
        lambda: one(path, tokenizer, cache, format="instruction", template="plain"),
        lambda: one(path, other, cache),
        lambda: one(path, longer, cache),
    ]
    for count, variant in enumerate(variants, 1):
        variant()
        assert len(made(cache)) == count
    write(path, texts("changed"))
    one(path, tokenizer, cache)
    assert len(made(cache)) == len(variants) + 1
    # What doesn't decide the result finds what is there.
    one(path, tokenizer, cache, weight=3.0, name="other", template="plain")
    one(path, tokenizer, cache, section={"bad_rows": "skip", "packing": False})
    assert len(made(cache)) == len(variants) + 1


def test_several_at_once_make_it_once(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path / "words.jsonl", texts(*(f"word {number}" for number in range(500))))
    calls = []

    def counted(*args, **settings):
        calls.append(1)
        return tokenise.tokenize(*args, **settings)

    monkeypatch.setattr(prepare_module, "tokenize", counted)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(one(path, tokenizer, tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(found) == 4
    assert all(len(prepared.rows) == 500 for prepared in found)


@pytest.mark.process
def test_several_processes_give_the_same(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(data_file, "READ_BLOCK", 512)
    monkeypatch.setattr(data_file, "PART_BYTES", 1024)
    rows = [{"text": f"row {number} " + "x" * (number % 40)} for number in range(400)]
    rows[77] = {"words": "no text"}
    path = write(tmp_path / "words.jsonl", rows)
    alone = one(path, tokenizer, tmp_path / "a", section={"workers": 1, "bad_rows": "skip"})
    both = one(path, tokenizer, tmp_path / "b", section={"workers": 2, "bad_rows": "skip"})
    assert pairs(both) == pairs(alone)
    assert both.report == alone.report
    assert both.report.bad == 1
    (folder,) = made(tmp_path / "b")
    assert len(list((tmp_path / "b" / "data" / folder).glob("*.arrow"))) == 8
    tally, index = store.read(tmp_path / "b" / "data" / folder)
    assert [row.number for one in tally.complaints for row in one.examples] == [78]
    assert index.numbers.tolist() == [*range(1, 78), *range(79, 401)]


class Fatal:
    """A format that ends any other process which looks at it."""

    settings = ("fatal",)
    control = AS_TOKENS

    def __init__(self) -> None:
        self.home = os.getpid()

    def __getattr__(self, name: str) -> object:
        if not name.startswith("__") and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        raise AttributeError(name)


@pytest.mark.process
def test_a_killed_worker_is_told(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(data_file, "READ_BLOCK", 512)
    monkeypatch.setattr(data_file, "PART_BYTES", 1024)
    path = write(tmp_path / "words.jsonl", texts(*(f"row {number}" for number in range(400))))
    monkeypatch.setattr(prepare_module, "make_format", lambda *given: Fatal())
    with pytest.raises(DataError, match="one of the 2 processes that tokenize was killed"):
        one(path, tokenizer, tmp_path / "a", section={"workers": 2})


def test_batches_don_t_change_the_result(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path / "words.jsonl", texts(*(f"{number}" * 9 for number in range(90))))
    whole = one(path, tokenizer, tmp_path / "a")
    monkeypatch.setattr(tokenise, "BATCH_ROWS", 7)
    monkeypatch.setattr(tokenise, "BATCH_BYTES", 100)
    assert pairs(one(path, tokenizer, tmp_path / "b")) == pairs(whole)


def test_skipped_rows_are_listed_also_when_found_again(tmp_path, tokenizer, capsys):
    path = tmp_path / "words.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 5}\n{"text": "broken}\n')
    section = DataSection(
        train=(TrainSource(path=str(path), format="completion"),), bad_rows="skip"
    )
    for _ in range(2):
        prepared = prepare(section, tokenizer, STOPS, cache=tmp_path / "cache", quiet=False)
        assert prepared.train[0].report.bad == 2
        assert prepared.train[0].report.rows_read == 3
        told = capsys.readouterr().err
        assert f"{path}:2: 'text' is int 5, not text\n" in told
        assert f"{path}:3:10: broken JSON: Unterminated string" in told
        assert "2 of 3 rows can't be used" in told
    run(section, tokenizer, tmp_path / "cache")
    assert capsys.readouterr().err == ""


def test_what_is_refused_leaves_nothing_behind(tmp_path, tokenizer):
    path = tmp_path / "words.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 5}\n')
    with pytest.raises(DataError):
        one(path, tokenizer, tmp_path / "cache")
    assert made(tmp_path / "cache") == []
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


def replaced_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("file", ["documents-00000.arrow", "index.npz", "report.json"])
@pytest.mark.parametrize(
    "damage", [cut, replaced_by_a_pipe, lambda path: flip(path, path.stat().st_size // 2)]
)
def test_a_damaged_cache_is_made_anew_with_a_line(tmp_path, tokenizer, capsys, file, damage):
    path = write(tmp_path / "words.jsonl", texts("one", "two"))
    before = pairs(one(path, tokenizer, tmp_path / "cache"))
    (name,) = made(tmp_path / "cache")
    damage(tmp_path / "cache" / "data" / name / file)
    section = DataSection(train=(TrainSource(path=path, format="completion"),), sequence_length=64)
    for said in (f"{path}: its prepared data is damaged ({file}", ""):
        again = prepare(section, tokenizer, STOPS, cache=tmp_path / "cache", quiet=False)
        assert pairs(again.train[0]) == before
        told = capsys.readouterr().err
        assert told.startswith(said) or f"{digests.DIGEST_FILE} or a file" in told
        assert bool(told) == bool(said)


def test_a_cache_is_read_whole_only_when_its_files_were_touched(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path / "words.jsonl", texts("one", "two"))
    one(path, tokenizer, tmp_path / "cache")
    read = []
    hashed = digests._block_digest
    monkeypatch.setattr(digests, "_block_digest", lambda block: read.append(block) or hashed(block))
    one(path, tokenizer, tmp_path / "cache")
    assert not read
    (name,) = made(tmp_path / "cache")
    os.utime(tmp_path / "cache" / "data" / name / "index.npz")  # as a copy would have it
    one(path, tokenizer, tmp_path / "cache")
    assert len(read) == 3
    one(path, tokenizer, tmp_path / "cache")
    assert len(read) == 3


@pytest.mark.parametrize("column", ["input_ids", "trained"])
def test_a_document_that_the_disk_has_changed_is_found_when_it_is_read(tmp_path, tokenizer, column):
    """Without a trace in the files' times, as bits decay."""
    path = write(tmp_path / "words.jsonl", texts("abcdefgh" * 7, "ijklmnop" * 7))
    prepared = one(path, tokenizer, tmp_path / "cache")
    file = store.documents_file(prepared.folder, 0)
    ids = np.array(prepared.rows[1]["input_ids"], dtype=np.int32).tobytes()
    data = file.read_bytes()
    # The flags of both documents are bits, and all but the first of each are set.
    place = data.index(ids) + 8 if column == "input_ids" else data.index(b"\xff" * 6) + 1
    with file.open("r+b") as changed:  # the file that is mapped, not a new one
        changed.seek(place)
        changed.write(bytes([data[place] ^ 4]))
    section = DataSection(train=(TrainSource(path=path, format="completion"),), sequence_length=64)
    loader = Loader(
        PreparedData((prepared,), ()), section, seed=0, global_batch=2, micro_batch=2, rank=0,
        ranks=1, pad_id=0,
    )  # fmt: skip
    with pytest.raises(DataError, match="no longer as it was prepared") as caught:
        list(loader.steps(0, 1))
    assert "--resume" in caught.value.problems[0].fix
    one(path, tokenizer, tmp_path / "cache")  # checked whole, and made anew


def test_a_cache_that_can_t_be_written_is_told(tmp_path, tokenizer):
    path = write(tmp_path / "words.jsonl", texts("one"))
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"preparing .*words.jsonl failed"):
        one(path, tokenizer, tmp_path / "cache")


def test_an_index_knows_each_document():
    document = Tokens(np.array([5, 6, 7], np.int32), np.array([False, True, False]))
    other = Tokens(np.array([5, 6, 8], np.int32), np.array([False, True, True]))
    index = DocumentIndex.of([(3, document), (4, other), (9, document)])
    assert index.finals.tolist() == [6, 8, 6]
    assert index.numbers.tolist() == [3, 4, 9]
    assert index.digests[0].tolist() == index.digests[2].tolist() != index.digests[1].tolist()
    assert len(DocumentIndex.joined([]).lengths) == 0


@pytest.mark.long
def test_every_file_at_hand_can_be_prepared(real_tokenizer, shared_data, tmp_path):
    def train(name, format, **columns):
        return TrainSource(path=str(shared_data / name), format=format, columns=Columns(**columns))

    section = DataSection(
        train=(
            train("gsm8k_train_2000.jsonl", "instruction", instruction="question", output="answer"),
            train("mbpp_text_to_code.jsonl", "instruction", instruction="text", output="code"),
            train("instructions_with_preference.json", "instruction"),
            train("sharegpt_conversations.json", "chat"),
            train("tinystories.jsonl", "completion"),
            *(
                train(f"p3_subset/{path.name}", "instruction",
                      instruction="prompt", output="completion")
                for path in sorted((shared_data / "p3_subset").glob("*.jsonl"))
            ),
        ),
        sequence_length=2048,
        control_tokens="text",  # P3's prompts hold <|endoftext|>
    )  # fmt: skip
    stops = frozenset({real_tokenizer.eos_token_id})
    prepared = prepare(section, real_tokenizer, stops, cache=tmp_path, quiet=True)
    # Counted with `wc -l` and `jq length`.
    assert [part.report.rows_read for part in prepared.train[:5]] == [2000, 384, 1100, 500, 1852]
    for part in prepared.train:
        report = part.report
        kept = report.rows_read - report.dropped - report.untrained - report.bad
        assert report.documents == kept == report.stops_trained + report.truncated
        assert not report.bad
        assert part.lengths.max() <= 2048
        assert len(part.rows) == len(part.lengths) == len(part.labels)


def test_lines_in_disguise_are_read(real_tokenizer, shared_data, tmp_path):
    # A .json file of 400 JSON lines, without an answer that could be learnt.
    with pytest.raises(DataError, match="no row has the column 'messages'"):
        one(shared_data / "bfcl_simple_python.json", real_tokenizer, tmp_path, format="chat")
