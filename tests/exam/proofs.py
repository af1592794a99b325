"""Runs the tests that answer cases of the exam, all in one go, and says which passed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.exam.case import Findings
from tests.exam.harness import ROOT, Lab
from tests.exam.slots import at

LONGEST = 8  # tests whose times are told


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


def require_collected(names: Sequence[str]) -> None:
    """RuntimeError where pytest finds no such test: better now than after ten minutes of cases."""
    command = [sys.executable, "-m", "pytest", "--collect-only", *(f"tests/{n}" for n in names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if names and done.returncode != pytest.ExitCode.OK:
        raise RuntimeError(
            f"the exam's tests can't be collected: {(done.stdout + done.stderr)[-2000:]}"
        )


def run_tests(names: Sequence[str], lab: Lab) -> Proofs:
    """`names` are files, functions or cases of them under tests/, as pytest takes them."""
    if not names:  # pytest would run all there are
        return Proofs({}, {})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            "-m",
            "pytest",
            "--tb=line",
            *("-n", "2", "--dist", "loadfile"),  # one waits while the other computes
            f"--junitxml={report}",
            *(f"tests/{n}" for n in names),
        ]
        said = Path(folder) / "said.txt"
        with at("tests"), lab.slots.taken(), said.open("wb") as output:
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=output)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            lab.slots.charge(process)
            process.wait()
        if process.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"the exam's tests broke off: {said.read_text('utf-8')[-2000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    _say_longest(cases)
    passed: dict[str, int] = {}
    failed: dict[str, list[str]] = {}
    for case in cases:
        file = case.attrib["classname"].replace(".", "/").removeprefix("tests/") + ".py"
        test = case.attrib["name"]
        bad = [mark for mark in ("failure", "error", "skipped") if case.find(mark) is not None]
        for name in names:
            if name in (file, f"{file}::{test}", f"{file}::{test.partition('[')[0]}"):
                if bad:
                    failed.setdefault(name, []).append(f"{test} {bad[0]}")
                else:
                    passed[name] = passed.get(name, 0) + 1
    return Proofs(passed, failed)


def _say_longest(cases: Sequence[ElementTree.Element]) -> None:
    """Where the time goes, for whoever wants the exam to be shorter."""
    taken = sorted((float(case.attrib["time"]), case.attrib["name"]) for case in cases)[::-1]
    total = sum(seconds for seconds, _ in taken)
    longest = ", ".join(f"{name} {seconds:.0f}" for seconds, name in taken[:LONGEST])
    print(f"{len(cases)} tests: {total:.0f} s; the longest: {longest}", file=sys.stderr, flush=True)
