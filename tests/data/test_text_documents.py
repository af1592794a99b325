"""Text files: what a document is, chosen or asked for, wherever the file is cut into parts."""

from __future__ import annotations

import gzip

import pytest

from shardtune.config.job import DataSection, Separator, Source, TrainSource
from shardtune.data import data_file
from shardtune.data.prepare import prepare
from shardtune.data.records import BadRow
from shardtune.data.sources import open_source
from shardtune.models import tiny

STOPS = frozenset({tiny.END})
PLAY = "First Citizen:\nSpeak.\n\nAll:\nSpeak, speak.\n \n\nFirst Citizen:\nYou are all resolved?\n"


def opened(path, content, documents="auto"):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_source(Source(path=str(path), format="completion", documents=documents))


def texts(source):
    return [row.value["text"] for part in source.parts for row in part.rows()]


# The file, the key, and the documents with the lines that they start in.
CASES = {
    "speeches": (
        PLAY, "auto",
        {1: "First Citizen:\nSpeak.", 4: "All:\nSpeak, speak.",
         8: "First Citizen:\nYou are all resolved?"},
    ),
    "a file": (PLAY, "file", {1: PLAY.rstrip("\n")}),
    "lines": ("a b\nc\n", "auto", {1: "a b", 2: "c"}),
    "lines that are asked for": ("a\n\nb\n", "line", {1: "a", 3: "b"}),
    "a blank line in many isn't a border": (
        "\n".join([*map(str, range(60)), "", "x"]), "auto",
        {**{n + 1: str(n) for n in range(60)}, 62: "x"},
    ),
    "a blank line at the end isn't either": ("a\nb\n\n\n", "auto", {1: "a", 2: "b"}),
    "end of text": (
        "One.\n\nTwo.\n<|endoftext|>\nThree.<|endoftext|>", "auto",
        {1: "One.\n\nTwo.", 5: "Three."},
    ),
    "a separator": ("a\n---\nb\nc\n---\n\n---\nd", Separator(separator="\n---\n"),
                    {1: "a", 3: "b\nc", 8: "d"}),
    "Windows' line ends": (
        b"\xef\xbb\xbfa\r\nb\r\n\r\nc\r\n", "auto", {1: "a\nb", 4: "c"},
    ),
    "a separator among Windows' line ends": (
        b"a\r\n---\r\nb\r\n", Separator(separator="\n---\n"), {1: "a", 3: "b"},
    ),
    "indented code keeps its blanks": ("  x\n\n  y\n", "auto", {1: "  x", 3: "  y"}),
    "an empty file": ("", "auto", {}),
    "an empty file as one document": ("\n\n", "file", {}),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(("content", "documents", "expected"), CASES.values(), ids=CASES)
def test_documents(tmp_path, content, documents, expected, packed):
    raw = content if isinstance(content, bytes) else content.encode()
    name = "some.txt.gz" if packed else "some.txt"
    source = opened(tmp_path / name, gzip.compress(raw) if packed else raw, documents)
    rows = [row for part in source.parts for row in part.rows()]
    assert {row.number: row.value["text"] for row in rows} == expected
    assert len(rows) == len(expected)


@pytest.mark.parametrize("block", [1, 3, 7, 50])
@pytest.mark.parametrize("documents", ["blank_line", Separator(separator="\n==\n")])
def test_parts_give_the_same_documents(tmp_path, monkeypatch, block, documents):
    border = "\n\n" if documents == "blank_line" else "\n==\n"
    expected = [f"document {n}\nof {n % 3} lines" + "\nmore" * (n % 3) for n in range(40)]
    monkeypatch.setattr(data_file, "READ_BLOCK", block)
    monkeypatch.setattr(data_file, "PART_BYTES", 3 * block)
    source = opened(tmp_path / "some.txt", border.join(expected), documents)
    assert texts(source) == expected
    assert len(source.parts) > 1 or block < 5
    lines = (tmp_path / "some.txt").read_text().splitlines()
    for part in source.parts:
        for row in part.rows():
            assert lines[row.number - 1] == row.value["text"].splitlines()[0]


def test_a_bad_byte_is_found_in_its_line(tmp_path):
    source = opened(tmp_path / "some.txt", b"one\ntwo\nb\xc3\xa4d \xff\n\nfine\n", "blank_line")
    bad, good = source.parts[0].rows()
    assert isinstance(bad, BadRow)
    assert source.place(bad.number, bad.column) == f"{tmp_path}/some.txt:3:5"
    assert good.value == {"text": "fine"}


def test_another_rule_is_another_data_set(tmp_path):
    rules = ["file", "blank_line", "line", Separator(separator="a"), Separator(separator="b")]
    digests = {opened(tmp_path / "some.txt", PLAY, rule).digest for rule in rules}
    assert len(digests) == len(rules)


def test_what_was_chosen_is_told_and_splitting_is_proposed(tmp_path, tokenizer):
    path = tmp_path / "play.txt"
    path.write_text(PLAY)

    def notes(**settings):
        source = TrainSource(path=str(path), format="completion", **settings)
        section = DataSection(train=(source,), sequence_length=24)
        (prepared,) = prepare(section, tokenizer, STOPS, cache=tmp_path, quiet=True).train
        return prepared.report

    found = notes()
    assert found.unit == "what stands between blank lines"
    assert found.notes == (
        "a document is what stands between blank lines (documents: blank_line, because 33% "
        "of its lines are blank); otherwise set documents: file, documents: line or a separator",
        "1 of 3 rows are longer than data.sequence_length (24): 13 tokens at their ends are "
        "not trained; overflow: split trains them as further documents",
    )
    assert notes(documents="blank_line", overflow="split").notes == ()
    assert notes(documents="file", overflow="split").documents == 4
