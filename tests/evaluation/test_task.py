"""Tasks as files, as recipes and on the command line, and the questions that they become."""

from __future__ import annotations

import json
import re
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from shardtune.errors import DataError, JobError
from shardtune.evaluation.recipes import RECIPES, find_tasks
from shardtune.evaluation.task import Task, load_tasks, parse_task, require_answerable
from shardtune.evaluation.task_rows import open_rows
from tests.no_hub import lose_hub


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_file_of_tasks_is_read_with_paths_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "q.jsonl", [{"prompt": "1+1?", "answer": "2"}])
    (tmp_path / "tasks.yaml").write_text(
        "- {name: sums, path: q.jsonl, metric: number}\n"
        "- {name: same, path: q.jsonl, metric: {type: exact, ignore_case: true}, limit: 1}\n"
    )
    first, second = load_tasks(tmp_path / "tasks.yaml")
    assert first.metric.type == "number"
    assert second.limit == 1
    (row,) = open_rows(first, has_template=False)
    assert row.question.text == "1+1?"
    assert row.reference.answers == ("2",)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"metric": "exakt"}, "did you mean exact"),
        ({"metric": "exact", "promt": "x"}, "did you mean prompt"),
        ({}, "metric: is missing"),
        ({"metric": "exact", "limit": 0}, "greater than 0"),
        ({"metric": {"type": "regex", "pattern": "("}}, "is no regular expression"),
    ],
)
def test_mistakes_are_named(task: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        parse_task({"name": "t", "path": "q.jsonl"} | task, "tasks.yaml")


def test_examples_stand_before_each_question_and_are_not_asked(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(5)]
    path = write(tmp_path / "q.jsonl", rows)
    (task,) = find_tasks(f"gsm8k={path}")
    found = open_rows(task.with_options({"shots": 2, "limit": 2}), has_template=True)
    assert [row.number for row in found] == [2, 3]
    assert found[0].question.text == (
        "Question: q0\nAnswer: a0\n\nQuestion: q1\nAnswer: a1\n\nQuestion: q2\nAnswer:"
    )
    with pytest.raises(DataError, match="9 examples are wanted, 5 are there"):
        open_rows(task.with_options({"shots": 9}), has_template=True)


def test_examples_of_a_hub_s_data_set_come_from_their_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows(split: str, subject: str) -> list[dict[str, Any]]:
        return [
            {"question": f"{split} {subject} {n}", "choices": list("wxyz"), "answer": n,
             "subject": subject}
            for n in range(3)
        ]  # fmt: skip

    def hub(path: str, subset: str | None, split: str) -> list[dict[str, Any]]:
        assert (path, subset) == ("cais/mmlu", "all")
        return rows(split, "law") + rows(split, "art")

    monkeypatch.setattr("shardtune.evaluation.task_rows._hub_rows", hub)
    (task,) = find_tasks("mmlu")
    found = open_rows(task.with_options({"shots": 2}), has_template=True)
    assert [row.number for row in found] == list(range(6)), "an example of its own was taken"
    for row in found:
        subject = "law" if row.number < 3 else "art"
        shown = [line for line in row.context.splitlines() if line.endswith(tuple("012"))]
        number = row.number % 3
        assert shown == [f"dev {subject} 0", f"dev {subject} 1", f"test {subject} {number}"]
    with pytest.raises(DataError, match="4 examples of subject 'law' are wanted, 3 are there"):
        open_rows(task.with_options({"shots": 4}), has_template=True)


def test_a_hub_that_can_t_be_reached_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own client would retry for 24 s."""
    lose_hub(monkeypatch)
    (task,) = find_tasks("mmlu")
    begun = monotonic()
    with pytest.raises(DataError, match=r"https://hub\.invalid has no address here, and it isn't"):
        open_rows(task, has_template=True)
    assert monotonic() - begun < 12


def test_examples_of_a_file_are_of_the_same_subject(tmp_path: Path) -> None:
    rows = [
        {"question": f"q{n}", "choices": list("wxyz"), "answer": 0, "subject": "ab"[n % 2]}
        for n in range(6)
    ]
    (task,) = find_tasks(f"mmlu={write(tmp_path / 'q.jsonl', rows)}")
    found = open_rows(task.with_options({"shots": 1, "limit": 3}), has_template=True)
    assert [row.number for row in found] == [2, 3, 4]
    assert ["q0" in row.context for row in found] == [True, False, True]


def test_a_conversation_goes_through_the_template(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"prompt": "Hi", "answer": ["a", "b"]}])
    (task,) = find_tasks(f"exact={path}")
    (row,) = open_rows(task.with_options({"system": "Be kind."}), has_template=True)
    assert row.question.messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    )
    assert row.reference.answers == ("a", "b")


@pytest.mark.parametrize(
    ("answer", "right"),
    [([1, 2], "[1, 2]"), ([{"a": 1}], '[{"a": 1}]'), (True, "true"), ('{"a": 1}', '{"a": 1}')],
)
def test_a_row_keeps_its_answer_as_json(tmp_path: Path, answer: Any, right: str) -> None:
    path = write(tmp_path / "q.jsonl", [{"prompt": "?", "answer": answer}])
    (task,) = find_tasks(f"json={path}")
    task = task.with_options({"metric": {"type": "json", "check": "equal"}})
    (row,) = open_rows(task, has_template=True)
    assert row.reference.answers == (right,)


def test_references_that_nothing_can_equal_are_refused_before_asking(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"prompt": "?", "answer": "Paris"}])
    (task,) = find_tasks(f"json={path}")
    for check, told in (
        ("equal", "row 0: the answer 'Paris' is no JSON"),
        ("tool_call", "no list"),
    ):
        checked = task.with_options({"metric": {"type": "json", "check": check}})
        with pytest.raises(DataError, match=told):
            open_rows(checked, has_template=True)


@pytest.mark.parametrize("answer", [1, "B", "two", "1"])
def test_an_option_is_named_by_text_number_or_letter(tmp_path: Path, answer: Any) -> None:
    path = write(
        tmp_path / "q.jsonl", [{"prompt": "?", "choices": ["one", "two"], "answer": answer}]
    )
    (task,) = find_tasks(f"choice={path}")
    (row,) = open_rows(task, has_template=True)
    assert row.reference.answers == ("two",)


def test_bfcl_finds_its_answers_beside_the_questions(tmp_path: Path) -> None:
    asked = {
        "id": "simple_0",
        "question": [[{"role": "user", "content": "Area?"}]],
        "function": [{"name": "f"}],
    }
    path = write(tmp_path / "BFCL_simple.json", [asked])
    (tmp_path / "possible_answer").mkdir()
    truth = [{"f": {"x": [1]}}]
    write(tmp_path / "possible_answer" / path.name, [{"id": "simple_0", "ground_truth": truth}])
    (task,) = find_tasks(f"bfcl={path}")
    (row,) = open_rows(task, has_template=True)
    assert row.reference.truth == truth
    assert '"name": "f"' in row.question.messages[0]["content"]


def test_every_recipe_is_a_task() -> None:
    for name in RECIPES:
        (task,) = find_tasks(f"{name}=rows.jsonl")
        assert isinstance(task, Task)
    with pytest.raises(JobError, match="did you mean gsm8k"):
        find_tasks("gsm8")


def test_what_is_wrong_with_rows_is_named(tmp_path: Path) -> None:
    (task,) = find_tasks(f"exact={tmp_path / 'none.jsonl'}")
    with pytest.raises(DataError, match="no such file"):
        open_rows(task, has_template=False)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{oops\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: is no JSON"):
        open_rows(task.with_options({"path": str(tmp_path / "bad.jsonl")}), has_template=False)
    path = write(tmp_path / "q.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match=r"'prompt' is undefined\n.*question, answer"):
        open_rows(task.with_options({"path": str(path)}), has_template=False)


def test_code_is_run_only_when_asked() -> None:
    tasks = find_tasks("humaneval=rows.jsonl")
    with pytest.raises(JobError, match="--allow-code"):
        require_answerable(tasks, allow_code=False)
    require_answerable(tasks, allow_code=True)


@pytest.mark.parametrize(
    ("answer", "right"), [([0, 2], ("one", "three")), (["C", "one"], ("three", "one"))]
)
def test_several_options_may_be_right(tmp_path: Path, answer: Any, right: Any) -> None:
    rows = [{"prompt": "?", "choices": ["one", "two", "three"], "answer": answer}]
    (task,) = find_tasks(f"choice={write(tmp_path / 'q.jsonl', rows)}")
    (row,) = open_rows(task, has_template=True)
    assert row.reference.answers == right


@pytest.mark.parametrize("answer", ["\u00b2", "\u00df", "9", "two "])
def test_an_answer_that_is_no_option_is_named(tmp_path: Path, answer: str) -> None:
    path = write(tmp_path / "q.jsonl", [{"prompt": "?", "choices": ["a", "b"], "answer": answer}])
    (task,) = find_tasks(f"choice={path}")
    with pytest.raises(DataError, match="is none of the 2 options"):
        open_rows(task, has_template=True)


@pytest.mark.parametrize(
    ("task", "row", "told"),
    [
        ({"metric": "choice"}, {"answer": "a"}, "metric: choice has no options"),
        ({"metric": "contains"}, {"answer": ""}, "row 0: the answer is empty"),
        ({"metric": "number"}, {"answer": "twelve"}, "row 0: the answer 'twelve' holds no number"),
        ({"metric": "exact"}, {"answer": None}, "'{{answer}}': a value is null"),
        ({"metric": "exact"}, {"prompt": None, "answer": ""}, "'{{prompt}}': a value is null"),
        ({"metric": "exact", "prompt": "{{prompt + 1}}"}, {"answer": ""}, "can only concatenate"),
        ({"metric": "exact"}, {"prompt": "\ud83d", "answer": ""}, "surrogates not allowed"),
    ],
)
def test_rows_that_no_answer_can_be_compared_with_are_refused(
    tmp_path: Path, task: dict[str, Any], row: dict[str, Any], told: str
) -> None:
    path = write(tmp_path / "q.jsonl", [{"prompt": "?"} | row])
    with pytest.raises(DataError, match=re.escape(told)):
        open_rows(parse_task({"name": "t", "path": str(path)} | task, "t"), has_template=True)


def test_a_null_is_an_answer_in_json(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"prompt": "?", "answer": None}])
    (task,) = find_tasks(f"json={path}")
    task = task.with_options({"metric": {"type": "json", "check": "equal"}})
    (row,) = open_rows(task, has_template=True)
    assert row.reference.answers == ("null",)


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("q.json", b'[{"prompt": "?", "answer": "a"}, "b"]', "q.json: row 2: is no JSON object"),
        ("q.jsonl", b'{"prompt": "?", "answer": "\xe9"}\n', "is no UTF-8 text"),
        ("q.jsonl", b"[" * 100_000, "is nested too deeply"),
        ("q.jsonl", b'{"a": ' * 100_000, "is nested too deeply"),
        ("q.parquet", b"no table", "is no Parquet file"),
    ],
)
def test_files_that_are_none_are_named(tmp_path: Path, name: str, data: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(data)
    (task,) = find_tasks(f"exact={tmp_path / name}")
    with pytest.raises(DataError, match=told):
        open_rows(task, has_template=True)


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "?", "answer": "a"}\n')
    (task,) = find_tasks(f"exact={tmp_path / 'q.jsonl'}")
    assert len(open_rows(task, has_template=True)) == 1


@pytest.mark.parametrize(
    ("rows", "answers", "told"),
    [
        ([{"prompt": "?"}], [{"id": 1, "answer": "a"}], "q.jsonl: a row has no id"),
        ([{"id": 1}], [{"answer": "a"}], "a.jsonl: a row has no id"),
        ([{"id": 1}], [{"id": 1, "answer": "a"}, {"id": 1, "answer": "b"}], "two answers to 1"),
        ([{"id": 2}], [{"id": 1, "answer": "a"}], "has no answer to 1 row, such as 2"),
    ],
)
def test_answers_belong_to_rows_by_their_ids(
    tmp_path: Path, rows: list[Any], answers: list[Any], told: str
) -> None:
    path, other = write(tmp_path / "q.jsonl", rows), write(tmp_path / "a.jsonl", answers)
    (task,) = find_tasks(f"exact={path}")
    with pytest.raises(DataError, match=told):
        open_rows(task.with_options({"answers_path": str(other)}), has_template=True)
