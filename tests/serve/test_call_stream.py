"""Calls in an answer's text: wherever it is cut into pieces, the same comes out as of the whole."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtune.core.model.written_calls import SPELLINGS
from shardtune.models import tiny
from shardtune.serve.call_stream import CallStream
from shardtune.serve.generation_request import Piece, ToolCall
from shardtune.serve.text_stream import TextStream

BY_NAME = {each.parser: each for each in SPELLINGS}
ONE, TWO = '{"name": "f", "arguments": {"x": "ü"}}', '{"name": "g", "parameters": {}}'
F, G = ("f", {"x": "ü"}), ("g", {})
Calls = list[tuple[str, dict[str, object]]]
CASES: dict[str, tuple[str, str, str, Calls]] = {
    "a text": ("hermes", "Just <tool text. \n", "Just <tool text. \n", []),
    "a call": ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [F]),
    "a text and two calls": (
        "hermes",
        f"Let me look.\n\n<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}\n</tool_call>\n",
        "Let me look.",
        [F, G],
    ),
    "a text behind it": ("hermes", f"<tool_call>{TWO}</tool_call> Done. ", " Done.", [G]),
    "no end": ("hermes", f"Look. <tool_call>\n{ONE}", "Look.", [F]),
    "no JSON": ("hermes", "A\n<tool_call>\nf(x)\n</tool_call>\nB\n", None, []),
    "no JSON, then a call": (
        "hermes",
        f" <tool_call>{{'</tool_call>\n<tool_call>{TWO}</tool_call>",
        " <tool_call>{'</tool_call>",
        [G],
    ),
    "cut off": ("hermes", 'A <tool_call>\n{"name": "f", "argu', None, []),
    "a list": ("mistral", f"[TOOL_CALLS] [{ONE}, {TWO}]", "", [F, G]),
    "a text and a list": ("mistral", f"Hm. [TOOL_CALLS][{ONE}] so [1]", "Hm. so [1]", [F]),
    "a list of something else": ("mistral", "[TOOL_CALLS] [1, 2] [3]", None, []),
    "a list that is cut off": ("mistral", f"[TOOL_CALLS] [{ONE}, ", None, []),
    "bare": ("llama3_json", TWO, "", [G]),
    "two bare ones": ("llama3_json", f"\n{ONE}\n{TWO}", "", [F, G]),
    "behind the tag": ("llama3_json", f"<|python_tag|>{ONE}; {TWO}", "", [F, G]),
    "an object": ("llama3_json", '{"name": "Rome", "sun": [1]}\n', None, []),
    "text behind an object": ("llama3_json", f"{TWO} is it", None, []),
    "text before an object": ("llama3_json", f"It is {TWO}", None, []),
    "an object that is cut off": ("llama3_json", ' {"name": "g", "parame', None, []),
    "Python": ("llama3_json", "<|python_tag|>print(1)\n", None, []),
}  # fmt: skip


def told(spelling: str, pieces: list[str], finish: str = "stop") -> tuple[str, Calls, str | None]:
    stream = CallStream(BY_NAME[spelling])
    found = [part for text in pieces for part in stream.pieces(Piece(text))]
    found += stream.pieces(Piece("", finish=finish))  # type: ignore[arg-type]
    calls: list[ToolCall] = [call for part in found for call in part.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    assert all(part.finish is None for part in found[:-1])
    text = "".join(part.text for part in found)
    return text, [(each.name, json.loads(each.arguments)) for each in calls], found[-1].finish


@pytest.mark.parametrize("case", CASES)
def test_text_and_calls(case: str) -> None:
    spelling, answer, text, calls = CASES[case]
    expected = (answer if text is None else text, calls, "tool_calls" if calls else "stop")
    assert told(spelling, [answer]) == expected
    assert told(spelling, list(answer)) == expected
    assert told(spelling, [answer], "length")[2] == "length"


@given(st.data())
def test_any_cut_gives_what_the_whole_gives(data: st.DataObject) -> None:
    bits = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", ONE, TWO, f"[{ONE}]"]
    bits += [" ", "\n", "<tool", "{", "[", "]", "}", "1", ";", "text", '"']
    answer = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=12)))
    places = data.draw(st.lists(st.integers(0, len(answer)), max_size=8))
    cuts = [0, *sorted(places), len(answer)]
    for spelling in BY_NAME:
        whole = told(spelling, [answer])
        assert told(spelling, [answer[one:two] for one, two in pairwise(cuts)]) == whole
        assert whole[1] or whole[0] == answer  # where nothing is called, nothing is lost


def test_only_what_may_begin_a_call_is_held_back() -> None:
    stream = CallStream(BY_NAME["hermes"])
    shown = [[part.text for part in stream.pieces(Piece(text))] for text in "a <t>"]
    assert shown == [["a"], [""], [""], [""], [" <t>"]]
    parts = stream.pieces(Piece(f"<tool_call>{ONE}</tool_call>"))
    assert [len(part.calls) for part in parts] == [1]  # as soon as it closes
    stream = CallStream(BY_NAME["llama3_json"])
    assert [stream.pieces(Piece(text))[0].text for text in ("{", '"a": 1', "}", " b")] == [
        "", "", '{"a": 1}', " b",
    ]  # fmt: skip
    stream = CallStream(BY_NAME["mistral"])
    assert stream.pieces(Piece(f"[TOOL_CALLS][{TWO}]"))[0].calls


def through_tokens(tokenizer: object, spelling: str, answer: str) -> tuple[str, Calls, str | None]:
    """As the server decodes it."""
    stream = TextStream(tokenizer, (), (), BY_NAME[spelling].tags)
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    return told(spelling, [*map(stream.add, ids), stream.end()])


@pytest.mark.parametrize("special", [False, True])
def test_tags_that_are_special_tokens_are_seen(special: bool) -> None:
    """Plain decoding skips those."""
    tokenizer = tiny.tokens()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=special)
    answer = f"Grüße\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>"
    assert through_tokens(tokenizer, "hermes", answer) == ("Grüße", [F, G], "tool_calls")
    plain = TextStream(tokenizer)
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    said = "".join([*map(plain.add, ids), plain.end()])
    assert ("<tool_call>" in said) is not special


SHARED = Path(__file__).parents[2] / "../shared/tokenizers"


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/tokenizers is not here")
@pytest.mark.parametrize(
    ("name", "spelling", "answer"),
    [
        ("mistral-v3", "mistral", f"Grüße [TOOL_CALLS] [{ONE}, {TWO}]"),
        ("smollm2", "hermes", f"Grüße\n<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>"),
    ],
)
def test_tokenizers_that_people_have(name: str, spelling: str, answer: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(SHARED / name))
    assert through_tokens(tokenizer, spelling, answer) == ("Grüße", [F, G], "tool_calls")
