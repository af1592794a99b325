"""Pre-flight: whatever can't be trained on is refused, with the place, the fact and the fix."""

from __future__ import annotations

import json

import pytest

from shardtune.config.job import Columns, DataSection, Source, TrainSource
from shardtune.data.prepare import prepare
from shardtune.data.validate import LISTED
from shardtune.errors import DataError
from shardtune.models import tiny

STOPS = frozenset({tiny.END})
OR = "; or stop: none beside its path, to train it without"
GOOD = {"instruction": "Add 1 and 2.", "output": "3"}


@pytest.fixture
def refused(tmp_path, tokenizer):
    """The problems of a set to train on, given as rows or as the bytes of a file."""

    def problems(rows, format="instruction", *, stops=STOPS, other=None, length=64,
                 bad_rows="fail", **settings):  # fmt: skip
        path = tmp_path / "rows.jsonl"
        if isinstance(rows, bytes):
            path.write_bytes(rows)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = DataSection(
            train=(TrainSource(path=str(path), format=format, **settings),),
            sequence_length=length,
            bad_rows=bad_rows,
        )
        with pytest.raises(DataError) as caught:
            prepare(section, other or tokenizer, stops, cache=tmp_path / "cache", quiet=True)
        assert not list((tmp_path / "cache").rglob("*.arrow"))
        return [
            tuple(
                part.replace(f"{tmp_path}/", "")
                for part in (problem.place, problem.fact, problem.fix)
            )
            for problem in caught.value.problems
        ]

    return problems


# Rows 40 and 41 of the fault exam in one file: the line, and its place and reason if it is bad.
EXAM = [
    (b'\xef\xbb\xbf{"instruction": "a", "output": "byte order mark"}', None),
    (b'{"instruction": "a", "output": "CRLF"}\r', None),
    (b'{"instruction": "a", "output": "broken', (":3:32", "broken JSON: Unterminated string")),
    (b'{"instruction": "a", "output": "\x00"}', (":4:33", "a NUL byte")),
    (b'{"instruction": "a", "output": "\\u0000"}', (":5", "'output' holds a NUL character")),
    (b'{"instruction": "a", "output": "\xe9"}', (":6:33", "not UTF-8 text (byte 0xe9)")),
    (b'{"instruction": "a", "output": "\\ud800"}', (":7:33", "half a surrogate pair (\\ud800)")),
    (b'{"instruction": "a", "output": 42}', (":8", "'output' is int 42, not text")),
    (b'{"instruction": null, "output": "b"}', (":9", "'instruction' is null, not text")),
    (b'{"instruction": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", (":10", "nested more than 100")),
    (b"", None),
    (b'[{"instruction": "a", "output": "b"}]', (":12", "a list, not a JSON object")),
    (b'{"instruction": "a"}', (":13", "no column 'output'")),
    (b'{"instruction": "a", "output": "\xf0\x9f\x98\x80 \xd7\xa9"}', None),
    (b'{"instruction": "a", "output": "no newline at the end"}', None),
]


def test_the_exam_s_bad_rows_are_all_listed(refused):
    problems = refused(b"\n".join(line for line, _ in EXAM))
    *rows, (place, fact, fix) = problems
    expected = [bad for _, bad in EXAM if bad]
    assert [row[0] for row in rows] == [f"rows.jsonl{where}" for where, _ in expected]
    for (_, told, _), (_, reason) in zip(rows, expected, strict=True):
        assert told.startswith(reason)
    assert (place, fact) == ("rows.jsonl", "10 of 14 rows can't be used")
    assert fix == "fix them, or set data.bad_rows: skip to go on without them"


def test_the_exam_s_bad_rows_can_be_skipped(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in EXAM))
    section = DataSection(
        train=(TrainSource(path=str(path), format="instruction"),), bad_rows="skip"
    )
    (prepared,) = prepare(section, tokenizer, STOPS, cache=tmp_path, quiet=True).train
    assert (prepared.report.rows_read, prepared.report.bad, prepared.report.documents) == (
        14,
        10,
        4,
    )


