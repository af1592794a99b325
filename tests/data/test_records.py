"""Reading: every row is found, and every bad one is named with its place and its reason."""

from __future__ import annotations

import json
from contextlib import suppress

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtune.config.job import Source
from shardtune.data import data_file, sources
from shardtune.data.records import BadRow, JsonReader, SourceRecord, Unreadable
from shardtune.data.sources import open_source
from shardtune.errors import DataError

GOOD = b'{"text": "fine"}'

# The list of the fault exam: a line of a JSONL file, and what has to be said about it.
# None says that the line is a good row; "" that there is no row at all.
BAD_LINES: list[tuple[bytes, str | None, int | None]] = [
    (b'\xef\xbb\xbf{"text": "after a byte order mark"}', None, None),
    (b'{"text": "ends with CRLF"}\r', None, None),
    (b'{"text": "never closed}', "broken JSON: Unterminated string starting at", 10),
    (b'{"text" "no colon"}', "broken JSON: Expecting ':' delimiter", 9),
    (b'{"text": "one"} {"text": "two"}', "broken JSON: something follows the end", 17),
    (b'{"text": "nul \x00 byte"}', "a NUL byte", 15),
    (b'{"text": "caf\xc3\xa9 \xff"}', "not UTF-8 text (byte 0xff)", 16),
    (b'{"text": "half \\ud83d of it"}', "half a surrogate pair (\\ud83d)", 16),
    (b'{"text": "other half \\udE00"}', "half a surrogate pair (\\udE00)", 22),
    (b'{"text": "both halves \\ud83d\\ude00"}', None, None),
    (b'{"text": "a backslash \\\\ud83d and no escape"}', None, None),
    (b"", "", None),
    (b"   \t", "", None),
    (b'[{"text": "a list"}]', "a list, not a JSON object", None),
    (b"42", "a number, not a JSON object", None),
    (b"null", "null, not a JSON object", None),
    (b'"words"', "text, not a JSON object", None),
    (b'{"text": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested more than 100 levels", None),
    (b'{"text": ' + b"[" * 150 + b"]" * 150 + b"}", "nested more than 100 levels", None),
    (b'{"text": ' + b"9" * 5000 + b"}", "broken JSON: Exceeds the limit", None),
    (b'{"text": "one", "text": "two"}', "the key 'text' is written twice", None),
    (b'{"text": "\xf0\x9f\x98\x80 \xd7\xa9\xd7\x9c\xd7\x95\xd7\x9d e\xcc\x81"}', None, None),
    (GOOD, None, None),  # the last line has no newline
]


def rows_of(path, **settings):
    opened = open_source(Source(path=str(path), format="completion", **settings))
    return opened, [row for part in opened.parts for row in part.rows()]


def test_every_bad_line_of_a_jsonl_file_is_named(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b"\n".join(line for line, _, _ in BAD_LINES))
    opened, rows = rows_of(file)
    found = {row.number: row for row in rows}
    for number, (line, reason, column) in enumerate(BAD_LINES, 1):
        if reason == "":
            assert number not in found, line
            continue
        row = found.pop(number)
        if reason is None:
            assert isinstance(row, SourceRecord), (line, row)
            continue
        assert isinstance(row, BadRow), line
        assert row.reason.startswith(reason), line
        assert row.column == column, line
    assert not found
    assert opened.place(3, 10) == f"{file}:3:10"


def test_lines_keep_their_text_and_numbers(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n\r\n{"a": "\\u00e9"}')
    _, rows = rows_of(file)
    assert [(row.number, row.value) for row in rows] == [(1, {"a": "é"}), (3, {"a": "é"})]


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_parts_of_a_file_together_are_the_file(tmp_path, monkeypatch, block):
    monkeypatch.setattr(data_file, "READ_BLOCK", block)
    monkeypatch.setattr(data_file, "PART_BYTES", 3 * block)
    values = [{"n": number, "text": "x" * (number % 23)} for number in range(200)]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, values)))
    opened, rows = rows_of(file)
    assert [row.value for row in rows] == values
    assert [row.number for row in rows] == list(range(1, 201))
    assert opened.count == 200
    assert (len(opened.parts) > 5) == (block < 1 << 20)


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_is_read_as_rows_whatever_the_ending(tmp_path, name, indent):
    values = [{"text": "one"}, {"text": "two [,] }"}, 3, {"text": "\ud83d"}, {"text": "five"}]
    file = tmp_path / name
    file.write_text(json.dumps(values, indent=indent) + "\n")
    opened, rows = rows_of(file)
    assert [row.value["text"] for row in rows if isinstance(row, SourceRecord)] == [
        "one", "two [,] }", "five",
    ]  # fmt: skip
    bad = [(opened.place(row.number), row.reason) for row in rows if isinstance(row, BadRow)]
    assert [place for place, _ in bad] == [f"{file}:row 3", f"{file}:row 4"]
    assert bad[0][1].startswith("a number")
    assert bad[1][1].startswith("half a surrogate pair")


