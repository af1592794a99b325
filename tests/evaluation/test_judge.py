"""A judge behind a real HTTP endpoint: grades, pairs in both orders, ties, errors."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardtune.errors import DataError, JobError
from shardtune.evaluation.judge import (
    answer_turns,
    compare_pairs,
    grade,
    read_questions,
)
from shardtune.evaluation.judge_client import JudgeClient
from shardtune.evaluation.judge_report import by_category, draw_grades, draw_pairs, radar
from shardtune.evaluation.respondent import AnswerLimits, TaskQuestion
from tests.evaluation.judging_endpoint import Endpoint, serving

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Shorter, please."]},
    {
        "question_id": 101,
        "category": "math",
        "turns": ["1+1?", "And 2+2?"],
        "reference": ["2", "4"],
    },
]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


@pytest.fixture
def client(endpoint: Endpoint) -> JudgeClient:
    return JudgeClient(f"http://127.0.0.1:{endpoint.server_port}/v1", "judge", "secret", pause=0.01)


class Repeating:
    """Answers with the last message, so often."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.asked: list[tuple[TaskQuestion, float]] = []
        self.has_template = True

    def answer(self, questions: Sequence[TaskQuestion], limits: AnswerLimits) -> list[str]:
        self.asked += [(each, limits.temperature) for each in questions]
        return [each.messages[-1]["content"][:4] * self.times for each in questions]

    def score_options(self, pairs: Any) -> Any:
        raise NotImplementedError

    def score_texts(self, texts: Any) -> Any:
        raise NotImplementedError

    def share(self, items: Any, work: Any) -> Any:
        raise NotImplementedError


def questions(tmp_path: Path) -> list[Any]:
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return read_questions(str(path))


def test_the_second_turn_is_asked_after_the_first_answer(tmp_path: Path) -> None:
    model = Repeating(2)
    said = answer_turns(questions(tmp_path), model)
    assert said == {"81": ("WritWrit", "ShorShor"), "101": ("1+1?1+1?", "And And")}
    last = {each.messages[0]["content"]: (each, t) for each, t in model.asked[2:]}
    asked, temperature = last["Write a poem."]
    assert [each["content"] for each in asked.messages] == [
        "Write a poem.", "WritWrit", "Shorter, please."
    ]  # fmt: skip
    assert temperature == 0.7
    assert last["1+1?"][1] == 0.0


def test_grades_and_their_report(tmp_path: Path, endpoint: Endpoint, client: JudgeClient) -> None:
    asked = questions(tmp_path)
    old, new = answer_turns(asked, Repeating(1)), answer_turns(asked, Repeating(2))
    grades = [*grade(asked, old, "before", client.ask), *grade(asked, new, "after", client.ask)]
    assert [each.score for each in grades] == [4, 4, 4, 3, 8, 8, 8, 7]
    assert all("Fine." in each.text for each in grades)
    assert endpoint.keys == {"Bearer secret"}
    texts = [each["messages"][1]["content"] for each in endpoint.seen]
    assert sum("[reference answer, turn 2]\n4" in text for text in texts) == 2
    console = Console(width=120, record=True, file=StringIO())
    console.print(draw_grades(grades))
    shown = console.export_text()
    assert "math" in shown
    assert "+4.00 [+4.00, +4.00]" in shown
    means = {
        side: {name: sum(s) / len(s) for name, s in by_category(grades, side).items()}
        for side in ("before", "after")
    }
    picture = ElementTree.fromstring(radar(means))
    assert len(picture.findall("{http://www.w3.org/2000/svg}polygon")) == 5 + 2


def test_pairs_are_judged_in_both_orders(
    tmp_path: Path, endpoint: Endpoint, client: JudgeClient
) -> None:
    asked = questions(tmp_path)
    old, new = answer_turns(asked, Repeating(1)), answer_turns(asked, Repeating(9))
    found = list(compare_pairs(asked, old, new, client.ask))
    assert [each.winner for each in found] == ["after"] * 4
    assert [each.winner for each in compare_pairs(asked, new, old, client.ask)] == ["before"] * 4
    assert [each.winner for each in compare_pairs(asked, new, new, client.ask)] == ["tie"] * 4
    endpoint.always = "The first is better. [[A]]"  # a judge that loves the first place
    biased = list(compare_pairs(asked, old, new, client.ask))
    assert [each.winner for each in biased] == ["tie"] * 4
    assert biased[0].first == biased[0].second == endpoint.always
    console = Console(width=120, record=True, file=StringIO())
    console.print(draw_pairs([*found, *biased]))
    assert "75.0%" in console.export_text()


