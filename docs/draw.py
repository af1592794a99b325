"""Draws each strategy from its layout: `python docs/draw.py`.

`--check` says whether the pictures are up to date, for a test.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shardtune.parallel import Strategy
from shardtune.report.strategy_picture import StrategyPicture

FOLDER = Path(__file__).with_name("pictures")

PICTURES: dict[str, tuple[str, dict[str, Any], int]] = {
    "ddp": ("Data parallelism", {"type": "ddp"}, 4),
    "zero1": ("ZeRO-1", {"type": "deepspeed", "zero_optimization": {"stage": 1}}, 4),
    "zero2": ("ZeRO-2", {"type": "deepspeed", "zero_optimization": {"stage": 2}}, 4),
    "zero3": ("ZeRO-3", {"type": "deepspeed", "zero_optimization": {"stage": 3}}, 4),
    "fsdp": ("Fully sharded data parallelism", {"type": "fsdp"}, 4),
    "fsdp_hybrid": ("Hybrid sharding", {"type": "fsdp", "sharding": "hybrid", "replicas": 2}, 4),
    "tensor": ("Tensor parallelism", {"type": "tensor", "degree": 4}, 4),
    "layers": ("Layers on different ranks", {"type": "layers", "stages": 4}, 4),
    "pipeline": ("Pipeline parallelism", {"type": "pipeline", "stages": 4}, 4),
    "pipeline_interleaved": (
        "Pipeline parallelism, interleaved",
        {"type": "pipeline", "stages": 4, "schedule": "interleaved"},
        4,
    ),
    "pipeline_zero_bubble": (
        "Pipeline parallelism, zero bubble",
        {"type": "pipeline", "stages": 4, "schedule": "zero_bubble"},
        4,
    ),
    "pipeline_data": ("Pipeline x data", {"type": "pipeline", "stages": 2}, 4),
    "fsdp_tensor": ("FSDP x tensor", {"type": "fsdp", "tensor": 2}, 4),
    "fsdp_pipeline": ("FSDP x pipeline", {"type": "fsdp", "pipeline": 2}, 4),
    "pipeline_tensor_data": (
        "Pipeline x tensor x data",
        {"type": "pipeline", "stages": 2, "tensor": 2},
        8,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether all are current")
    check = parser.parse_args().check
    stale = []
    for name, (title, settings, ranks) in PICTURES.items():
        strategy: Any = TypeAdapter(Strategy).validate_json(json.dumps(settings))
        path, drawn = FOLDER / f"{name}.svg", StrategyPicture(title, strategy, ranks).svg()
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            stale.append(name)
            if not check:
                FOLDER.mkdir(exist_ok=True)
                path.write_text(drawn, encoding="utf-8")
    print(f"{len(stale)} of {len(PICTURES)} pictures {'are out of date' if check else 'drawn'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