def test_bytes_that_are_no_text_spoil_only_their_row_of_a_list(tmp_path):
    file = tmp_path / "rows.json"
    file.write_bytes(b'[{"text": "a"}, {"text": "\xff"}, {"text": "c"}]')
    _, rows = rows_of(file)
    assert [type(row) for row in rows] == [SourceRecord, BadRow, SourceRecord]
    assert rows[1].reason == "not UTF-8 text"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[{"text": "a"},\n {"text": "b"', ":2:14"),
        ('[{"text": "a"}\n {"text": "b"}]', ":2:2"),
        ('[\n{"text": "a"},\n', ":3:1"),
        ('[{"text": "a"},\n]', ":2:1"),
        ('[\n{"text": "a"}\n]\n[\n{"text": "b"}\n]', ":4:1"),
        ('{"data": [\n{"text": "a"},\n', ":3:1"),
        ('[{"text": ' + "[" * 200_000, ":row 1"),
    ],
)
def test_a_broken_json_file_is_refused_at_its_place(tmp_path, text, place):
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(DataError) as caught:
        rows_of(file)
    assert caught.value.problems[0].place == f"{file}{place}"
    assert caught.value.problems[0].fix


def test_a_json_file_may_be_lines_or_hold_its_rows_in_an_object(tmp_path):
    file = tmp_path / "any.json"
    rows = [{"text": "a"}, {"text": "b"}]
    for text, expected in [
        ("\n".join(map(json.dumps, rows)), rows),
        (json.dumps({"version": 1, "data": rows}), rows),
        (json.dumps({"version": 1, "data": rows}, indent=1), rows),
        (json.dumps({"list": [1], "text": "[", "deep": {"data": [7]}, "data": rows}), rows),
        (json.dumps(rows[0], indent=1), rows[:1]),
        (json.dumps({"messages": rows}), [{"messages": rows}]),
        (json.dumps({"a": rows, "b": rows}), [{"a": rows, "b": rows}]),
        (json.dumps({"": rows}), rows),
        ("[]", []),
        ("", []),
    ]:
        file.write_text(text)
        _, found = rows_of(file)
        assert [row.value for row in found] == expected, text


def test_lines_of_which_the_first_is_a_list_are_lines(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_bytes(b"[1, 2]\n" + GOOD)
    _, rows = rows_of(file)
    assert [type(row) for row in rows] == [BadRow, SourceRecord]


def test_csv(tmp_path):
    file = tmp_path / "some.csv"
    file.write_bytes(
        b"\xef\xbb\xbfinstruction,output\r\n"
        b'"two\r\nlines","a ""quoted"" word"\r\n'
        b"\r\n"
        b"only one field\r\n"
        b'"closed"too early,x\r\n'
        b"caf\xe9,latin-1\r\n"
        b"last," + b"y" * 200_000 + b"\r\n"
        b'"never closed,z\r\n'
    )
    opened, rows = rows_of(file)
    good = [(row.number, row.value) for row in rows if isinstance(row, SourceRecord)]
    assert good == [
        (2, {"instruction": "two\r\nlines", "output": 'a "quoted" word'}),
        (8, {"instruction": "last", "output": "y" * 200_000}),
    ]
    bad = [(row.number, row.reason) for row in rows if isinstance(row, BadRow)]
    assert bad == [
        (5, "1 fields, but the header names 2"),
        (6, "broken CSV: ',' expected after '\"'"),
        (7, "not UTF-8 text"),
        (9, "broken CSV: unexpected end of data"),
    ]
    assert opened.place(5) == f"{file}:5"


def test_a_csv_header_that_names_a_column_twice_is_refused(tmp_path):
    file = tmp_path / "twice.csv"
    file.write_text("text,text\na,b\n")
    with pytest.raises(DataError, match="'text' twice"):
        rows_of(file)


def test_tabs(tmp_path):
    file = tmp_path / "some.tsv"
    file.write_text("a\tb\n1,2\t3\n")
    assert rows_of(file)[1][0].value == {"a": "1,2", "b": "3"}


def test_a_text_file_by_line(tmp_path):
    file = tmp_path / "some.txt"
    file.write_bytes("erste Zeile\n\nzweite – Zeile\r\n".encode() + b"bad \xff\nlast")
    _, rows = rows_of(file, documents="line")
    assert [row.value["text"] for row in rows if isinstance(row, SourceRecord)] == [
        "erste Zeile", "zweite – Zeile", "last",
    ]  # fmt: skip
    assert [(row.number, row.column) for row in rows if isinstance(row, BadRow)] == [(4, 5)]


def table(count):
    return datasets.Dataset.from_dict(
        {"text": [f"row {number}" for number in range(count)], "n": list(range(count))}
    )


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "some.parquet"
    columns = pyarrow.table({"text": [f"row {number}" for number in range(700)]})
    pyarrow.parquet.write_table(columns, file, row_group_size=300)
    opened, rows = rows_of(file)
    assert len(opened.parts) == 3
    assert opened.count == 700
    assert [row.value["text"] for row in rows] == [f"row {number}" for number in range(700)]
    assert [row.number for row in rows] == list(range(1, 701))
    assert opened.place(7) == f"{file}:row 7"


def test_parquet_text_that_is_no_text(tmp_path):
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "some.parquet"
    raw = pyarrow.array([b"fine", b"\xff", b"fine too"], pyarrow.binary())
    # Arrow takes our word for it that these bytes are UTF-8, as a careless writer's.
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), file)
    _, rows = rows_of(file)
    assert [type(row) for row in rows] == [SourceRecord, BadRow, SourceRecord]


