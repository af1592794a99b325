"""The table and the plot of `benchmarks.gpu`, from the records of one run or of several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.gpu_cases import CASES, COMMAND, PEERS, Case
from benchmarks.gpu_sample import case_of, described, forecast_of, is_drawn
from benchmarks.table import table, write_table
from shardtune.core.units import GIB

Record = dict[str, Any]
"""What one method came to on one row: its figures or its `error`, and where that was."""

HEADINGS = [
    *("row", "method", "machine", "tokens/s", "slowest to fastest step", "to the best peer"),
    *("wanted", "allocated GiB", "at most", "reserved GiB", "matmul share", "first step s"),
    *("first loss", "its difference", "largest difference", "forecast of the step"),
    "forecast of allocated",
]

SPREAD = ["row", "card", "machines", "median", "lowest", "highest"]
OVER_CARDS = ("Rows of several cards, ours to the best peer beside it:", "")

FORECAST_CARDS = ("H200", "H100", "A100")
"""Cards that `shardtune estimate --cluster` knows by these names."""

OF_COMMAND = (
    " `shardtune train` is the command itself, with a job's defaults, on the same weights as files "
    "and the same rows, each with a stop token at its end, in an order of its own. Its figures are "
    "those of its metrics: memory is the peak of the whole run, and what compiles is the preflight "
    "before the first step."
)


def latest(records: Iterable[Record]) -> list[Record]:
    """One record for each row, method and machine, in the table's order: the last one given."""
    kept = {(each["case"], each["machine"], each["method"]): each for each in records}
    order = list(CASES)
    order += sorted({name for name, _, _ in kept} - set(order), key=_drawn_order)
    methods = list(PEERS)  # ours come last
    return sorted(
        kept.values(),
        key=lambda each: (
            order.index(each["case"]),
            each["machine"],
            methods.index(each["method"]) if each["method"] in PEERS else len(methods),
        ),
    )


def _drawn_order(name: str) -> list[int]:
    """Drawn jobs by seed and number."""
    return [int(part) for part in name.removeprefix("sample ").split(".")]


def line(record: Record) -> str:
    """What is printed as soon as a method is done."""
    name = f"{record['case']} | {record['method']}"
    if "error" in record:
        return f"{name}: failed: {record['error']}"
    memory = record["allocated_gib"]
    return (
        f"{name}: {_count(record['tokens_per_second'])} tokens/s "
        f"({_count(record['slowest'])} to {_count(record['fastest'])}), "
        + (f"{memory:.1f} GiB, " if memory is not None else "")
        + f"share {_share(record):.3f}, first step {_first(record) or '-'} s, "
        f"first loss {record['losses'][0]:.4f}"
    )


def peers_of(record: Record, records: Sequence[Record]) -> list[Record]:
    """What a record is compared with: peers on the same row, or on the one that stands for it,
    and on the same machine, because cards of one kind differ by a percent."""
    case = case_of(record["case"])
    row = case.against or case.name
    return [
        each
        for each in records
        if each["case"] == row
        and each["method"] in PEERS
        and each["machine"] == record["machine"]
        and "error" not in each
    ]


def ratio(record: Record, records: Sequence[Record]) -> float | None:
    """Its speed over the best peer's; None where no peer was measured beside it."""
    rates = [each["tokens_per_second"] for each in peers_of(record, records)]
    return record["tokens_per_second"] / max(rates) if rates else None


def differences(record: Record, records: Sequence[Record]) -> tuple[float, float] | None:
    """Of its first loss, and the largest of all steps, from the first peer's on the same data."""
    others = peers_of(record, records)
    # The command has an order of its own.
    if not others or others[0] is record or record["method"] == COMMAND:
        return None
    pairs = zip(record["losses"], others[0]["losses"], strict=False)
    apart = [abs(own - other) for own, other in pairs]
    return apart[0], max(apart)


def rows(records: Sequence[Record], letters: dict[str, str]) -> Iterator[list[str]]:
    for record in records:
        case = case_of(record["case"])
        name = f"{case.name}: {described(case)}" if is_drawn(case.name) else case.name
        start = [name, record["method"], letters[record["machine"]]]
        if "error" in record:
            yield [*start, f"failed: {record['error'][:80]}", *[""] * (len(HEADINGS) - 4)]
        else:
            yield [*start, *_figures(record, case, records)]


