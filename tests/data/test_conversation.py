"""Conversations as people store them: JSON text for objects, and calls in many forms."""

from __future__ import annotations

import json

import pytest

from shardtune.config.job import DataSection, TrainSource
from shardtune.data.conversation import read_conversation
from shardtune.data.prepare import prepare
from shardtune.data.records import Unreadable
from shardtune.errors import DataError
from shardtune.models import tiny

STOPS = frozenset({tiny.END})
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
WANTED = [
    {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "Sunny."},
]
ARGUMENTS = '{"city": "Rome"}'


def around(turn):
    return [WANTED[0], turn, *WANTED[2:]]


SAME = {
    "objects": around(WANTED[1]),
    "arguments as text": around(
        {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}]}
    ),
    "calls as text": around({"role": "assistant", "tool_calls": json.dumps([CALL])}),
    "a list of texts": around({"role": "assistant", "tool_calls": [json.dumps(CALL)]}),
    "calls without their wrapping": around(
        {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": ARGUMENTS}]}
    ),
    "OpenAI's earlier form": around(
        {"role": "assistant", "content": None,
         "function_call": {"name": "weather", "arguments": ARGUMENTS}}
    ),
    "ShareGPT": [
        {"from": "human", "value": "Rome?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "sun"},
        {"from": "gpt", "value": "Sunny."},
    ],
    "the turns as text": json.dumps(WANTED),
}  # fmt: skip


@pytest.mark.parametrize("turns", SAME.values(), ids=SAME)
def test_calls_in_all_their_forms_are_the_same(turns):
    assert read_conversation(turns).messages == WANTED


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        [TOOL["function"]],
        json.dumps([TOOL["function"]]),
        [{"type": "function", **TOOL["function"]}],
    ],
)
def test_tools_in_all_their_forms_are_the_same(tools):
    assert read_conversation(WANTED, tools).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, [], "", "[]", " "])
def test_no_tools(tools):
    assert read_conversation(WANTED, tools).tools is None


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "function_call", "value": "weather(Rome)"}, "turn 2 are text, but no JSON"),
        ({"from": "function_call", "value": ""}, "turn 2 (assistant) is empty"),
        ({"from": "function_call", "value": "[1]"}, "turn 2 has a tool call without a name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": "Rome"}]},
            "the arguments of the tool call 'weather' in turn 2 are text, but no JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": [1]}]},
            "the arguments of the tool call 'weather' in turn 2 are no object",
        ),
    ],
)
def test_calls_that_are_none(turn, reason):
    with pytest.raises(Unreadable) as caught:
        read_conversation(around(turn))
    assert reason in caught.value.reason


def test_a_system_prompt_in_a_column_of_its_own():
    assert read_conversation(WANTED, None, "Be brief.").messages[0] == {
        "role": "system", "content": "Be brief.",
    }  # fmt: skip
    own = [{"role": "system", "content": "Be long."}, *WANTED]
    assert read_conversation(own, None, "Be brief.").messages == own
    assert read_conversation(WANTED, None, " ").messages == WANTED


def test_a_template_without_tools_is_blamed_once(tmp_path, tokenizer):
    path = tmp_path / "calls.jsonl"
    plain = {"messages": [WANTED[0], WANTED[3]]}
    rows = [plain, *({"messages": turns} for turns in SAME.values())] * 6
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train=(TrainSource(path=str(path), format="chat"),))
    with pytest.raises(DataError) as caught:
        prepare(section, tokenizer, STOPS, cache=tmp_path, quiet=True)
    (problem,) = caught.value.problems
    assert problem.place == "the chat template"
    assert problem.fact == (
        "can't write tool calls: the roles are system, user and assistant, not tool; "
        f"48 of 54 rows need that ({path}:2, {path}:3, {path}:4, ...)"
    )
    assert problem.fix.startswith("data.chat_template: one that can, as a file or by name (chatml,")
