"""The strict YAML reader: what a value is, where it stands, and what is refused."""

from __future__ import annotations

import json
import math
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.core.files import yaml_document as document
from shardtune.core.files.yaml_document import YamlDocument, dotted, parse_document, read_document
from shardtune.errors import JobError, Problem


def parse(text: str) -> YamlDocument:
    return parse_document(text, "job.yaml")


def problems(text: str) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        parse(text)
    return list(caught.value.problems)


def problem(text: str) -> Problem:
    (only,) = problems(text)
    return only


# Types -------------------------------------------------------------------------------------------

# From the tables of the YAML 1.2 specification, chapter 10.3 (core schema); what YAML 1.1 makes of
# the words in the third group is what people stumble over.
TYPED: dict[str, Any] = {
    "1e-4": 1e-4, "2.0e-4": 2e-4, "1E+5": 1e5, "5.": 5.0, ".5": 0.5, "-0.1": -0.1,
    "0": 0, "-7": -7, "+7": 7, "010": 10, "10_000": 10_000,
    "no": "no", "yes": "yes", "on": "on", "off": "off", "n": "n", "1:30": "1:30",
    "2024-02-29": "2024-02-29", "1_": "1_", "_1": "_1", "1e": "1e", "e5": "e5", "=": "=",
    "true": True, "True": True, "FALSE": False, "tRUE": "tRUE",
    "null": None, "Null": None, "~": None, "": None, "nul": "nul",
    "'1e-4'": "1e-4", '"no"': "no", "'null'": "null", "''": "",
    ".inf": math.inf, "-.INF": -math.inf, ".inff": ".inff", "inf": "inf", "nan": "nan",
}  # fmt: skip


@pytest.mark.parametrize("word", TYPED, ids=lambda word: word or "nothing")
def test_words_are_what_yaml_1_2_says(word: str) -> None:
    found = parse(f"key: {word}").value["key"]
    assert found == TYPED[word]
    assert type(found) is type(TYPED[word])


def test_not_a_number_is_read_as_such() -> None:
    assert math.isnan(parse("key: .nan").value["key"])


def test_a_number_of_thousands_of_digits_is_read() -> None:
    # Python refuses to make an integer of more than 4,300 digits.
    assert parse("key: " + "1" * 5000).value["key"] == math.inf


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # JSON may hold a bare U+007F, YAML may not; NUL is refused by us.
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\x7f"), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), inner, max_size=4)
    ),
    max_leaves=15,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(JSON)
def test_json_is_read_as_json(value: Any) -> None:
    # Every JSON text is YAML; what json.dumps escapes as two halves comes back as one character.
    assert parse(json.dumps(value)).value == value


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(JSON)
def test_the_pretty_form_has_the_same_values(value: Any) -> None:
    assert parse(json.dumps(value, indent=2)).value == value


# Lines -------------------------------------------------------------------------------------------

LINED = """\
# a comment

model: {name: tiny,
  revision: main}
data:
  train:
    - path: a.jsonl
      format: chat

    - {path: b.jsonl,
       format: chat}
text: |
  several
  lines
last: [1,
       2]
"""


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("opening", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_every_key_knows_its_line(tmp_path: Path, ending: str, opening: bytes) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(opening + LINED.replace("\n", ending).encode())
    found = read_document(path)
    lines = {dotted(key): line for key, line in found.lines.items()}
    assert lines == {  # counted by hand
        "": 3, "model": 3, "model.name": 3, "model.revision": 4, "data": 5, "data.train": 6,
        "data.train.0": 7, "data.train.0.path": 7, "data.train.0.format": 8, "data.train.1": 10,
        "data.train.1.path": 10, "data.train.1.format": 11, "text": 12, "last": 15, "last.0": 15,
        "last.1": 16,
    }  # fmt: skip
    assert found.value["text"] == "several\nlines\n"
    assert found.source == str(path)


def test_a_repeated_value_has_the_line_of_its_own_key() -> None:
    found = parse("one: &it\n  deep: 1\ntwo: *it\n")
    assert found.value == {"one": {"deep": 1}, "two": {"deep": 1}}
    assert found.lines["two",] == 3


# What is refused ---------------------------------------------------------------------------------


def test_a_key_written_twice_is_refused_with_both_lines() -> None:
    found = problem("train:\n  steps: 1\n  seed: 0\n  steps: 2\n")
    assert found == Problem(
        "job.yaml:4: train.steps", "written twice (first on line 2)", "keep one of the two"
    )


TAGS = {
    "a: !!python/object/apply:os.system [touch canary]": "!!python/object/apply:os.system",
    "a: !!python/name:os.system": "!!python/name:os.system",
    "a: !!binary aGVsbG8=": "!!binary",
    "a: !!set {b, c}": "!!set",
    "a: !own 3": "!own",
    "a: ! 3": "!",
    "!!str a: b": "!!str",
    "a: !!str b": "!!str",
    "a: !!int 3": "!!int",
    "a: !!map {b: c}": "!!map",
    "a: [1, !!float 2]": "!!float",
}


@pytest.mark.parametrize("text", TAGS)
def test_tags_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = problem(text)
    assert found.place.startswith("job.yaml:1")
    assert f"the tag {TAGS[text]} is refused" in found.fact
    assert found.fix == "remove the tag"
    assert list(tmp_path.iterdir()) == []


def test_all_problems_are_told_at_once() -> None:
    found = problems("a: !x 1\nb: 2\nb: 3\n<<: {c: 4}\n? [d]\n: 5\n")
    assert [each.place for each in found] == [
        "job.yaml:1: a", "job.yaml:3: b", "job.yaml:4", "job.yaml:5"
    ]  # fmt: skip
    assert "merge keys (<<) are not read" in found[2].fact
    assert "a key must be a word" in found[3].fact


def test_half_a_character_is_refused() -> None:
    found = problem('a:\n  b: "\\uD83D"')
    assert found.place == "job.yaml:2: a.b"
    assert "half a surrogate pair" in found.fact


BROKEN = {
    "a: [1, 2": "job.yaml:1: not valid YAML: while parsing a flow sequence, expected ',' or ']'",
    "a: 1\nb: c: d": "job.yaml:2: not valid YAML: mapping values are not allowed here",
    "a: [\n1,\n2": "job.yaml:3: not valid YAML: while parsing a flow sequence from line 1 on, exp",
    "a:\n\t- b": "job.yaml:2: not valid YAML: while scanning for the next token, found character",
    "a: *nowhere": "job.yaml:1: not valid YAML: found undefined alias 'nowhere'",
    "a: 1\n---\nb: 2": "job.yaml:2: not valid YAML: expected a single document in the stream",
    "a: 1\nb: x\0y": "job.yaml:2: not valid YAML: it holds the character U+0000",
    "a: \x1b[2J": "job.yaml:1: not valid YAML: it holds the character U+001B",
}


@pytest.mark.parametrize("text", BROKEN, ids=ascii)
def test_broken_syntax_names_the_line_and_the_reason(text: str) -> None:
    found = problem(text)
    assert f"{found.place}: {found.fact}".startswith(BROKEN[text])
    assert found.fix


def test_text_that_is_not_utf8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(JobError) as caught:
        read_document(path)
    assert caught.value.problems == (
        Problem(f"{path}:2", "is not UTF-8 text (byte 0xe9)", "save it as UTF-8"),
    )


def test_aliases_that_multiply_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]  # 9^12 values
    begun = time.process_time()
    assert "more than 20,000 values" in problem("\n".join(lines)).fact
    assert time.process_time() - begun < 5


