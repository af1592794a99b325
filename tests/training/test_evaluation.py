"""The judge: every held-out set by its name, a few prompts of the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardtune.config.job import EvaluateSection
from shardtune.core.step import MicroBatch
from shardtune.engine.fake import FakeEngine
from shardtune.models import tiny
from shardtune.training.evaluation import Evaluator
from tests.synthetic import batch, prepared


def documents(count: int) -> list[tuple[list[int], list[bool]]]:
    """`question N` and `answer N`, of which the answer is trained."""
    found = []
    for n in range(count):
        question, reply = list(f"question {n}".encode()), list(f"answer {n}".encode())
        found.append((question + reply, [False] * len(question) + [True] * len(reply)))
    return found


def evaluator(count: int, **section: Any) -> Evaluator:
    sets = [prepared("first", documents(count)), prepared("second", documents(2))]

    def batches(name: str) -> Iterator[MicroBatch]:
        yield from [batch(1)] if name == "first" else [batch(1), batch(2)]

    return Evaluator(
        FakeEngine(), sets, batches, tiny.tokens(), frozenset(), EvaluateSection(**section)
    )


def test_each_set_has_losses_of_its_own() -> None:
    results = evaluator(4).losses()
    assert [result.name for result in results] == ["first", "second"]
    assert [result.labels for result in results] == [30, 60]  # 2 rows of 15 trained positions


def test_prompts_are_spread_over_the_first_set() -> None:
    questions = evaluator(10, samples=3).questions()
    assert [question.prompt for question in questions] == [
        "question 0",
        "question 3",
        "question 6",
    ]
    assert [question.reference for question in questions] == ["answer 0", "answer 3", "answer 6"]


def test_a_small_set_is_asked_as_far_as_it_goes() -> None:
    assert len(evaluator(2, samples=5).questions()) == 2


def test_nothing_is_asked_without_prompts() -> None:
    assert evaluator(4, samples=0).answers() == []
    empty = Evaluator(FakeEngine(), [], lambda name: [], None, frozenset(), EvaluateSection())
    assert empty.losses() == empty.questions() == empty.answers() == []