def _figures(record: Record, case: Case, records: Sequence[Record]) -> Iterator[str]:
    ours = _is_first(record, case)
    compared, apart = ratio(record, records), differences(record, records)
    memory, reserved = record["allocated_gib"], record.get("reserved_gib")
    yield _count(record["tokens_per_second"])
    yield f"{_count(record['slowest'])} to {_count(record['fastest'])}"
    yield f"{compared:.3f}" if compared is not None else "none beside it"
    yield f"{case.asked:.2f}" if ours else ""
    yield f"{memory:.1f}" if memory is not None else ""
    yield f"{case.memory:g}" if ours and case.memory else ""
    yield f"{reserved:.1f}" if reserved is not None else ""
    yield f"{_share(record):.3f}"
    yield _first(record)
    yield f"{record['losses'][0]:.4f}"
    yield from (f"{each:.1e}" for each in apart) if apart else ("", "")
    off = forecast_errors(record, case) or (None, None)
    yield from ("" if each is None else f"{each:+.1%}" for each in off)


def _is_first(record: Record, case: Case) -> bool:
    """Whether it is our method of the row; others of ours are for comparison."""
    return bool(record["method"] == next(iter(case.ours)))


def forecast_errors(record: Record, case: Case) -> tuple[float, float | None] | None:
    """How far the planner's step time and allocated memory for this kind of card are off; None for
    peers, and for packed documents, of which no forecast knows which ones share a row. Memory has
    none where steps are CUDA graphs: what they hold isn't counted as allocated."""
    name = next((name for name in FORECAST_CARDS if name in record["gpu"]), None)
    method, memory = record["method"], record["allocated_gib"]
    if name is None or method not in case.ours or method == COMMAND or case.packed or not memory:
        return None
    found = forecast_of(case, method, name)
    apart = None if found.work.captured else found.memory.allocated / GIB / memory - 1
    return found.speed.step.total / record["seconds"] - 1, apart


def summary(records: Sequence[Record]) -> str:
    """Our methods over all rows that have a peer beside them on the same machine: the geometric
    mean of the ratios, the worst row, and the rows below 1; and how good the forecasts are."""
    ours = [
        each for each in records if "error" not in each and _is_first(each, case_of(each["case"]))
    ]
    ratios = {
        (each["case"], each["machine"]): found
        for each in ours
        if (found := ratio(each, records)) is not None
    }
    if not ratios:
        return "No row of ours has a peer beside it."
    (worst, _), least = min(ratios.items(), key=lambda pair: pair[1])
    below = sorted({row for (row, _), found in ratios.items() if found < 1})
    mean = exp(fmean(map(log, ratios.values())))
    errors = [found for each in ours if (found := forecast_errors(each, case_of(each["case"])))]
    lines = [
        f"Over {len(ratios)} rows of ours with a peer on the same machine: geometric mean "
        f"{mean:.3f} of the best peer's speed; worst {least:.3f} ({worst}); below 1: "
        f"{', '.join(below) or 'none'}."
    ]
    if errors:
        lines.append(
            f"Forecasts within 10 % of the time: {_near([time for time, _ in errors], 0.1)}."
        )
    if memories := [memory for _, memory in errors if memory is not None]:
        lines.append(
            f"Within 5 % of the memory, where it can be compared: {_near(memories, 0.05)}."
        )
    return " ".join(lines)


def over_cards(records: Sequence[Record]) -> list[list[str]]:
    """The ratio of our method in each row that several machines ran beside a peer: cards of one
    kind differ by percents, so a new figure is judged by the median and the range of the others."""
    found: dict[tuple[str, str], list[float]] = {}
    for each in records:
        if "error" not in each and _is_first(each, case_of(each["case"])):
            compared = ratio(each, records)
            if compared is not None:
                found.setdefault((each["case"], each["gpu"]), []).append(compared)
    return [
        [row, card, str(len(own)), *(f"{of(own):.3f}" for of in (median, min, max))]
        for (row, card), own in found.items()
        if len(own) > 1
    ]


def _near(errors: Sequence[float], enough: float) -> str:
    """How many are no farther off than that, and the farthest."""
    off = [abs(each) for each in errors]
    return f"{sum(each <= enough for each in off)} of {len(off)}, farthest {max(off):.0%}"


