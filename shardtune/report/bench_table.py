"""What `shardtune bench` found, as tables and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardtune.plan.machine_profile import CollectivePoint, Profile

WIDTH, HEIGHT, MARGIN = 640, 360, 56
COLOURS = ("#1f5fa8", "#c8501e", "#2c8a4b", "#7a4fa3")


def print_bench(profile: Profile, console: Console) -> None:
    """Products, copies and collectives, each in a table."""
    measured = profile.measured
    table = Table(title="matmuls, bf16", box=None, padding=(0, 2, 0, 0))
    for heading in ("tokens x inputs x outputs", "TFLOP/s"):
        table.add_column(heading, justify="right")
    for point in measured.matmul:
        table.add_row(f"{point.m} x {point.k} x {point.n}", f"{point.tflops:,.2f}")
    console.print(table)
    rates = {
        "memory, read and written": measured.memory_gbs,
        "host to device, pinned": measured.host_to_device_gbs,
        "device to host, pinned": measured.device_to_host_gbs,
        "disk, written and synced": measured.disk_write_gbs,
        "disk, read": measured.disk_read_gbs,
    }
    table = Table(title="rates, GB/s", box=None, padding=(0, 2, 0, 0))
    for what, rate in rates.items():
        if rate is not None:
            table.add_row(what, f"{rate:,.2f}")
    console.print(table)
    if measured.collectives:
        console.print(_collectives(measured.collectives))


def _collectives(points: Sequence[CollectivePoint]) -> Table:
    title = f"collectives on {max(point.ranks for point in points)} ranks"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for heading in ("operation", "bytes", "ms", "algorithm GB/s", "bus GB/s"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for point in points:
        table.add_row(
            point.op,
            f"{point.bytes:,}",
            f"{point.seconds * 1e3:.3f}",
            f"{point.bytes / point.seconds / 1e9:.2f}",
            f"{bus_gbs(point):.2f}",
        )
    return table


def bus_gbs(point: CollectivePoint) -> float:
    """What each rank's link carried: comparable between operations and numbers of ranks."""
    others = (point.ranks - 1) / point.ranks
    carried = {"all_reduce": 2 * others, "send_recv": 1.0}.get(point.op, others)
    return carried * point.bytes / point.seconds / 1e9


def draw_bench(profile: Profile, target: Path) -> None:
    """Bus bandwidth over message size, one line an operation, both axes logarithmic."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in profile.measured.collectives:
        lines.setdefault(point.op, []).append((point.bytes, bus_gbs(point)))
    target.write_text(_svg(lines), encoding="utf-8")


def _svg(lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    sizes = [size for line in lines.values() for size, _ in line]
    rates = [rate for line in lines.values() for _, rate in line]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    left, right = math.log2(min(sizes)), math.log2(max(sizes))

    def x(size: float) -> float:
        return MARGIN + (math.log2(size) - left) / max(right - left, 1) * (WIDTH - 2 * MARGIN)

    def y(rate: float) -> float:
        share = (math.log10(rate) - low) / max(high - low, 1)
        return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24">bus bandwidth (GB/s) over message size</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{MARGIN} {at:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{MARGIN - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for size in sorted(set(sizes)):
        label = f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
        parts.append(_text(x(size), HEIGHT - MARGIN + 18, label, "middle"))
    for colour, (op, line) in zip(COLOURS, lines.items(), strict=False):
        path = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in line)
        size, rate = line[-1]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x(size) + 4:.1f}" y="{y(rate):.1f}" fill="{colour}">{op}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
