"""The fuzzer of run directories, for a few rounds; and that it would notice."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.exam.hostile import Ended, Round, Templates, fuzz, judge, parse
from tests.exam.mutations import MUTATIONS, State, snapshot
from tests.ranks import _CONTEXT

TIMEOUT = 280


def _fuzz(folder: str, words: tuple[str, ...]) -> None:
    found = fuzz(parse(words), Path(folder))
    Path(folder, "found.json").write_text(json.dumps(found), "utf-8")


def fuzzed(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What the rounds came to, in a process that is forked from one with everything imported."""
    process = _CONTEXT.Process(target=_fuzz, args=(str(folder), words))
    process.start()
    process.join(TIMEOUT)
    process.kill()
    assert process.exitcode == 0
    return list(json.loads((folder / "found.json").read_text("utf-8")))


def test_no_invariant_breaks_in_a_few_rounds(tmp_path: Path) -> None:
    found = fuzzed(tmp_path, "--seed", "5", "--rounds", "10", "--workers", "2")
    assert len(found) == 10
    assert [each for each in found if each["broken"]] == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_invariant_breaks_in_many_rounds(tmp_path: Path) -> None:
    found = fuzzed(tmp_path, "--seed", "6", "--rounds", "60", "--minutes", "4")
    assert [each for each in found if each["broken"]] == []
    assert any(each["went_on"] for each in found)


def test_every_mutation_changes_something(tmp_path: Path) -> None:
    for mutation in MUTATIONS:
        run = tmp_path / mutation.__name__ / "run"
        if run.exists():
            continue
        for folder in ("checkpoints/step-000001", "result", "logs"):
            (run / folder).mkdir(parents=True)
        for name in ("run.json", "report.json", "checkpoints/step-000001/manifest.json"):
            (run / name).write_text(f"{name}\n" * 3, "utf-8")
        other = tmp_path / mutation.__name__ / "other"
        (other / "checkpoints" / "step-000002").mkdir(parents=True)
        for name in ("run.json", "report.json", "checkpoints/step-000001/manifest.json"):
            (other / name).parent.mkdir(parents=True, exist_ok=True)
            (other / name).write_text("other\n", "utf-8")
        state, before = State(run.parent, run, other), snapshot(run)
        told = [mutation(random.Random(seed), state) for seed in range(4)]
        assert any(each is not None for each in told), mutation.__name__
        assert snapshot(run) != before, mutation.__name__


def test_what_is_broken_is_noticed(tmp_path: Path) -> None:
    """A foreign file that is gone, a traceback, an exit code, a hang, a reader that writes."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("thesis.txt", "metrics.jsonl"):
        (run / name).write_text("mine", "utf-8")
    state, before = State(tmp_path, run, run, {run / "thesis.txt"}), snapshot(tmp_path)
    (run / "thesis.txt").unlink()
    (run / "metrics.jsonl").write_text("written", "utf-8")
    templates = Templates(tmp_path, "")
    said = "Traceback (most recent call last):"
    found = Round(1, "finished", (), "verify", Ended(7, said, 1.0), went_on=False)
    judge(found, state, before, templates, can=False)
    told = "\n".join(found.broken)
    assert "exit code 7" in told
    assert "a traceback" in told
    assert "run/thesis.txt is changed" in told
    assert "run/metrics.jsonl is changed by a command that reads" in told
    found = Round(2, "finished", (), "resume", Ended(None, "", 61.0), went_on=False)
    judge(found, state, snapshot(tmp_path), templates, can=True)
    assert found.broken == ["hung for 61 s", "a run that can go on does not"]
