"""The benchmark of start-up, tried on the CPU with a toy."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.startup import _steps, main


@pytest.mark.long
@pytest.mark.process
def test_a_cold_and_a_warm_run(tmp_path: Path) -> None:
    assert main(["--tiny", "--out", str(tmp_path)]) == 0
    table = (tmp_path / "startup.md").read_text(encoding="utf-8")
    assert "| cold |" in table
    assert "| warm |" in table


def test_only_whole_lines_of_steps_count(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert _steps(file) == []
    file.write_text('{"kind": "eval"}\n{"kind": "step", "loss": 2.5}\n{"kind": "st', "utf-8")
    assert _steps(file) == [2.5]


def test_a_toy_stays_out_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tiny"])
    assert "give --out" in capsys.readouterr().err