def test_a_broken_parquet_file_is_refused(tmp_path):
    file = tmp_path / "broken.parquet"
    file.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match="can't be read as Parquet"):
        rows_of(file)


def test_a_saved_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_ROWS", 100)
    table(250).shuffle(seed=1).save_to_disk(str(tmp_path / "saved"))
    opened, rows = rows_of(tmp_path / "saved")
    assert len(opened.parts) == 3
    assert sorted(row.value["n"] for row in rows) == list(range(250))
    assert all(row.value["text"] == f"row {row.value['n']}" for row in rows)


def test_a_split_of_a_saved_folder(tmp_path):
    both = datasets.DatasetDict({"train": table(3), "test": table(5)})
    both.save_to_disk(str(tmp_path / "saved"))
    assert len(rows_of(tmp_path / "saved")[1]) == 3
    assert len(rows_of(tmp_path / "saved", split="test")[1]) == 5
    with pytest.raises(DataError, match=r"no split 'tset'; it has train, test\n.*split: test"):
        rows_of(tmp_path / "saved", split="tset")


def test_the_digest_follows_the_content(tmp_path):
    one, two, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    one.write_bytes(GOOD)
    two.write_bytes(GOOD)
    other.write_bytes(GOOD + b"\n" + GOOD)
    digests = [rows_of(file)[0].digest for file in (one, two, other)]
    assert digests[0] == digests[1] != digests[2]


def refused(path, **settings):
    with pytest.raises(DataError) as caught:
        open_source(Source(path=str(path), format="completion", **settings))
    (problem,) = caught.value.problems
    assert problem.fix
    return problem


def test_a_file_that_is_missing_names_the_nearest(tmp_path):
    (tmp_path / "code.jsonl").write_bytes(GOOD)
    problem = refused(tmp_path / "cod.jsonl")
    assert "no such file" in problem.fact
    assert problem.fix == f"did you mean {tmp_path / 'code.jsonl'}?"
    assert "nor the folder" in refused(tmp_path / "nowhere" / "code.jsonl").fact


def test_a_path_in_a_folder_that_exists_is_never_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert "no such file" in refused("data/code").fact


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("some.gz", b"\x1f\x8b\x08", "can't be read: Truncated compressed stream"),
        ("some", b"plain words", "has no ending"),
        ("some.jsonl", '{"text": "a"}'.encode("utf-16"), "UTF-16"),
    ],
)
def test_a_file_of_an_unknown_kind_is_refused(tmp_path, name, content, fact):
    (tmp_path / name).write_bytes(content)
    assert fact in refused(tmp_path / name).fact


def test_a_folder_without_data_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing here")
    assert refused(tmp_path).fact == "there is no data file in it"
    assert refused(f"{tmp_path}/*.txt").fact == "no file matches it"


def test_a_data_set_that_is_nowhere_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert "neither a file here nor" in refused("nobody/nothing").fact
    assert "neither a file here nor" in refused("not an id").fact


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), json_values), st.booleans())
def test_sound_objects_are_read_as_they_are(value, ascii):
    assert JsonReader().read_object(json.dumps(value, ensure_ascii=ascii)) == value


@given(st.text())
def test_any_text_is_an_object_or_unreadable(text):
    with suppress(Unreadable):
        assert isinstance(JsonReader().read_object(text), dict)
