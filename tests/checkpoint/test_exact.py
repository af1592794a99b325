"""A run that was killed goes on as if nothing had happened: to the bit, line by line."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.verify import verify_run
from shardtune.config.job import Job
from tests.conformance.table import STAGES, STRATEGIES
from tests.runs import lines, train_on
from tests.synthetic import make_job

STEPS = 7
CASES = {
    "single": 1, "ddp": 2, "fsdp": 2, "zero3": 2, "pipeline2-1f1b": 2,
    "tensor2": 2, "zero1": 2, "zero2": 2,
}  # fmt: skip
LONG = ("single", "tensor2", "zero1", "zero2", "zero3")
MEASURED = {
    "seconds", "tokens_per_second", "seconds_left", "memory_gib", "busy", "utilisation", "parts"
}  # fmt: skip


def job(folder: Path, case: str, **save: Any) -> Job:
    """Dropout, so that random numbers matter; an evaluation at odd times; several micro-batches."""
    sources = {}
    for name, numbers in {"numbers": range(24), "held": range(50, 54)}.items():
        said = [{"instruction": f"Say {n}.", "output": f"It is {n}, or {n}."} for n in numbers]
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, said)), encoding="utf-8")
        sources[name] = {"path": str(path), "format": "instruction"}
    return make_job(
        str(folder / "run"),
        adapter={"type": "lora", "rank": 2, "dropout": 0.1},
        data={
            "train": [sources["numbers"]],
            "eval": [sources["held"]],
            "sequence_length": 80,
        },
        train={"steps": STEPS, "global_batch": 4, "micro_batch": 1, "learning_rate": 1e-2},
        strategy=(STRATEGIES | STAGES)["ddp" if case == "single" else case][0],
        evaluate={"every": 3, "samples": 0},
        launch={"processes": CASES[case], "threads": 1},
        save={"directory": str(folder / "run"), "every": 2, "trace": True, **save},
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    found = lines(folder / "run" / "metrics.jsonl")
    return [{key: each[key] for key in each if key not in MEASURED} for each in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in LONG else ()) for case in CASES]
)
def test_a_killed_run_goes_on_to_the_bit(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("needs shardtune[deepspeed]")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    train_on(CASES[case], job(whole, case))
    trace = parts / "run" / "trace.jsonl"
    assert train_on(CASES[case], job(parts, case), until=lambda: len(lines(trace)) >= 4)
    before = [path.name for path in (parts / "run" / "checkpoints").glob("step-*")]
    assert before, "it has something to go on from"
    train_on(CASES[case], job(parts, case), resume=True)
    assert trace.read_text() == (whole / "run" / "trace.jsonl").read_text()
    assert [each["step"] for each in lines(trace)] == list(range(1, STEPS + 1))
    assert len({each["state"] for each in lines(trace)}) == STEPS
    assert metrics(parts) == metrics(whole)  # no line lost, none written twice
    verdicts = verify_run(RunDir(parts / "run"))
    assert [(each.name, each.faults) for each in verdicts] == [
        ("checkpoints/step-000006", ()),
        ("checkpoints/step-000007", ()),
        ("result", ()),
    ]