def test_a_grade_that_cannot_be_read_is_kept_and_not_counted(
    tmp_path: Path, endpoint: Endpoint, client: JudgeClient
) -> None:
    endpoint.always = "I would rather not. Rating: [[99]]"
    asked = questions(tmp_path)
    (first, *_) = grade(asked, answer_turns(asked, Repeating(1)), "after", client.ask)
    assert first.score is None
    assert "rather not" in first.text
    assert by_category([first], "after") == {}


def test_a_busy_judge_is_asked_again_and_a_wrong_key_is_told(
    endpoint: Endpoint, client: JudgeClient
) -> None:
    endpoint.failures = [503, 429]
    assert "[[" in client.ask("grade", "a\nb")
    assert len(endpoint.seen) == 3
    endpoint.failures = [401]
    with pytest.raises(JobError, match="HTTP 401") as caught:
        client.ask("grade", "a\nb")
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(client)
    with pytest.raises(JobError, match="no http address"):
        JudgeClient("file:///etc/passwd", "judge")


def test_a_reply_that_breaks_off_is_asked_for_again(
    endpoint: Endpoint, client: JudgeClient
) -> None:
    endpoint.cut = 2
    assert "[[" in client.ask("grade", "a\nb")
    assert len(endpoint.seen) == 3
    endpoint.cut = 5
    with pytest.raises(JobError, match="the judge doesn't answer: IncompleteRead"):
        client.ask("grade", "a\nb")


def test_grades_are_shown_where_the_judge_failed_before_the_other_side(
    tmp_path: Path, endpoint: Endpoint, client: JudgeClient
) -> None:
    asked = questions(tmp_path)
    grades = list(grade(asked, answer_turns(asked, Repeating(1)), "before", client.ask))
    console = Console(width=120, record=True, file=StringIO())
    console.print(draw_grades(grades))
    assert "math" in console.export_text()


def test_a_category_without_two_grades_of_a_question_has_no_change(
    tmp_path: Path, endpoint: Endpoint, client: JudgeClient
) -> None:
    asked = questions(tmp_path)
    said = answer_turns(asked, Repeating(1))
    first, second = asked
    sides = [grade([first], said, "before", client.ask), grade([second], said, "after", client.ask)]
    console = Console(width=120, record=True, file=StringIO())
    console.print(draw_grades([each for side in sides for each in side]))
    assert "nan" not in console.export_text()


@pytest.mark.parametrize(
    ("refused", "left"),
    [
        ({"temperature": "Unsupported value: 'temperature' does not support 0"}, {"max_tokens"}),
        (
            {
                "max_tokens": "'max_tokens' is not supported, use 'max_completion_tokens'",
                "temperature": "Unsupported value: 'temperature'",
            },
            {"max_completion_tokens"},
        ),
        (
            dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_tokens is too large"),
            {"temperature"},
        ),
    ],
)
def test_a_judge_gets_no_setting_that_it_refuses(
    endpoint: Endpoint, client: JudgeClient, refused: dict[str, str], left: set[str]
) -> None:
    """As OpenAI's models that think first do, and servers whose context is short."""
    endpoint.refused = refused
    assert "[[" in client.ask("grade", "a\nb")
    tries = len(endpoint.seen)
    assert "[[" in client.ask("grade", "a\nb")
    assert len(endpoint.seen) == tries + 1, "it is asked so from the beginning"
    assert endpoint.seen[-1].keys() - {"model", "messages"} == left


def test_a_judge_that_refuses_something_else_is_told(
    endpoint: Endpoint, client: JudgeClient
) -> None:
    endpoint.refused = {"model": "this max_tokens isn't what you think"}
    with pytest.raises(JobError, match=r"HTTP 400: .*isn't what you think"):
        client.ask("grade", "a\nb")


def test_a_row_without_turns_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"category": "math"}\n')
    with pytest.raises(DataError, match="row 1: has no turns"):
        read_questions(str(path))


def test_a_reference_may_be_one_text_and_ids_differ(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    row = {"question_id": 7, "turns": ["1+1?"], "reference": "two"}
    path.write_text(json.dumps(row) + "\n")
    (question,) = read_questions(str(path))
    assert question.references == ("two",)
    path.write_text(2 * (json.dumps(row) + "\n"))
    with pytest.raises(DataError, match="row 2: its id '7' came before"):
        read_questions(str(path))
