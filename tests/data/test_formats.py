"""Formats: what becomes of a row, and which tokens of it are trained."""

from __future__ import annotations

import copy
import json
from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtune.config.job import Columns, Source
from shardtune.data import encode
from shardtune.data.encode import Encoder, Text, Tokens
from shardtune.data.formats import make_format
from shardtune.data.records import BadRow, SourceRecord
from shardtune.errors import DataError
from shardtune.models import tiny

END = "<|im_end|>"  # the tokenizer's end-of-text token


def documents(tokenizer, format, *values, **settings):
    source = Source(path="some.jsonl", format=format, **settings)
    rows = [SourceRecord(number, value) for number, value in enumerate(values, 1)]
    return make_format(source, tokenizer).documents(rows)


def shown(tokenizer, document):
    """A document's text, with its trained stretches in braces."""
    assert isinstance(document, Tokens), document
    text = ""
    for trained, run in groupby(zip(document.ids, document.trained, strict=True), itemgetter(1)):
        piece = tokenizer.decode([token for token, _ in run])
        text += f"{{{piece}}}" if trained else piece
    return text


def without_template():
    tokenizer = copy.deepcopy(tiny.tokens())
    tokenizer.chat_template = None
    return tokenizer


ROW = {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Be brief."}
CHAT_ROW = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd.\n\n1, 2<|im_end|>\n"
    "<|im_start|>assistant\n{3<|im_end|>}\n"
)
PLAIN_ROW = "Be brief.\n\n## Task\nAdd.\n\n1, 2\n\n## Answer\n{3<|im_end|>}"


@pytest.mark.parametrize(
    ("template", "expected"), [("auto", CHAT_ROW), ("chat", CHAT_ROW), ("plain", PLAIN_ROW)]
)
def test_instruction(tokenizer, template, expected):
    (document,) = documents(tokenizer, "instruction", ROW, template=template)
    assert shown(tokenizer, document) == expected


def test_instruction_without_a_chat_template_is_plain():
    tokenizer = without_template()
    (document,) = documents(tokenizer, "instruction", ROW)
    assert shown(tokenizer, document) == PLAIN_ROW


@pytest.mark.parametrize("format", ["chat", "instruction"])
def test_a_chat_template_that_is_missing_is_asked_for(format):
    with pytest.raises(DataError, match="needs a chat template, but the tokenizer has none"):
        documents(without_template(), format, {}, template="chat")


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Add.", "output": "3"},
        {"instruction": "Add.", "output": "3", "input": "", "system": ""},
        {"instruction": "Add.", "output": "3", "input": None, "system": None},
        {"instruction": "Add.", "output": "3", "input": " \n", "system": "\t"},
    ],
)
def test_input_and_system_may_be_missing(tokenizer, row):
    (document,) = documents(tokenizer, "instruction", row, template="plain")
    assert shown(tokenizer, document) == "## Task\nAdd.\n\n## Answer\n{3<|im_end|>}"


def test_columns_may_have_other_names(tokenizer):
    columns = Columns(instruction="question", output="answer", input="context", system="role")
    row = {"question": "Add.", "answer": "3", "context": "1, 2", "role": "Be brief.", "output": 7}
    (document,) = documents(tokenizer, "instruction", row, columns=columns)
    assert shown(tokenizer, document) == CHAT_ROW


def test_a_column_input_that_is_the_question_is_asked_once(tokenizer):
    columns = Columns(instruction="input")
    row = {"input": "Add.", "output": "3"}
    (document,) = documents(tokenizer, "instruction", row, columns=columns, template="plain")
    assert shown(tokenizer, document) == "## Task\nAdd.\n\n## Answer\n{3<|im_end|>}"


@pytest.mark.parametrize(
    ("row", "reason", "missing"),
    [
        ({"output": "3"}, "no column 'instruction'", "instruction"),
        ({"instruction": "Add."}, "no column 'output'", "output"),
        ({**ROW, "output": 42}, "'output' is int 42, not text", ""),
        ({**ROW, "output": None}, "'output' is null, not text", ""),
        ({**ROW, "output": ""}, "'output' is empty", ""),
        ({**ROW, "output": " \n"}, "'output' is empty", ""),
        ({**ROW, "instruction": ["a"]}, "'instruction' is list ['a'], not text", ""),
        ({**ROW, "input": 5}, "'input' is int 5, not text", ""),
        ({**ROW, "output": "a\0b"}, "'output' holds a NUL character", ""),
    ],
)
def test_bad_instruction_rows(tokenizer, row, reason, missing):
    first, bad, last = documents(tokenizer, "instruction", ROW, row, ROW)
    assert bad == BadRow(2, reason, None, missing)
    assert shown(tokenizer, first) == shown(tokenizer, last) == CHAT_ROW


