"""What a run is about to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardtune.config.auto import resolve
from shardtune.core.host.machine import Machine
from shardtune.report.start_summary import print_opening
from tests.report.screen import plain_console, shown, squeezed
from tests.synthetic import make_job, numbered, prepared


def opening(**sections: dict[str, Any]) -> str:
    resolved = resolve(make_job("run", **sections), Machine(cores=8, gpus=0))
    source = replace(
        prepared("code", numbered(4)).report, documents=1234, tokens=100_000, labels=25_000,
        truncated=3, dropped=2, untrained=1, bad=5,
    )  # fmt: skip
    console = plain_console()
    held_out = replace(source, notes=("held out",))
    print_opening(resolved.job, resolved.reasons, [source], [held_out], console)
    return squeezed(shown(console))


def test_the_job_in_a_line_and_the_data_in_a_table() -> None:
    found = opening(train={"steps": 60, "global_batch": 16}, launch={"processes": 2})
    assert found.splitlines()[0] == (
        "tiny full fine-tune fp32 60 steps of 16 rows x 1024 tokens ddp on 2"
    )
    assert "data set documents tokens trained truncated left out unreadable" in found
    assert "code 1,234 100,000 25% 3 3 5" in found  # 25,000 of 100,000; 2 dropped + 1 untrained
    assert "code (eval) 1,234 100,000" in found
    assert "\ncode (eval): held out" in found


def test_a_run_may_be_measured_in_epochs() -> None:
    assert "1.5 epochs of 4 rows x" in opening(train={"epochs": 1.5})
    assert "1 epoch of 4 rows x" in opening()
    assert "1 step of 1 row x" in opening(train={"steps": 1, "global_batch": 1})


def test_one_process_is_one() -> None:
    assert opening().splitlines()[0].endswith("ddp on 1 process")


def test_every_value_that_was_chosen_is_shown_with_its_reason() -> None:
    found = opening(
        train={"micro_batch": "auto", "global_batch": 16},
        launch={"processes": "auto", "threads": "auto"},
        data={"train": [{"path": "data/my.jsonl", "format": "chat"}]},
    )
    joined = " ".join(found.split())  # long reasons are wrapped
    for line in (
        "launch.processes = 1 (no GPU found: one process)",
        "launch.threads = 8 (8 cores / 1 processes)",
        "train.epochs = 1.0 (neither steps nor epochs is given: one pass)",
        "train.micro_batch = 4 (a rank has 16 rows a step; 4 x 1024 tokens stay within 4096)",
        "data.train.0.name = my (the file's name)",
    ):
        assert line in joined


def test_the_name_of_a_model_is_no_markup() -> None:
    assert opening(model={"name": "/models/[b]x"}).startswith("/models/[b]x full fine-tune fp32")