def test_an_alias_inside_of_itself_is_refused() -> None:
    assert problem("a: &a [*a]").fact == "more than 40 levels deep"


@pytest.mark.parametrize("depth", [42, 300, pytest.param(100_000, marks=pytest.mark.long)])
def test_deep_nesting_is_refused(depth: int) -> None:
    assert "40 levels deep" in problem("[" * depth + "]" * depth).fact


def test_forty_levels_are_read() -> None:
    found = parse("[" * 40 + "1" + "]" * 40).value
    for _ in range(40):
        (found,) = found
    assert found == 1


def test_a_file_of_many_values_is_refused_before_it_is_parsed_whole() -> None:
    text = "[" + "a," * (document.MAX_YAML_BYTES // 2 - 1) + "]"
    begun = time.process_time()
    found = problem(text)
    # PyYAML alone takes about eight seconds for these 131,071 values.
    assert time.process_time() - begun < 4
    assert "more than 20,000 values" in found.fact


@pytest.mark.parametrize("source", ["a file", "a device"])
def test_a_huge_file_is_refused_without_reading_it(tmp_path: Path, source: str) -> None:
    path = Path("/dev/zero")
    if source == "a file":
        path = tmp_path / "job.yaml"
        with path.open("wb") as file:
            file.truncate(100 << 20)
    elif not path.exists():
        pytest.skip("this system has no /dev/zero")
    begun = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(JobError, match=r"has more than 262,144 bytes|is a device, not a file"):
            read_document(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20
    assert time.process_time() - begun < 1


def test_what_can_not_be_opened_is_told(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("a: 1")
    for path, fact, fix in [
        (tmp_path / "quikstart.yaml", "no such file", "did you mean"),
        (tmp_path / "q" / "job.yaml", "no such file", "correct the path"),
        (tmp_path, "is a folder, not a job file", "name the YAML file"),
        (tmp_path / "quickstart.yaml" / "job.yaml", "can't be read: Not a directory", "correct"),
        (tmp_path / ("x" * 300), "can't be read: File name too long", "correct"),
    ]:
        with pytest.raises(JobError) as caught:
            read_document(path)
        (found,) = caught.value.problems
        assert (found.place, found.fact) == (str(path), fact)
        assert found.fix.startswith(fix)


def test_an_empty_document_is_nothing() -> None:
    assert parse("# only a comment\n").value is None


def test_the_loader_of_others_is_left_alone() -> None:
    assert yaml.safe_load("a: !!int '3'") == {"a": 3}
    assert yaml.safe_load("a: no") == {"a": False}


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.yaml")
    with pytest.raises(JobError, match="is a named pipe"):
        read_document(tmp_path / "job.yaml")


def test_a_nul_character_is_refused_with_its_line() -> None:
    with pytest.raises(JobError, match=r"a:2: save\.directory: a NUL character"):
        parse_document('save:\n  directory: "a\\0b"\n', "a")