def test_a_json_array_under_the_name_of_lines_is_read(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps([GOOD, GOOD], indent=2))
    section = DataSection(train=(TrainSource(path=str(path), format="instruction"),))
    (prepared,) = prepare(section, tokenizer, STOPS, cache=tmp_path, quiet=True).train
    assert prepared.report.documents == 2


def test_rows_that_are_bad_alike_are_told_once(refused):
    rows = [{"instruction": "a", "output": 1}] * 57 + [{"instruction": "a", "output": None}]
    alike, single, total = refused([GOOD, *rows])
    assert alike == (
        "rows.jsonl",
        "57 rows: 'output' is int 1, not text (rows.jsonl:2, rows.jsonl:3, rows.jsonl:4, ...)",
        "",
    )
    assert single[:2] == ("rows.jsonl:59", "'output' is null, not text")
    assert total[1] == "58 of 59 rows can't be used"


def test_numbers_don_t_make_another_complaint(refused):
    alike, _ = refused([GOOD] + [{"instruction": "a", "output": n} for n in range(4)])
    assert alike[1].startswith("4 rows like this: 'output' is int 0, not text (rows.jsonl:2, ")


def test_a_long_list_of_complaints_is_cut_and_counted(refused):
    names = [f"r{chr(97 + n)}le" for n in range(LISTED + 3)]
    rows = [{"messages": [{"role": name, "content": "x"}]} for name in names]
    problems = refused(rows, "chat")
    assert len(problems) == LISTED + 1
    assert problems[-1][1] == "23 of 23 rows can't be used (3 for reasons that aren't listed here)"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[]"])
def test_an_empty_set(refused, content):
    ((place, fact, fix),) = refused(content)
    assert (place, fact) == ("rows.jsonl", "is empty: it holds no rows")
    assert fix


# The rows' columns, the format, and the fact and the fix that have to be told.
COLUMNS = [
    (
        {"instructions": "a", "output": "b"},
        "instruction",
        "no row has the column 'instruction'; the columns are 'instructions', 'output'",
        "columns: {instruction: instructions}",
    ),
    (
        {"question": "a", "answer": "b"},
        "instruction",
        "no row has the column 'instruction', the column 'output'; "
        "the columns are 'question', 'answer'",
        "columns: {instruction: question, output: answer}",
    ),
    (
        {"foo": "a"},
        "completion",
        "no row has the column 'text'; the columns are 'foo'",
        "columns: {text: <one of these>}",
    ),
    (
        {"dialog": []},
        "chat",
        "no row has the column 'messages'; the columns are 'dialog'",
        "columns: {messages: dialog}",
    ),
    (
        {"instruction": "a", "output": "b"},
        "chat",
        "no row has the column 'messages'; the columns are 'instruction', 'output'",
        "format: instruction",
    ),
]


@pytest.mark.parametrize("bad_rows", ["fail", "skip"])
@pytest.mark.parametrize(("row", "format", "fact", "fix"), COLUMNS)
def test_wrong_columns(refused, row, format, fact, fix, bad_rows):
    assert refused([row] * 3, format, bad_rows=bad_rows) == [("rows.jsonl", fact, fix)]


def test_a_column_that_the_job_names_and_no_row_has(refused):
    ((_, fact, fix),) = refused([{**GOOD, "contexts": "1"}], columns=Columns(input="context"))
    assert fact.startswith("no row has the column 'context'; the columns are")
    assert fix == "columns: {input: contexts}"


def test_wrong_columns_don_t_hide_broken_rows(refused):
    problems = refused(b'{"question": "a"}\n{"question": \n{"question": "b"}')
    assert [place for place, _, _ in problems] == ["rows.jsonl", "rows.jsonl:2:14", "rows.jsonl"]
    assert problems[-1][1] == "1 of 3 rows can't be used"


