"""LLM as a judge, MT-bench's way: two turns, categories, grades, and pairs in both orders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from shardtune.errors import DataError, Problem
from shardtune.evaluation.respondent import AnswerLimits, Respondent, TaskQuestion
from shardtune.evaluation.task_rows import read_rows

Winner = Literal["before", "after", "tie"]
Ask = Callable[[str, str], str]
"""Given a system message and a text, what the judge says."""
Given = TypeVar("Given")

TEMPERATURES = {"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1}
"""Of answers, as in MT-bench; other categories are answered greedily."""

_GRADER = (
    "You are a fair and strict examiner. You grade the last answer of an assistant to a user. "
    "Look at whether it is helpful, relevant, correct, deep, creative and detailed enough. Explain "
    "your grade in a few sentences first. Then end with the grade, a whole number from 1 (useless) "
    "to 10 (perfect), in exactly this form: Rating: [[5]]"
)
_REFEREE = (
    "You are an impartial referee. You compare two assistants, A and B, who were asked the same. "
    "Look at whether the answers follow the instructions, are helpful, correct, relevant and "
    "detailed enough. Neither the order nor the length of the answers may count. Explain the "
    "comparison in a few sentences first. Then end with your verdict in exactly this form: [[A]] "
    "if A is better, [[B]] if B is better, [[C]] for a tie."
)
_RATING = re.compile(r"\[\[\s*(\d+(?:\.\d+)?)\s*\]\]")
_VERDICT = re.compile(r"\[\[\s*([ABC])\s*\]\]")


@dataclass(frozen=True)
class JudgedQuestion:
    """A question of two turns or of one."""

    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grade:
    """Single answer grading; `score` is None where the judge gave no readable grade."""

    question: str
    category: str
    turn: int
    side: Literal["before", "after"]
    score: float | None
    text: str


@dataclass(frozen=True)
class PairVerdict:
    """One comparison, judged in both orders. Only a judge that doesn't change its mind decides."""

    question: str
    category: str
    turn: int
    winner: Winner
    first: str
    """The judge's text with `before` as A."""
    second: str
    """And with `before` as B."""


def read_questions(path: str) -> list[JudgedQuestion]:
    """MT-bench's `question.jsonl`, or rows of one's own with `turns` and `category`."""
    found: dict[str, JudgedQuestion] = {}
    for number, row in enumerate(read_rows(path, None, "train"), 1):
        turns = _texts(row.get("turns") or row.get("prompt"))
        if not turns:
            fix = "a row has `turns`, a list of one or two texts, and a `category`"
            raise DataError(Problem(f"{path}: row {number}", "has no turns", fix))
        name = str(row.get("question_id", row.get("prompt_id", number)))
        if name in found:
            fix = "give each row a `question_id` of its own"
            raise DataError(Problem(f"{path}: row {number}", f"its id {name!r} came before", fix))
        category = str(row.get("category", "general"))
        found[name] = JudgedQuestion(name, category, turns, _texts(row.get("reference")))
    return list(found.values())


def _texts(value: Any) -> tuple[str, ...]:
    """One text, or a list of them."""
    if value is None or value == "":
        return ()
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


def try_judge(ask: Ask) -> None:
    """One grade that nobody wants: JobError where the endpoint, the model or the key is wrong."""
    trial = JudgedQuestion("trial", "math", ("What is 1 + 1?",))
    ask(_GRADER, _dialogue(trial, ("2",), 0, "assistant"))


def answer_turns(
    questions: Sequence[JudgedQuestion], respondent: Respondent, max_new_tokens: int = 1024
) -> dict[str, tuple[str, ...]]:
    """All answers of a model by question: each turn is asked after the answers before it."""
    said: dict[str, tuple[str, ...]] = {each.id: () for each in questions}
    for turn in range(max(len(each.turns) for each in questions)):
        for temperature in sorted({TEMPERATURES.get(each.category, 0.0) for each in questions}):
            asked = [
                each
                for each in questions
                if turn < len(each.turns) and TEMPERATURES.get(each.category, 0.0) == temperature
            ]
            limits = AnswerLimits(max_new_tokens, temperature=temperature)
            framed = [_framed(each, said[each.id], respondent.has_template) for each in asked]
            for each, answer in zip(asked, respondent.answer(framed, limits), strict=True):
                said[each.id] = (*said[each.id], answer.strip())
    return said


