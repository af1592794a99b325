"""What code of a model can't do: reach the network, run for ever, take all memory."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from shardtune.evaluation.recipes import find_tasks
from shardtune.evaluation.run_task import run_task
from shardtune.evaluation.sandbox import CodeResult, has_no_network, run_code
from shardtune.evaluation.task_rows import open_rows

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not has_no_network(), reason="this system allows no network namespaces"),
]


def run(code: str, tests: str = "", seconds: float = 10.0) -> CodeResult:
    return run_code(code, tests, seconds=seconds, memory_mib=256)


def test_programs_pass_and_fail() -> None:
    assert run("assert sum(range(5)) == 10") == CodeResult("passed")
    assert run("assert 1 == 2, 'no'") == CodeResult("failed", "AssertionError: no")
    assert run("def f(:").outcome == "failed"
    assert run("import os; os._exit(3)").outcome == "failed"


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_code_that_exits_before_its_tests_has_failed(leave: str) -> None:
    assert run(leave, "assert False") == CodeResult(
        "failed", "it exited before its tests had ended"
    )
    assert run(f"def f(): {leave}", "f()\nassert False").outcome == "failed"


def test_code_is_imported_and_tests_are_run() -> None:
    code = "x = 1\nif __name__ == '__main__':\n    import unittest; unittest.main()"
    assert run(code, "assert x == 1") == CodeResult("passed")
    assert run(code, "if __name__ == '__main__': assert x == 2").outcome == "failed"


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass Point:\n    x: int = 3",
            "assert Point().x == 3",
        ),
        (
            "class Node: pass",
            "import pickle\nassert type(pickle.loads(pickle.dumps(Node()))) is Node",
        ),
        (
            "import typing\nclass Tree:\n    left: 'Tree | None'",
            "assert typing.get_type_hints(Tree)['left'] == Tree | None",
        ),
    ],
    ids=["dataclass", "pickle", "hints"],
)
def test_classes_are_found_in_their_module(code: str, tests: str) -> None:
    assert run(code, tests) == CodeResult("passed")


def test_examples_of_docstrings_are_run() -> None:
    code = "def f():\n    '''\n    >>> f()\n    2\n    '''\n    return 1"
    assert run(code, "import doctest\nassert not doctest.testmod().failed").outcome == "failed"


def test_ranks_run_a_share_of_the_programs_each(tmp_path: Path) -> None:
    """The second of two ranks; what the first one found is told."""

    class Second:
        has_template = False

        def answer(self, questions: Any, limits: Any) -> list[str]:
            return ["x = 1", "x = 2"]

        def share(self, items: Any, work: Any) -> Any:
            return [("passed", ""), *work(items[1:])]

    path = tmp_path / "q.jsonl"
    path.write_text(2 * '{"prompt": "x?", "tests": "assert x == 2"}\n')
    (task,) = find_tasks(f"code={path}")
    found = run_task(task, open_rows(task, has_template=False), Second())  # type: ignore[arg-type]
    assert found.scores == [1.0, 1.0], "the first program ran here, too"


def test_what_it_says_is_limited() -> None:
    loud = "import sys\nwhile True: sys.stderr.write('x' * 2**20)"
    found = run(loud, seconds=20)
    assert found.outcome == "failed"
    assert len(found.detail) <= 4000


def test_limits_of_time_and_memory() -> None:
    begun = time.monotonic()
    assert run("while True: pass", seconds=1).outcome == "timeout"
    assert run("import time; time.sleep(60)", seconds=1).outcome == "timeout"
    assert time.monotonic() - begun < 30
    assert run("x = bytearray(2**30)").outcome == "memory"


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    assert found.outcome == "failed"
    assert "Network is unreachable" in found.detail


def test_what_it_starts_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    later = f"import time; time.sleep(2); open({str(mark)!r}, 'w').close()"
    assert (
        run(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {later!r}])").outcome
        == "passed"
    )
    time.sleep(3)
    assert not mark.exists()


def test_the_environment_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    assert run("import os; assert 'SECRET_KEY' not in os.environ").outcome == "passed"
