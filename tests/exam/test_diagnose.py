"""The exam of `shardtune diagnose`: one case with a profile, and all where there is time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardtune.checkpoint.run_dir import RunDir
from shardtune.core.runs.chrome_trace import read_trace
from tests.exam.diagnose import CASES, Slowness, examine, is_right


def test_a_profile_is_kept_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case = Slowness("profiled", None, model="tiny", ranks=2, steps=8)
    found = examine(case, tmp_path, profile=3)
    assert found.profiled
    run = RunDir(tmp_path / "run")
    for rank in range(2):
        told = json.loads((run.profile / f"rank-{rank}.json").read_text())
        assert told["steps"] == 3
        assert told["matmul"] > 0
        assert {each["op"] for each in told["collectives"]} >= {"all_reduce"}
        assert read_trace(run.profile / f"rank-{rank}.trace.json.gz")
    assert "all_reduce" in {each.op for each in found.collectives}
    marker = run.marker()
    assert marker is not None
    assert "profile" in marker.names, "the run owns it"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cause_is_named(
    case: Slowness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = examine(case, tmp_path)
    assert is_right(case, found), found.to_json(indent=2)