def _framed(question: JudgedQuestion, said: tuple[str, ...], has_template: bool) -> TaskQuestion:
    messages = []
    for asked, answer in zip(question.turns, said, strict=False):
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": question.turns[len(said)]})
    if has_template:
        return TaskQuestion(messages=tuple(messages))
    lines = [f"{each['role'].capitalize()}: {each['content']}" for each in messages]
    return TaskQuestion(text="\n\n".join([*lines, "Assistant:"]))


def grade(
    questions: Sequence[JudgedQuestion],
    answers: dict[str, tuple[str, ...]],
    side: Literal["before", "after"],
    ask: Ask,
    *,
    at_once: int = 4,
) -> Iterator[Grade]:
    """Single answer grading of every turn, as the judge says it."""

    def graded(given: tuple[JudgedQuestion, int]) -> Grade:
        question, turn = given
        text = ask(_GRADER, _dialogue(question, answers[question.id], turn, "assistant"))
        found = _RATING.findall(text)
        score = float(found[-1]) if found and 1 <= float(found[-1]) <= 10 else None
        return Grade(question.id, question.category, turn + 1, side, score, text)

    yield from _at_once(graded, _turns(questions), at_once)


def compare_pairs(
    questions: Sequence[JudgedQuestion],
    before: dict[str, tuple[str, ...]],
    after: dict[str, tuple[str, ...]],
    ask: Ask,
    *,
    at_once: int = 4,
) -> Iterator[PairVerdict]:
    """Pairwise comparison of every turn, with positions swapped: a judge that favours the first
    place, or can't be read, makes a tie."""

    def judged(given: tuple[JudgedQuestion, int]) -> PairVerdict:
        question, turn = given
        old = _dialogue(question, before[question.id], turn, "{}")
        new = _dialogue(question, after[question.id], turn, "{}")
        first = ask(_REFEREE, _side_by_side(old, new))
        second = ask(_REFEREE, _side_by_side(new, old))
        found = (_winner(first, "before", "after"), _winner(second, "after", "before"))
        winner: Winner = found[0] if found[0] == found[1] else "tie"
        return PairVerdict(question.id, question.category, turn + 1, winner, first, second)

    yield from _at_once(judged, _turns(questions), at_once)


def _turns(questions: Sequence[JudgedQuestion]) -> list[tuple[JudgedQuestion, int]]:
    return [(each, turn) for each in questions for turn in range(len(each.turns))]


def _at_once(
    work: Callable[[tuple[JudgedQuestion, int]], Given],
    given: Sequence[tuple[JudgedQuestion, int]],
    count: int,
) -> Iterator[Given]:
    with ThreadPoolExecutor(count) as pool:
        yield from pool.map(work, given)


def _winner(text: str, a: Winner, b: Winner) -> Winner:
    found = _VERDICT.findall(text)
    sides: dict[str, Winner] = {"A": a, "B": b}
    return sides.get(found[-1], "tie") if found else "tie"


def _dialogue(question: JudgedQuestion, said: tuple[str, ...], turn: int, who: str) -> str:
    """The conversation up to a turn, with the reference where there is one."""
    parts = []
    for number in range(turn + 1):
        parts.append(f"[user, turn {number + 1}]\n{question.turns[number]}")
        if number < len(question.references):
            parts.append(f"[reference answer, turn {number + 1}]\n{question.references[number]}")
        parts.append(f"[{who}, turn {number + 1}]\n{said[number]}")
    return "\n\n".join(parts)


def _side_by_side(a: str, b: str) -> str:
    return "\n\n".join(
        f"=== Conversation with assistant {name} ===\n\n{text.replace('[{}', f'[assistant {name}')}"
        for name, text in (("A", a), ("B", b))
    )