def test_a_column_that_only_some_rows_lack_makes_them_bad(refused):
    problems = refused([GOOD, {"instruction": "a"}])
    assert problems[0][:2] == ("rows.jsonl:2", "no column 'output'")


def test_skipping_everything_is_refused(refused):
    problems = refused([{"instruction": "a", "output": 1}] * 2, bad_rows="skip")
    assert problems[-1] == (
        "rows.jsonl",
        "2 of 2 rows can't be used",
        "fix them: no usable row is left",
    )


def test_no_trained_token_after_truncation(refused):
    ((_, fact, fix),) = refused([{"instruction": "x" * 500, "output": "3"}] * 4)
    assert (
        fact == "no trained token is left of its 4 rows: 4 have no trained token in their first 64"
    )
    # 13 + 500 + 11 characters around and in the question, "<|im_start|>assistant\n" as 1 + 10
    # tokens: 1 + 5 + 500 + 1 + 1 + 1 + 10 + 1 + 1 + 1 = 522.
    assert fix == "raise data.sequence_length: the longest row has 522 tokens"


def test_all_rows_dropped(refused):
    ((_, fact, fix),) = refused([{"text": "x" * 100}] * 3, "completion", overflow="drop")
    assert "3 are longer than data.sequence_length (64)" in fact
    assert fix == "raise data.sequence_length: the longest row has 101 tokens"


def test_all_labels_masked(refused):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 2
    ((_, fact, fix),) = refused(rows, "pretokenized")
    assert fact.startswith("no trained token is left of its 2 rows")
    assert fix == "give rows that hold something to learn"


def with_end(text):
    """A tokenizer whose chat template ends turns with this."""
    tokenizer = tiny.tokens()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", text)
    return tokenizer


def test_a_stop_token_that_is_never_trained_names_the_terminator(refused):
    ((place, fact, fix),) = refused([GOOD] * 2, other=with_end("<|endoftext|>"))
    assert place == "rows.jsonl"
    assert fact == (
        "a stop token is never trained: none of its 2 documents ends with '<|im_end|>'; "
        "100% of them end with '<|endoftext|>'"
    )
    assert fix == f'model.stop_tokens: ["<|endoftext|>"]{OR}'


def test_a_template_without_a_terminator(refused):
    ((_, fact, fix),) = refused([GOOD] * 2, other=with_end(""))
    assert "none of its 2 documents ends with '<|im_end|>'" in fact
    assert fix == f"use a chat template that ends an answer with '<|im_end|>'{OR}"


def opening(switch, thought="<think></think>"):
    """A tokenizer whose chat template opens a thought where it asks, unless a variable is so."""
    begun = f"('{thought}' if m.role == 'assistant' else '')"
    asked = f"('{thought}' if {switch} else '<think>\n')"
    tokenizer = tiny.tokens()
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{{ '<|im_start|>' ~ m.role ~ '\n' ~ " + begun + " ~ m.content ~ '<|im_end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' ~ " + asked + " }}{% endif %}"
    )
    return tokenizer


NAMES = "by name (chatml, llama3, gemma, phi3, mistral, zephyr, alpaca, vicuna)"


@pytest.mark.parametrize(
    ("switch", "setting"),
    [
        ("enable_thinking is defined and not enable_thinking", "{enable_thinking: false}"),
        ("enable_thinking", "{enable_thinking: true}"),  # Gemma 4
        ("thinking is false", "{thinking: false}"),
    ],
)
def test_a_thought_that_a_variable_of_the_template_leaves_out(refused, switch, setting):
    ((place, fact, fix),) = refused([GOOD] * 3, other=opening(switch))
    assert place == "the chat template"
    assert fact == (
        "can't write a question and its answer: asks for an answer with "
        "'<|im_start|>assistant\\n<think>\\n', but starts turn 2 with "
        "'ssistant\\n<think></think>'; 3 of 3 rows need that "
        "(rows.jsonl:1, rows.jsonl:2, rows.jsonl:3)"
    )
    if "true" in setting:
        assert fix == (
            f"data.chat_template: a copy of it that asks as these rows begin, or one {NAMES}; or "
            f"data.chat_template_kwargs: {setting}, if its prompts are to ask for reasoning as well"
        )
    else:
        assert fix == (
            f"data.chat_template_kwargs: {setting}, with which it asks as these rows begin; "
            f"or data.chat_template: one that does, as a file or {NAMES}"
        )


