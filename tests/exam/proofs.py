"""Runs the tests that answer cases of the exam, all in one go, and says which passed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.exam.case import Findings
from tests.exam.harness import ROOT


@dataclass(frozen=True)
class Proofs:
    """Tests by name: how many passed, and which did not."""

    passed: dict[str, int]
    failed: dict[str, list[str]]

    def tell(self, name: str, found: Findings) -> None:
        wrong = self.failed.get(name, [])
        found.expect(f"{name} ({', '.join(wrong)})" if wrong else name, not wrong)
        found.expect(f"{name} was run", bool(self.passed.get(name) or wrong))

    def count(self, names: Sequence[str]) -> int:
        return sum(self.passed.get(name, 0) for name in names)


def run_tests(names: Sequence[str]) -> Proofs:
    """`names` are files or functions under tests/, as pytest takes them."""
    if not names:  # pytest would run all there are
        return Proofs({}, {})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            "-m",
            "pytest",
            "--tb=line",
            f"--junitxml={report}",
            *(f"tests/{n}" for n in names),
        ]
        subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    passed: dict[str, int] = {}
    failed: dict[str, list[str]] = {}
    for case in cases:
        file = case.attrib["classname"].replace(".", "/").removeprefix("tests/") + ".py"
        test = case.attrib["name"]
        bad = [mark for mark in ("failure", "error", "skipped") if case.find(mark) is not None]
        for name in names:
            if name in (file, f"{file}::{test.partition('[')[0]}"):
                if bad:
                    failed.setdefault(name, []).append(f"{test} {bad[0]}")
                else:
                    passed[name] = passed.get(name, 0) + 1
    return Proofs(passed, failed)
