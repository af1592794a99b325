"""The clock of `benchmarks.gpu`, and how fast the card at hand multiplies: it prints that."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from statistics import median
from typing import Any

import torch

BURST, ROUNDS, REST = 16, 12, 0.1  # products without a rest bring a GPU to its power limit


def clocked(
    step: Callable[[int], Any], numbers: range, device: str
) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step.

    On a GPU the time goes from mark to mark on the card, so that a method which never waits for
    the card isn't made to; whatever the card idles between two steps counts.
    """
    losses, marks = [], [_mark(device)]
    for number in numbers:
        losses.append(step(number))
        marks.append(_mark(device))
    if device != "cuda":
        return [b - a for a, b in pairwise(marks)], [*map(loss_of, losses)]
    torch.cuda.synchronize()
    taken = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
    return taken, [loss_of(each) for each in losses]


def loss_of(step: Any) -> float:
    """What a step says of its loss; asking waits for the card."""
    return float(getattr(step, "loss", step))


def _mark(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def matmul_rate(device: str, size: int) -> dict[str, Any]:
    """FLOP/s of a bf16 product, in bursts with a rest; the median of the bursts."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    rates = []
    for _ in range(ROUNDS):
        time.sleep(REST if device == "cuda" else 0)
        torch.mm(a, b)
        seconds, _ = clocked(lambda _: torch.mm(a, b)[0, 0], range(BURST), device)
        rates.append(2 * size**3 / median(seconds))
    return {"matmul_flops": median(rates), **card(device)}


def card(device: str) -> dict[str, str]:
    """What it is, and which one of its kind."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    if device != "cuda":
        return {"gpu": "none", "machine": platform.machine(), **versions}
    found = torch.cuda.get_device_properties(0)
    return {"gpu": found.name, "machine": str(getattr(found, "uuid", found.name)), **versions}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    print(json.dumps(matmul_rate("cpu", 64) if tiny else matmul_rate("cuda", 8192)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