def test_rows_with_reasoning_that_would_not_fit_then(refused):
    """GLM-4.7 turns it off for all rows."""
    other = opening("enable_thinking is false")
    content = "(m.content if enable_thinking is not false else m.content.split('</think>')[-1])"
    other.chat_template = other.chat_template.replace("m.content", content)
    ((_, _, fix),) = refused([GOOD] * 3, other=other)
    assert "begin (rows with reasoning don't fit then); or data.chat_template" in fix


@pytest.mark.parametrize("switch", ["false", "enable_thinking == 'a word that nobody guesses'"])
def test_a_thought_that_is_always_opened(refused, switch):
    ((_, _, fix),) = refused([GOOD] * 3, other=opening(switch))
    assert fix == (
        "data.chat_template: a copy of it that asks as these rows begin "
        f"(data.chat_template_kwargs has nothing for that), or one {NAMES}"
    )


def test_a_stop_token_that_is_always_cut_off(refused):
    ((_, fact, fix),) = refused([{"text": "x" * 100}] * 2, "completion")
    assert fact.endswith("because all of them are cut off at 64 tokens")
    assert fix == (
        "raise data.sequence_length: the longest row has 101 tokens; "
        f"or cut rows into several documents: overflow: split{OR}"
    )


def test_pretokenized_rows_without_a_stop_token(refused):
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2]}]
    ((_, _, fix),) = refused(rows, "pretokenized")
    assert fix == f"end each row's ids with a stop token, and don't mask it in the labels{OR}"


def test_blocks_that_don_t_fill_the_sequence_name_the_length_that_they_fill(refused):
    ((_, _, fix),) = refused([{"input_ids": [1] * 32}] * 3, "pretokenized")
    assert fix == f"data.sequence_length: 32, if these are a corpus cut into windows{OR}"


def test_longer_blocks_are_not_cut_off_in_silence(refused):
    ((_, fact, fix),) = refused([{"input_ids": [1] * 128}] * 3, "pretokenized")
    assert fact.endswith("because all of them are cut off at 64 tokens")
    assert "the longest row has 128 tokens" in fix


@pytest.mark.parametrize(
    ("lengths", "settings", "told"),
    [
        ([64, 64, 64], {}, True),
        ([64, 64, 17], {}, True),
        ([128, 128], {"overflow": "split"}, True),
        ([3, 5, 64], {"stop": "none"}, False),
    ],
)
def test_windows_of_a_corpus_are_trained(tmp_path, tokenizer, lengths, settings, told):
    path = write(tmp_path / "ids.jsonl", [{"input_ids": [n] * length} for n, length in
                                          enumerate(lengths)])  # fmt: skip
    source = TrainSource(path=path, format="pretokenized", **settings)
    section = DataSection(train=(source,), sequence_length=64)
    (prepared,) = prepare(section, tokenizer, STOPS, cache=tmp_path, quiet=True).train
    assert prepared.report.tokens == sum(lengths)
    assert any("a corpus cut into windows" in note for note in prepared.report.notes) == told


