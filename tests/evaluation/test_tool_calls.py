"""Function calls are read in the forms that models write, and compared as BFCL does."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.core.model.written_calls import Call
from shardtune.evaluation.tool_calls import matches_truth, parse_calls

AREA = [Call("area", {"base": 10, "height": 5})]
TRUTH = [{"area": {"base": [10], "height": [5], "unit": ["units", ""]}}]


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>\n{"name": "area", "arguments": {"base": 10, "height": 5}}\n</tool_call>',
        '{"name": "area", "parameters": {"base": 10, "height": 5}}',
        '[{"function": {"name": "area", "arguments": "{\\"base\\": 10, \\"height\\": 5}"}}]',
        "[area(base=10, height=5)]",
        "area(base=10, height=5)",
        "```json\n" + '{"name": "area", "arguments": {"base": 10, "height": 5}}\n```',
    ],
)
def test_every_form_is_read(answer: str) -> None:
    assert parse_calls(answer) == AREA


@pytest.mark.parametrize(
    "answer",
    ["The area is 25.", "area(10, 5)", "[1, 2]", "{}", "area(base=open('x'))", "(", "[" * 100_000],
)
def test_what_is_no_call_is_none(answer: str) -> None:
    assert parse_calls(answer) == []


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"base": 10, "height": 5}, True),
        ({"base": 10.0, "height": 5, "unit": "Units"}, True),
        ({"base": 10}, False),
        ({"base": 11, "height": 5}, False),
        ({"base": 10, "height": 5, "unit": "metres"}, False),
        ({"base": 10, "height": 5, "color": "red"}, False),
        ({"base": True, "height": 5}, False),
    ],
)
def test_arguments_are_compared(arguments: dict[str, Any], right: bool) -> None:
    assert matches_truth([Call("area", arguments)], TRUTH) is right


def test_calls_side_by_side_may_come_in_any_order() -> None:
    truth = [{"f": {"x": [1]}}, {"f": {"x": [2]}}]
    assert matches_truth([Call("f", {"x": 2}), Call("f", {"x": 1})], truth)
    assert not matches_truth([Call("f", {"x": 1}), Call("f", {"x": 1})], truth)
    assert not matches_truth([Call("f", {"x": 1})], truth)


def test_strings_lists_and_objects() -> None:
    truth = [
        {
            "g": {
                "city": ["New York, NY"],
                "days": [["mon", "tue"]],
                "at": [{"h": [9], "m": [0, ""]}],
            }
        }
    ]
    right = {"city": "new york NY", "days": ["Mon", "Tue"], "at": {"h": 9}}
    assert matches_truth([Call("g", right)], truth)
    assert not matches_truth([Call("g", right | {"at": {"m": 0}})], truth)
    assert not matches_truth([Call("g", right | {"days": ["mon"]})], truth)
