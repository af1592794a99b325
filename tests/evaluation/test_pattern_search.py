"""Patterns in answers, also those that never come to an end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardtune.errors import JobError
from shardtune.evaluation.answer_metrics import Reference, Regex
from shardtune.evaluation.comparison_table import as_document, draw_comparisons
from shardtune.evaluation.pattern_search import search_each
from shardtune.evaluation.recipes import find_tasks
from shardtune.evaluation.run_task import Comparison, run_task
from shardtune.evaluation.task_rows import open_rows

pytestmark = pytest.mark.process

NESTED = r"^(a+)+$"
"""Tries 2^n ways to fit n letters before it gives up."""
ENDLESS = 64 * "a" + "!"


@pytest.mark.parametrize(
    ("metric", "answer", "reference", "score"),
    [
        (Regex(pattern=r"answer is (\w+)"), "The answer is B. No, the answer is C", "B", 1),
        (Regex(pattern=r"answer is (\w+)", take="last"), "the answer is B, answer is C", "C", 1),
        (Regex(pattern=r"answer is (\w+)", ignore_case=True), "The ANSWER is b", "B", 1),
        (Regex(pattern=r"is (\w)?"), "it is ", "", 1),
        (Regex(pattern=r"\d{4}-\d\d"), "on 2024-05", "anything", 1),
        (Regex(pattern=r"\d{4}-\d\d"), "in May", "anything", 0),
        (Regex(pattern="(\u2028|\ud83d)"), "\u2028 or half an emoji", "", 1),
    ],
)
def test_scores(metric: Regex, answer: str, reference: str, score: float) -> None:
    (found,) = metric.search([answer])
    assert metric.score(found, Reference((reference,))) == score


def test_answers_around_an_endless_one_are_scored(tmp_path: Path) -> None:
    """Both sides, in what `evaluate` prints and in what it writes."""
    path = tmp_path / "q.jsonl"
    path.write_text(4 * '{"prompt": "say a", "answer": "a"}\n')
    (task,) = find_tasks(f"exact={path}")
    metric = Regex(pattern=NESTED, seconds=0.2)
    task = task.model_copy(update={"metric": metric, "name": "letters"})

    class Asked:
        has_template = False

        def answer(self, questions: Any, limits: Any) -> list[str]:
            return ["a", ENDLESS, "b", ENDLESS]

        def share(self, items: Any, work: Any) -> Any:
            return work(items)

    begun = time.monotonic()
    found = run_task(task, open_rows(task, has_template=False), Asked())  # type: ignore[arg-type]
    assert time.monotonic() - begun < 20
    assert found.scores == [1, 0, 0, 0]
    late = "timeout the pattern was not done after 0.2 s"
    said = as_document(Comparison(found))["after"]["answers"]
    assert [row["detail"] for row in said] == ["", late, "", late]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(draw_comparisons([Comparison(found)]))
    assert "letters: 2 answers scored 0" in shown.get()
    assert "(row 1, 3)" in shown.get()


def test_the_limit_is_that_of_a_text_not_of_all() -> None:
    """Each of these takes a part of the limit; together they are beyond it."""
    text = 20 * "a" + "!"
    begun = time.monotonic()
    assert search_each(NESTED, 0, [text], seconds=30) == [(0, "", "")]
    limit = 2 * (time.monotonic() - begun)  # with the start of the process
    begun = time.monotonic()
    assert search_each(NESTED, 0, 40 * [text], seconds=limit) == 40 * [(0, "", "")]
    assert time.monotonic() - begun > limit


def test_a_search_that_cannot_be_done_is_named() -> None:
    with pytest.raises(JobError, match=r"the search for '\(' failed: .*missing \)"):
        search_each("(", 0, ["a"], seconds=1)


def test_a_signal_that_is_blocked_here_still_ends_the_search() -> None:
    """A child takes over which signals its parent has blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        assert search_each(NESTED, 0, [40 * "a" + "!"], seconds=0.2) == [None]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
