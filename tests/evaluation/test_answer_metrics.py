"""Every metric on answers that are right, wrong and nearly right."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.errors import DataError, JobError
from shardtune.evaluation.answer_metrics import (
    ChrF,
    Code,
    Contains,
    Exact,
    JsonMetric,
    Number,
    Reference,
    Rouge,
    TextMetric,
    last_number,
    strip_fences,
)

SCHEMA = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("metric", "answer", "reference", "score"),
    [
        (Exact(), " Paris\n", "Paris", 1),
        (Exact(), "paris", "Paris", 0),
        (Exact(ignore_case=True, ignore_punctuation=True), "paris.", "Paris", 1),
        (Number(), "6 * 12 is 72.00", "so it is\n#### 72", 1),
        (Number(compare="text"), "6 * 12 is 72.00", "so it is\n#### 72", 0),
        (Number(compare="text"), "That makes $1,200.", "#### 1,200", 1),
        (Number(), "I don't know", "#### 3", 0),
        (Number(), "minus: -5", "-5", 1),
        (Number(), "it is ...", "5", 0),
        (Number(), "The answer is 42...", "42", 1),
        (Number(compare="text"), "The answer is 42...", "42", 0),
        (Number(), "It is 42, ... I think,", "#### 42", 1),
        (Number(), "$1,200.50.", "1200.5", 1),
        (Number(), "it's $-.5", "-0.5", 1),
        (Number(), "That is \u22125.", "-5", 1),
        (Number(), "That is \u22125.", "5", 0),
        (Number(), "between 5-10", "10", 1),
        (Number(), "COVID-19", "19", 1),
        (Number(), "x=-5", "-5", 1),
        (Number(), "about 1e5.", "100,000", 1),
        (Number(), "0.00001", str(1e-5), 1),
        (Number(), "-5", str(1e-5), 0),
        (Number(), "1.2E+3 m", "1200", 1),
        (Number(), "3e8m is no number of theirs", "8", 1),
        (Contains(), "The capital is PARIS, of course", "Paris", 1),
        (Contains(ignore_case=False), "The capital is PARIS", "Paris", 0),
        (JsonMetric(), '```json\n{"a": 1}\n```', "", 1),
        (JsonMetric(), '{"a": 1', "", 0),
        (JsonMetric(check="equal"), '{"b": 2, "a": 1}', '{"a": 1, "b": 2}', 1),
        (JsonMetric(check="equal"), '{"a": 1}', '{"a": 2}', 0),
        (JsonMetric(check="equal"), "[1.0, [true]]", "[1, [true]]", 1),
        (JsonMetric(check="equal"), "1", "true", 0),
        (JsonMetric(check="equal"), "[" * 100_000, "[]", 0),
    ],
)
def test_scores(metric: TextMetric, answer: str, reference: str, score: float) -> None:
    assert metric.score(answer, Reference((reference,))) == score


def test_any_of_several_answers_is_right() -> None:
    assert Exact().score("b", Reference(("a", "b"))) == 1


@pytest.mark.parametrize(("answer", "score"), [('{"age": 3}', 1), ('{"age": "3"}', 0), ("{}", 0)])
def test_a_schema_holds_or_not(answer: str, score: float) -> None:
    pytest.importorskip("jsonschema", reason="needs shardtune[eval]")
    assert JsonMetric(check="schema").score(answer, Reference(("",), truth=SCHEMA)) == score


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "#/\\$defs/none"),
        ({"items": [{"$ref": "#/definitions/none"}], "$schema": DRAFT_7}, "#/definitions/none"),
        ({"anyOf": [{"$ref": "http://127.0.0.1:9/other.json"}]}, "http://127.0.0.1:9"),
    ],
)
def test_a_schema_that_refers_to_nothing_is_refused_before_asking(schema: Any, named: str) -> None:
    pytest.importorskip("jsonschema", reason="needs shardtune[eval]")
    metric = JsonMetric(check="schema")
    with pytest.raises(DataError, match=f"row 3: the schema refers to '{named}"):
        metric.require(Reference(("",), truth=schema), "row 3")


def test_a_schema_is_read_by_the_draft_that_it_names() -> None:
    """`items` with a list, and `dependencies`, are of draft 7; later ones say them otherwise."""
    pytest.importorskip("jsonschema", reason="needs shardtune[eval]")
    metric = JsonMetric(check="schema")
    schema = {
        "$schema": DRAFT_7,
        "definitions": {"whole": {"type": "integer"}},
        "properties": {"a": {"items": [{"$ref": "#/definitions/whole"}]}},
        "dependencies": {"a": ["b"]},
    }
    reference = Reference(("",), truth=schema)
    metric.require(reference, "row 0")
    answers = ('{"a": [1], "b": 2}', '{"a": ["1"], "b": 2}', '{"a": [1]}')
    assert [metric.score(answer, reference) for answer in answers] == [1, 0, 0]


def test_a_schema_that_is_not_there_is_named() -> None:
    with pytest.raises(JobError, match="has no schema"):
        JsonMetric(check="schema").score("{}", Reference(("",)))


@pytest.mark.slow
def test_rouge_and_chrf_are_those_of_the_usual_libraries() -> None:
    rouge = pytest.importorskip("rouge_score.rouge_scorer", reason="needs shardtune[eval]")
    sacrebleu = pytest.importorskip("sacrebleu", reason="needs shardtune[eval]")
    said, wanted = "The cat sat on a mat", "A cat was sitting on the mat"
    scorer = rouge.RougeScorer(["rougeL"], use_stemmer=True)
    expected = scorer.score(wanted, said)["rougeL"].fmeasure
    assert 0 < expected < 1
    assert Rouge().score(said, Reference((wanted,))) == expected
    assert ChrF().score(said, Reference((wanted,))) == pytest.approx(
        sacrebleu.sentence_chrf(said, [wanted]).score / 100
    )
    assert Rouge().score(wanted, Reference((wanted,))) == 1


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: Any) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sacrebleu", None)  # as if it weren't installed
    with pytest.raises(JobError, match=r"sacrebleu is not installed\n.*shardtune\[eval\]"):
        ChrF().score("a", Reference(("a",)))


def test_numbers_are_found_as_the_harness_finds_them() -> None:
    assert last_number("He pays $5.") == "5"
    assert last_number("1,000 and 20%") == "20"
    assert last_number("none") is None


def test_code_is_taken_out_of_its_block() -> None:
    assert strip_fences("Here:\n```python\nx = 1\n```\nDone.") == "x = 1\n"
    assert strip_fences("x = 1") == "x = 1"
    program = Code(complete_prompt=True).program(
        "    return 1\n", Reference(("",), prompt="def f():\n")
    )
    assert program.startswith("def f():\n    return 1\n")
