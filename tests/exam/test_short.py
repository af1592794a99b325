"""The short form of the exam: what takes seconds, and one run that is struck three times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exam import artefacts
from tests.exam.__main__ import all_tests
from tests.exam.case import Findings
from tests.exam.faults import Fault
from tests.exam.harness import Lab
from tests.exam.proofs import require_collected
from tests.exam.table import ROWS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = Lab(tmp_path_factory.mktemp("exam"))
    made.prepare()
    return made


def test_every_case_is_answered_or_says_why_not() -> None:
    numbers = [row.number for row in ROWS]
    assert numbers == sorted(set(numbers))
    assert {*range(1, 79)} <= {*numbers}
    assert all(bool(row.checks or row.tests) != bool(row.missing) for row in ROWS)
    root = Path(__file__).parents[1]
    for name in {test for row in ROWS for test in row.tests}:
        file, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}" in (root / file).read_text("utf-8"), name


def test_cases_of_tests_are_called_as_pytest_calls_them() -> None:
    """One that it doesn't find keeps it from all the others."""
    require_collected([name for name in all_tests(ROWS) if "[" in name])
    with pytest.raises(RuntimeError, match="not found"):
        require_collected(["exam/test_short.py::test_nothing_of_that_name"])


def test_nothing_in_the_package_knows_of_the_faults() -> None:
    """They come from outside, so an installed package can't be told to fail."""
    package = Path(__file__).parents[2] / "shardtune"
    texts = [path.read_text("utf-8") for path in package.rglob("*.py")]
    assert not [text for text in texts if "EXAM_FAULTS" in text or "tests.exam" in text]


@pytest.mark.long
def test_a_run_that_is_killed_stopped_and_poisoned_ends_as_one_that_is_not(lab: Lab) -> None:
    few = ("launch.processes=2", "train.steps=8", "launch.restarts=3")
    whole = lab.run("whole", *few)
    assert whole.code == 0, whole.error
    faults = [
        Fault("kill", 1, 2, "backward"),
        Fault("stop", 0, 4, "forward"),
        Fault("spoil weight", 1, 6, "data"),
    ]
    done = lab.run("struck", *few, faults=faults)
    assert done.code == 0, done.error
    events = done.events("restart")
    assert [(event["rank"], event["step"]) for event in events] == [(1, 2), (0, 4), (1, 6)]
    assert done.after_fault(0, events[0]) < 2.0
    assert done.after_fault(1, events[1]) < 5.0
    assert not done.left
    assert len(whole.trace.splitlines()) == 8
    assert done.trace == whole.trace


@pytest.mark.parametrize(
    "check",
    [artefacts.forbidden_calls, pytest.param(artefacts.two_jobs, marks=pytest.mark.long)],
)
def test_case(check, lab: Lab) -> None:  # type: ignore[no-untyped-def]
    found = Findings()
    check(lab, found)
    assert found.verdict().outcome == "held", found.verdict()