def test_completion(tokenizer):
    plain, ended, short = documents(
        tokenizer, "completion", {"text": "Hé 😀"}, {"text": f"Once.{END}"}, {"text": "a"}
    )
    assert tokenizer.decode(plain.ids) == f"Hé 😀{END}"
    assert tokenizer.decode(ended.ids) == f"Once.{END}"
    assert all(document.trained.all() for document in (plain, ended, short))


def test_completion_begins_and_ends_as_the_tokenizer_has_it(real_tokenizer):
    (document,) = documents(real_tokenizer, "completion", {"text": "Hello there."})
    expected = [*real_tokenizer("Hello there.").input_ids, real_tokenizer.eos_token_id]
    assert document.ids.tolist() == expected


@pytest.mark.parametrize("long", [False, True])
def test_what_a_text_brings_along_isn_t_put_around_it_again(long, monkeypatch):
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tiny.tokens())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 258), ("<|im_end|>", 259)],
    )
    if long:
        monkeypatch.setattr(encode, "TEXT_WINDOW", 2)
    plain, begun, ended, both = documents(
        tokenizer,
        "completion",
        *({"text": text} for text in ("abc", "<|im_start|>abc", "abc<|im_end|>")),
        {"text": "<|im_start|>abc<|im_end|>"},
    )
    for document in (plain, begun, ended, both):
        assert document.ids.tolist() == [258, *b"abc", 259]
        assert document.trained.all()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"content": "a"}, "no column 'text'"),
        ({"text": None}, "'text' is null, not text"),
        ({"text": {"a": 1}}, "'text' is dict {'a': 1}, not text"),
        ({"text": ""}, "'text' is empty"),
    ],
)
def test_bad_completion_rows(tokenizer, row, reason):
    (bad,) = documents(tokenizer, "completion", row)
    assert bad.reason == reason


def test_pretokenized(tokenizer):
    masked, plain, nothing = documents(
        tokenizer,
        "pretokenized",
        {"input_ids": [65, 66, 67, 259], "labels": [-100, -100, 67, 259]},
        {"input_ids": [65, 66]},
        {"input_ids": [65, 66], "labels": None},
    )
    assert masked.ids.tolist() == [65, 66, 67, 259]
    assert masked.trained.tolist() == [False, False, True, True]
    assert masked.ids.dtype == np.int32
    assert plain.trained.tolist() == nothing.trained.tolist() == [True, True]


@pytest.mark.parametrize(
    ("ids", "mask"), [([65, 259, 256, 256], [1, 1, 0, 0]), ([259, 259, 65, 259], [0, 0, 1, 1])]
)
def test_padding_of_pretokenized_rows_is_left_out(tokenizer, ids, mask):
    row = {"input_ids": ids, "attention_mask": mask}
    plain, labelled = documents(tokenizer, "pretokenized", row, {**row, "labels": ids})
    assert plain.ids.tolist() == labelled.ids.tolist() == [65, 259]
    assert plain.trained.tolist() == labelled.trained.tolist() == [True, True]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"ids": [1]}, "no column 'input_ids'"),
        ({"input_ids": []}, "'input_ids' is an empty list"),
        ({"input_ids": None}, "'input_ids' is not a list of integers"),
        ({"input_ids": "1 2"}, "'input_ids' is not a list of integers"),
        ({"input_ids": [1, 2.0]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [1, True]}, "'input_ids' is not a list of integers"),
        ({"input_ids": [1, 260]}, "'input_ids' holds 260, but token ids go from 0 to 259"),
        ({"input_ids": [-1, 2]}, "'input_ids' holds -1, but token ids go from 0 to 259"),
        ({"input_ids": [10**30]}, "'input_ids' holds a number that is no token id"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids, but 1 labels"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "2 input_ids, but 1 in 'attention_mask'"),
        # labels of somebody who shifted them already: the silent error of this format
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "'labels' holds 2 at place 0 where"),
    ],
)
def test_bad_pretokenized_rows(tokenizer, row, reason):
    (bad,) = documents(tokenizer, "pretokenized", row)
    assert isinstance(bad, BadRow)
    assert bad.reason.startswith(reason)


TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CHAT = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{b<|im_end|>}\n"


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": TURNS}, Columns()),
        ({"conversations": TURNS}, Columns()),
        ({"messages": None, "conversations": TURNS}, Columns()),
        ({"dialog": TURNS, "messages": "other"}, Columns(messages="dialog")),
    ],
)
def test_chat(tokenizer, row, columns):
    (document,) = documents(tokenizer, "chat", row, columns=columns)
    assert shown(tokenizer, document) == CHAT


def test_bad_chat_rows(tokenizer):
    missing, null, refused, good = documents(
        tokenizer,
        "chat",
        {"text": "a"},
        {"messages": None},
        {"messages": [{"role": "tool", "content": "x"}, *TURNS]},
        {"messages": TURNS},
    )
    assert missing == BadRow(1, "no column 'messages'", None, "messages")
    assert null == BadRow(2, "there are no turns")
    assert refused.number == 3
    assert "the roles are system, user and assistant, not tool" in refused.reason
    assert shown(tokenizer, good) == CHAT


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(DataError, match="Slow"):
        documents(Slow(), "completion", {"text": "a"})


def test_real_instructions_train_exactly_the_answer(real_tokenizer, shared_data):
    lines = (shared_data / "gsm8k_train_2000.jsonl").read_text().splitlines()[:300]
    rows = [json.loads(line) for line in lines]
    columns = Columns(instruction="question", output="answer")
    end = real_tokenizer.eos_token
    for template in ("chat", "plain"):
        found = documents(real_tokenizer, "instruction", *rows, columns=columns, template=template)
        for row, document in zip(rows, found, strict=True):
            trained = real_tokenizer.decode(document.ids[document.trained]).strip()
            assert trained == row["answer"] + end
            assert document.ids[document.trained][-1] == real_tokenizer.eos_token_id


def plain_mask(tokenizer, text):
    """The mask from the offsets of each token, one by one, as the rule says it."""
    found = tokenizer.backend_tokenizer.encode(text.text, add_special_tokens=False)
    return [
        any(start < stop and end > first for first, stop in text.spans)
        for start, end in found.offsets
    ]


# Control and unassigned characters hold bytes that a vocabulary may lack; the library drops them,
# and counts the offsets beside them wrongly.
texts = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Cn", "Co"]), min_size=1)


@given(texts, st.data())
def test_a_token_is_trained_if_any_character_of_it_is(real_tokenizer, text, data):
    edges = data.draw(st.lists(st.integers(0, len(text)), max_size=6, unique=True).map(sorted))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    masked = Text(text, spans)
    (tokens,) = Encoder(real_tokenizer).encode([masked], special=False)
    assert tokens.trained.tolist() == plain_mask(real_tokenizer, masked)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((0, 2), [True, False, False]),
        ((2, 3), [False, True, False]),
        ((3, 5), [False, False, True]),  # and not the blank before it, which is said to end there
        ((2, 5), [False, True, True]),
    ],
)
def test_offsets_that_leave_out_blanks_are_closed(span, expected):
    # "go", a blank and "to", as a tokenizer places them that trims blanks off the offsets.
    starts, ends = np.array([0, 3, 3]), np.array([2, 3, 5])
    assert encode._overlapping(starts, ends, [span]).tolist() == expected


def test_a_long_text_is_the_same_through_windows(real_tokenizer, shared_data, monkeypatch):
    whole = (shared_data / "tinystories.jsonl").read_text()[:60_000]
    text = Text(whole, [(10, 500), (20_003, 41_999)])
    (expected,) = Encoder(real_tokenizer).encode([text], special=True)
    monkeypatch.setattr(encode, "TEXT_WINDOW", 9_000)
    monkeypatch.setattr(encode, "OVERLAP", 2_000)
    (found,) = Encoder(real_tokenizer).encode([text], special=True)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.trained.tolist() == expected.trained.tolist()


def test_a_long_text_without_a_joint_is_taken_whole(monkeypatch):
    tokenizer = tiny.tokens()
    text = Text("é" * 3000, [(1000, 1001)])
    (expected,) = Encoder(tokenizer).encode([text], special=False)
    monkeypatch.setattr(encode, "TEXT_WINDOW", 1_000)
    monkeypatch.setattr(encode, "OVERLAP", 100)  # shorter than what has to agree
    (found,) = Encoder(tokenizer).encode([text], special=False)
    assert found.ids.tolist() == expected.ids.tolist()
    assert np.flatnonzero(found.trained).tolist() == [2000, 2001]


def test_no_tokenizer_setting_cuts_or_fills_documents(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    (document,) = documents(tokenizer, "completion", {"text": "longer than four"})
    assert tokenizer.decode(document.ids) == f"longer than four{END}"
