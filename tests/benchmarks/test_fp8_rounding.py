"""Rounding by data: on the same grid, and nearer where it counts."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.fp8_rounding import by_data, main, nearest
from shardtune.models.fp8 import by_row


def test_outputs_are_nearer_and_numbers_stay_on_the_grid() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 16) @ torch.randn(16, 96) + 0.1 * torch.randn(4096, 96)
    weight = torch.randn(48, 96)
    found = by_data(weight, inputs.t() @ inputs)
    scale = by_row(weight)[1]
    assert torch.equal(found, (found / scale).to(torch.float8_e4m3fn).float() * scale)
    right = inputs @ weight.t()
    errors = [(inputs @ each.t() - right).norm() for each in (nearest(weight), found)]
    assert errors[1] < 0.6 * errors[0]


def test_inputs_that_have_nothing_to_do_with_each_other_leave_the_nearest() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 32)
    assert torch.equal(by_data(weight, torch.eye(32)), nearest(weight))


def test_a_table_is_written(tmp_path: Path) -> None:
    rows = [{"instruction": f"say {n}", "output": "one two three " * n} for n in range(1, 4)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [
        "--calibration",
        str(tmp_path / "texts.jsonl"),
        "--texts",
        str(tmp_path / "texts.jsonl"),
    ]
    assert main(["--model", "tiny", "--out", str(tmp_path), *files]) == 0
    table = (tmp_path / "fp8_rounding.md").read_text()
    lines = [line.split("|") for line in table.splitlines() if "weights" in line and "|" in line]
    apart = {line[1].strip(): float(line[3]) for line in lines}
    assert apart["nearest: weights"] > 0
