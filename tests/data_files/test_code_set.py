"""The demo's code set: the files are what the templates give, and every answer works."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="module")
def make_code() -> Iterator[ModuleType]:
    """The generator, imported the way `python data/make_code.py` finds its templates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DATA)
        import make_code

        yield make_code
    for name in [name for name in sys.modules if name.split(".")[0] in ("make_code", "code_tasks")]:
        del sys.modules[name]


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


TRAIN = read("code.jsonl")
EVAL = read("code_eval.jsonl")


def test_every_answer_works_and_the_files_are_as_generated(make_code: ModuleType) -> None:
    assert make_code.check() == []


def test_row_counts_and_fields() -> None:
    assert 450 <= len(TRAIN) <= 520
    assert len(EVAL) == 64
    for row in TRAIN + EVAL:
        assert list(row) == ["instruction", "input", "output"]
        assert row["instruction"]
        assert row["output"]


def test_nothing_is_asked_twice_and_no_held_out_answer_is_trained_on() -> None:
    prompts = [(row["instruction"], row["input"]) for row in TRAIN + EVAL]
    assert len(set(prompts)) == len(prompts)
    assert not {row["output"] for row in TRAIN} & {row["output"] for row in EVAL}


def test_a_third_of_the_held_out_rows_are_of_templates_never_trained_on(
    make_code: ModuleType,
) -> None:
    train, evaluation = make_code.build()
    trained = {row.task for row in train}
    new = [row for row in evaluation if row.task not in trained]
    assert len(trained) >= 60
    assert len(new) == 21  # of 64
    assert {row.kind for row in new} == {"python", "sql", "shell", "regex"}


def test_answers_are_bare_and_short() -> None:
    for row in TRAIN + EVAL:
        assert "```" not in row["output"]
        assert "\n\n" not in row["output"]
        assert row["output"] == row["output"].strip()
        assert len(row["output"]) <= 320
        assert len(row["instruction"]) + len(row["input"]) <= 170


def test_python_answers_are_one_typed_function_with_a_docstring() -> None:
    answers = [row["output"] for row in TRAIN + EVAL if row["output"].startswith("def ")]
    assert len(answers) > 0.7 * len(TRAIN + EVAL)
    for answer in answers:
        (function,) = ast.parse(answer).body
        assert isinstance(function, ast.FunctionDef), answer
        assert function.returns is not None, answer
        assert all(arg.annotation is not None for arg in function.args.args), answer
        assert "\n" not in (ast.get_docstring(function) or "\n"), answer
        assert 3 <= len(answer.splitlines()) <= 8, answer


GOOD = 'def twice(n: int) -> int:\n    """Double the number."""\n    return 2 * n'


@pytest.mark.parametrize(
    ("kind", "answer", "tests", "complaint"),
    [
        ("python", GOOD, ["twice(2) == 5"], "fails twice(2) == 5"),
        ("python", GOOD, ["twice()"], "TypeError"),
        ("python", GOOD, [], "has no test"),
        ("python", GOOD + "\nx = 1", ["True"], "not exactly one function"),
        ("python", GOOD.replace(" -> int", ""), ["True"], "no return type"),
        ("python", GOOD.replace("n: int", "n"), ["True"], "argument without a type"),
        ("python", GOOD.replace("Double", "Doubles"), ["True"], "imperative docstring"),
        ("python", GOOD.replace("return 2 * n", "return 2 *"), ["True"], "does not parse"),
        ("python", f"```python\n{GOOD}\n```", ["True"], "markdown fence"),
        ("python", GOOD.replace("    return", "\n    return"), ["True"], "blank line"),
        ("python", GOOD.replace("    return", "    n += 0\n" * 6 + "    return"), ["1"], "7 lines"),
        ("sql", "SELECT title FROM books", ["rows"], "semicolon"),
        ("regex", "a$", ["True"], "not anchored"),
        ("sql", "SELECT title FROM book;", ["True"], "no such table"),
        ("sql", "SELECT title FROM books WHERE year > 3000;", ["True"], "selects nothing"),
        ("sql", "SELECT title FROM books;", ["len(rows) == 4"], "fails len(rows) == 4"),
        ("regex", "^(a$", ["True"], "does not compile"),
        ("regex", "^a$", ["pattern.search('b')"], "fails"),
        ("shell", "grep 'a b.txt", [], "not shell syntax"),
        ("shell", "sort a.txt | rm b.txt", [], "starts with 'rm'"),
    ],
)
def test_a_bad_answer_is_found(
    make_code: ModuleType, kind: str, answer: str, tests: list[str], complaint: str
) -> None:
    assert complaint in " ".join(make_code.faults(kind, answer, tests))


def test_a_good_answer_passes(make_code: ModuleType) -> None:
    assert list(make_code.faults("python", GOOD, ["twice(2) == 4"])) == []


@pytest.mark.slow
def test_a_changed_file_is_found(
    make_code: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_code, "HERE", tmp_path)
    for name in ("code.jsonl", "code_eval.jsonl"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    assert make_code.check() == []
    with (tmp_path / "code_eval.jsonl").open("a") as file:
        file.write("{}\n")
    (problem,) = make_code.check()
    assert problem.startswith("code_eval.jsonl: not what the templates give")


def test_the_readme_has_the_current_figures(make_code: ModuleType) -> None:
    assert make_code.figures() in (DATA / "README.md").read_text(encoding="utf-8")
