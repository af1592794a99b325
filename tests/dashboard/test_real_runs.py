"""The dashboard's part of the exam: a real run, 200 runs, 100,000 steps, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright comes with the extra dev")
pytest.importorskip("starlette", reason="the server comes with the extra serve")


from tests.exam.case import Findings
from tests.exam.seeing_dashboard import CASES
from tests.exam.seeing_lab import CHROMIUM, SeeingCase, SeeingLab

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.process,
    pytest.mark.long,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_of_the_exam_is_held(case: SeeingCase, tmp_path: Path) -> None:
    findings = Findings()
    case.check(SeeingLab(tmp_path), findings)
    verdict = findings.verdict()
    assert verdict.outcome == "held", verdict.figure