def test_windows_that_end_with_stop_tokens_are_ordinary_rows(tmp_path, tokenizer):
    rows = [{"input_ids": [1] * 63 + [tiny.END]}] * 2
    source = TrainSource(path=write(tmp_path / "ids.jsonl", rows), format="pretokenized")
    section = DataSection(train=(source,), sequence_length=64)
    (prepared,) = prepare(section, tokenizer, STOPS, cache=tmp_path, quiet=True).train
    assert prepared.report.notes == ()


def test_a_tokenizer_without_an_end(refused):
    tokenizer = tiny.tokens()
    tokenizer.eos_token = None
    ((_, fact, fix),) = refused([{"text": "a b"}], "completion", stops=frozenset(), other=tokenizer)
    assert fact == "a stop token is never trained: there is none"
    assert "eos_token" in fix


def test_one_document_that_ends_is_enough(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "x" * 100}) + "\n" + json.dumps({"text": "short"}))
    source = TrainSource(path=str(path), format="completion")
    section = DataSection(train=(source,), sequence_length=64)
    (prepared,) = prepare(section, tokenizer, STOPS, cache=tmp_path, quiet=True).train
    assert prepared.report.stops_trained == 1


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_training_rows_in_an_evaluation_set_are_refused(tmp_path, tokenizer):
    train = [{"instruction": f"question {n}", "output": f"{n}"} for n in range(20)]
    held_out = [{"instruction": "new", "output": "x"}, *train[3:10]]
    section = DataSection(
        train=(
            TrainSource(path=write(tmp_path / "t.jsonl", train), format="instruction"),
            TrainSource(path=write(tmp_path / "u.jsonl", [GOOD]), format="instruction"),
        ),
        eval=(Source(path=write(tmp_path / "e.jsonl", held_out), format="instruction"),),
    )
    with pytest.raises(DataError) as caught:
        prepare(section, tokenizer, STOPS, cache=tmp_path, quiet=True)
    (problem,) = caught.value.problems
    told = problem.fact.replace(f"{tmp_path}/", "")
    assert told == (
        "7 of its 20 documents stand in the evaluation set e.jsonl too: t.jsonl:4 is e.jsonl:2, "
        "t.jsonl:5 is e.jsonl:3, t.jsonl:6 is e.jsonl:4, t.jsonl:7 is e.jsonl:5, "
        "t.jsonl:8 is e.jsonl:6, 2 more"
    )
    assert problem.place == f"{tmp_path}/t.jsonl"
    assert problem.fix


def test_the_same_question_with_another_answer_is_no_leak(tmp_path, tokenizer):
    section = DataSection(
        train=(TrainSource(path=write(tmp_path / "t.jsonl", [GOOD]), format="instruction"),),
        eval=(
            Source(
                path=write(tmp_path / "e.jsonl", [{**GOOD, "output": "three"}]),
                format="instruction",
            ),
        ),
    )
    assert len(prepare(section, tokenizer, STOPS, cache=tmp_path, quiet=True).eval) == 1


def test_the_problems_of_all_sets_are_told_at_once(tmp_path, tokenizer):
    section = DataSection(
        train=(
            TrainSource(path=write(tmp_path / "empty.jsonl", []), format="chat"),
            TrainSource(path=str(tmp_path / "nowhere.jsonl"), format="chat"),
            TrainSource(path=write(tmp_path / "good.jsonl", [GOOD]), format="instruction"),
        ),
        eval=(
            Source(path=write(tmp_path / "other.jsonl", [{"a": "b"}]), format="instruction"),
            Source(path=write(tmp_path / "ends.jsonl", [{"text": "x"}]), format="completion"),
        ),
    )
    with pytest.raises(DataError) as caught:
        prepare(section, tokenizer, frozenset(), cache=tmp_path, quiet=True)
    assert [problem.place.removeprefix(f"{tmp_path}/") for problem in caught.value.problems] == [
        "empty.jsonl", "nowhere.jsonl", "good.jsonl", "other.jsonl",
    ]  # fmt: skip
    assert all(problem.fact and problem.fix for problem in caught.value.problems)