def write(records: Sequence[Record], folder: Path, note: str = "") -> None:
    """The table as gpu.md and the plot as gpu.svg; `note` says what else there is to know."""
    letters = letters_of(records)  # in the order of the runs: a machine keeps its letter
    records = latest(records)
    (folder / "gpu.svg").write_text(plot(records, letters), encoding="utf-8")
    spread = over_cards(records)
    steps = sorted({each["steps"] for each in records if "steps" in each})
    write_table(
        "gpu",
        "Peers and ours on one GPU",
        HEADINGS,
        list(rows(records, letters)),
        "Random weights of the true shape and random tokens, both the same for every method of a "
        "row; LoRA of rank 16 on all linear layers except in the rows `all` (full fine-tune), "
        "`dropout` (rank 64, dropout 0.05) and those that say otherwise; rows `sample` are drawn "
        "at random (`--sample N --seed S`); "
        "AdamW, gradients clipped. Each method has a process of its own. Speed is the median of "
        f"{' or '.join(map(str, steps)) or 'no'} steps after a warm-up; in the row `packed` "
        "(documents of 50 to 2000 tokens) only trained tokens count. *Allocated* is the peak of "
        "tensors in those steps, *reserved* what torch's allocator had taken from the card. "
        "*Matmul share* is the model's FLOP/s, without anything that is recomputed, over the rate "
        "of an 8192 x 8192 x 8192 matmul in bf16. The first step is the one that compiles, with "
        "torch's cache as those before left it. A ratio compares with the best peer of the row on "
        "the same machine; the rows `fp8` take the peers of the rows `bf16`. Differences of loss "
        "are to the row's first peer that ran; Unsloth initialises its own adapters, so only its "
        "first loss is comparable. *Forecast* is by how much `shardtune estimate` for this kind of "
        "card is off. Short steps are CUDA graphs with us: *reserved* has what "
        "they hold, *allocated* only where a step without one was among those that count."
        + (OF_COMMAND if any(each["method"] == COMMAND for each in records) else "")
        + "\n\n"
        + f"{summary(records)}\n\n"
        + ("\n".join([*OVER_CARDS, *table(SPREAD, spread), ""]) if spread else "")
        + (f"{note}\n\n" if note else "")
        + "![Speed of each method](gpu.svg)",
        machine=_machines(records, letters),
        folder=folder,
    )


def _machines(records: Sequence[Record], letters: dict[str, str]) -> str:
    """Where the figures come from, each machine by its letter."""
    found = {}
    for record in records:
        rate = f"{record['matmul_flops'] / 1e12:.0f} TFLOP/s"
        versions = f"torch {record['torch']}, transformers {record['transformers']}"
        found[record["machine"]] = f"{record['gpu']} ({rate}, {versions})"
    return "on " + "; ".join(f"{letter}: {found[each]}" for each, letter in letters.items())


def letters_of(records: Sequence[Record]) -> dict[str, str]:
    """A letter for each machine."""
    machines = list(dict.fromkeys(record["machine"] for record in records))
    return {machine: chr(ord("A") + number) for number, machine in enumerate(machines)}


def _share(record: Record) -> float:
    return float(record["flops_per_second"] / record["matmul_flops"])


def _first(record: Record) -> str:
    seconds = record["first_step_seconds"]
    return "" if seconds is None else f"{seconds:.1f}"


def _count(number: float) -> str:
    return f"{number:,.0f}"


# The plot -----------------------------------------------------------------------------------------

LEFT, BAR, WIDE, GAP = 250, 16, 420, 30
OURS_COLOUR, PEER_COLOUR = "#3b6fb6", "#b9b9b9"


def plot(records: Sequence[Record], letters: dict[str, str]) -> str:
    """A bar for each method, as long as its share of the fastest of its row."""
    body, top = [], 44
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if "error" not in record:
            groups.setdefault((record["case"], record["machine"]), []).append(record)
    for (case, machine), members in groups.items():
        shown = members + [each for each in peers_of(members[0], records) if each not in members]
        longest = max(each["tokens_per_second"] for each in shown)
        body.append(_text(12, top, f"{case}, machine {letters[machine]}", bold=True))
        for record in sorted(shown, key=lambda each: -each["tokens_per_second"]):
            top += BAR + 4
            body += _bar(record, top, WIDE * record["tokens_per_second"] / longest)
        top += GAP
    width, height = LEFT + WIDE + 190, max(top, 60)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            _text(12, 20, "Tokens a second", bold=True),
            *body,
            "</svg>",
            "",
        ]
    )


def _bar(record: Record, top: float, wide: float) -> Iterator[str]:
    colour = PEER_COLOUR if record["method"] in PEERS else OURS_COLOUR
    memory = record["allocated_gib"]
    yield _text(24, top, record["method"])
    yield (
        f'<rect x="{LEFT}" y="{top - BAR + 4}" width="{wide:.1f}" height="{BAR}" fill="{colour}"/>'
    )
    said = _count(record["tokens_per_second"]) + (f", {memory:.1f} GiB" if memory else "")
    yield _text(LEFT + wide + 6, top, said)


def _text(left: float, top: float, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{left:.1f}" y="{top}"{weight}>{escape(text)}</text>'
