"""Generate the natural-language-to-code set of the demo, or check the files that are here.

    python data/make_code.py            write data/code.jsonl and data/code_eval.jsonl
    python data/make_code.py --check    run every answer, and compare the files with the templates
    python data/make_code.py --figures  print the table of data/README.md

Needs the standard library only. The templates are in data/code_tasks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from code_tasks import TASKS
from code_tasks.schemas import shape
from code_tasks.task import Case, fill, lines
from code_tasks.verify import faults
from code_tasks.wording import frame

HERE = Path(__file__).resolve().parent
SEED = 20240607
EVAL_SEEN = 43  # held-out rows whose template is trained on, with other parameters
EVAL_NEW = 21  # held-out rows of templates that are never trained on
HINT_LIMIT = 90  # characters; the demo runs on two CPU cores, so prompts stay short


@dataclass(frozen=True)
class Row:
    """One row, and what is needed to check it."""

    task: str
    kind: str
    instruction: str
    input: str
    output: str
    tests: tuple[str, ...]

    @property
    def prompt(self) -> tuple[str, str]:
        return self.instruction, self.input

    def json(self) -> str:
        fields = {"instruction": self.instruction, "input": self.input, "output": self.output}
        return json.dumps(fields, ensure_ascii=False) + "\n"


def draw(*key: object) -> int:
    """A number that depends on the seed and the key alone.

    A hash, not `random`: its choices are the same on every Python, and a new template leaves
    nearly all rows of the others as they were.
    """
    digest = hashlib.sha256(repr((SEED, *key)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def make_row(name: str, number: int) -> Row:
    """Case `number` of a task, in one of the task's wordings."""
    task = TASKS[name]
    case = task.table()[number]
    asks = lines(task.asks)
    ask = asks[(draw(name) + number) % len(asks)]
    instruction = fill(ask, case)
    if not ask[0].isupper():
        instruction = frame(task.kind, instruction, draw(name, number, "frame"))
    return Row(
        task=name,
        kind=task.kind,
        instruction=instruction,
        input=_input(name, case, instruction),
        output=task.answer(case),
        tests=tuple(task.proofs(case)),
    )


def _input(name: str, case: Case, instruction: str) -> str:
    task = TASKS[name]
    if task.tables:
        return shape(*fill(task.tables, case).split())
    hint = fill(task.hint or (task.example and f"Example: {task.example}"), case)
    return hint if len(instruction) + len(hint) <= HINT_LIMIT else ""


def build() -> tuple[list[Row], list[Row]]:
    """The training rows and the held-out rows."""
    seen = sorted((name for name, task in TASKS.items() if not task.held_out), key=draw)
    new = sorted((name for name, task in TASKS.items() if task.held_out), key=draw)
    held = {name: draw(name, "held") % len(TASKS[name].table()) for name in seen[:EVAL_SEEN]}
    evaluation = [make_row(name, number) for name, number in held.items()]
    evaluation += [make_row(name, number) for name, number in _cases_in_turn(new)[:EVAL_NEW]]
    train = [make_row(*case) for case in _cases_in_turn(seen) if case not in held.items()]
    return _shuffled(train), _shuffled(evaluation)


def _cases_in_turn(names: list[str]) -> list[tuple[str, int]]:
    """The first case of every task, then the second of every task that has one, and so on."""
    cases = [(name, number) for name in names for number in range(len(TASKS[name].table()))]
    return sorted(cases, key=lambda case: case[1])


def _shuffled(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: draw(row.prompt, "order"))


def files() -> dict[Path, list[Row]]:
    train, evaluation = build()
    return {HERE / "code.jsonl": train, HERE / "code_eval.jsonl": evaluation}


def text_of(rows: list[Row]) -> str:
    return "".join(row.json() for row in rows)


def problems(train: list[Row], evaluation: list[Row]) -> Iterator[str]:
    """What is wrong with the rows themselves, whatever the files hold."""
    prompts: set[tuple[str, str]] = set()
    for row in (*train, *evaluation):
        if row.prompt in prompts:
            yield f"{row.task}: asked twice: {row.prompt}"
        prompts.add(row.prompt)
        for fault in faults(row.kind, row.output, row.tests):
            yield f"{row.task}: {fault}\n{row.output}"
    trained = {row.output for row in train}
    for row in evaluation:
        if row.output in trained:
            yield f"{row.task}: a held-out answer is also a training answer:\n{row.output}"


def check() -> list[str]:
    """What is wrong with the rows, or with the files beside this script."""
    written = files()
    found = list(problems(*written.values()))
    for path, rows in written.items():
        if not path.exists() or path.read_bytes() != text_of(rows).encode():
            found.append(f"{path.name}: not what the templates give; run python data/make_code.py")
    return found


def figures() -> str:
    """The README's table."""
    table = [
        "| file | rows | Python | SQL | shell | regex | templates | prompt | answer | all |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for path, rows in files().items():
        kinds = [
            sum(row.kind == kind for row in rows) for kind in ("python", "sql", "shell", "regex")
        ]
        prompt = sum(len(row.instruction) + len(row.input) for row in rows)
        answer = sum(len(row.output) for row in rows)
        cells = [f"`{path.name}`", len(rows), *kinds, len({row.task for row in rows})]
        cells += [f"{prompt / len(rows):.0f}", f"{answer / len(rows):.0f}", prompt + answer]
        table.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(table) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; verify rows and files")
    what.add_argument("--figures", action="store_true", help="print the table of data/README.md")
    args = parser.parse_args()
    if args.check:
        found = check()
        print("\n".join(found) or "data/code.jsonl and data/code_eval.jsonl are as generated")
        return 1 if found else 0
    if args.figures:
        print(figures(), end="")
        return 0
    for path, rows in files().items():
        path.write_bytes(text_of(rows).encode())
        print(f"data/{path.name}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
