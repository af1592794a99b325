"""Writes the tables of docs/strategies.md from the layouts: `python docs/make_tables.py`.

`--check` says whether the page is up to date, for a test.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shardtune.core.footprint import ModelBytes, predict_held, predict_sent
from shardtune.strategies import Strategy

PAGE = Path(__file__).with_name("strategies.md")
BEGIN, END = "<!-- table {name} -->", "<!-- /table {name} -->"
GB = 1e9
PARAMETERS, RANKS, MICROBATCHES = 7_500_000_000, 64, 1

STRATEGIES: dict[str, dict[str, Any]] = {
    "`ddp`": {"type": "ddp"},
    "ZeRO-1": {"type": "deepspeed", "zero_optimization": {"stage": 1}},
    "ZeRO-2": {"type": "deepspeed", "zero_optimization": {"stage": 2}},
    "ZeRO-3": {"type": "deepspeed", "zero_optimization": {"stage": 3}},
    "ZeRO-3 + hpZ 8": {
        "type": "deepspeed",
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8},
    },
    "`fsdp`, full": {"type": "fsdp"},
    "`fsdp`, hybrid, 8 replicas": {"type": "fsdp", "sharding": "hybrid", "replicas": 8},
}


def strategy(settings: dict[str, Any]) -> Strategy:
    return TypeAdapter(Strategy).validate_json(json.dumps(settings))


def mixed_adam(parameters: int) -> ModelBytes:
    """The ZeRO paper's count: 2 bytes a weight, 2 a gradient, 12 for master and two moments."""
    return ModelBytes(
        params=2 * parameters, trained=2 * parameters, grads=2 * parameters, optim=12 * parameters
    )


def memory_and_traffic() -> str:
    whole = mixed_adam(PARAMETERS)
    lines = [
        "| strategy | weights | gradients | optimizer | together, GB | sent, model sizes |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, settings in STRATEGIES.items():
        chosen = strategy(settings)
        mesh = chosen.mesh(RANKS)
        # The paper's 12 bytes have the masters in them already.
        held = predict_held(chosen.layout().without_masters(), mesh, whole)
        sizes = [held.of(state) / GB for state in ("params", "grads", "optim")]
        sent = predict_sent(chosen.layout(), mesh, whole, microbatches=MICROBATCHES)
        # An all-reduce is a reduce-scatter and an all-gather: it moves its bytes twice.
        moved = sum(size * (2 if op == "all_reduce" else 1) for op, size in sent.items())
        lines.append(
            f"| {name} | "
            + " | ".join(f"{size:.2f}" for size in sizes)
            + f" | {sum(sizes):.1f} | {moved / whole.params:.2f} |"
        )
    return "\n".join(lines)


TABLES = {"memory": memory_and_traffic}


def filled(text: str) -> str:
    for name, make in TABLES.items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{make()}\n{end}{tail}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text)
    if parser.parse_args().check:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
