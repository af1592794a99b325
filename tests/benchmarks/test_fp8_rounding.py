"""The table of what rounding costs: what the product does is nearer than each number by itself."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.fp8_rounding import main


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
    lines = [line.split("|") for line in table.splitlines() if line.count("|") == 4][2:]
    apart = {line[1].strip(): float(line[3]) for line in lines}
    assert len(apart) == 8
    assert 0 < apart["nearest: weights"] < apart["nearest: weights and inputs"]
    ours = apart["and outlier channels twice: `fp8`"]
    assert ours < 0.8 * apart["nearest: weights and inputs"]
