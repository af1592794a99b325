"""How fast documents that share a row can be kept apart in attention, each way beside the others.

    python -m benchmarks.attention          # on a CUDA machine, under a minute
    python -m benchmarks.attention --tiny   # on any: sees that it works, writes nothing
    python -m benchmarks.attention --without Flex   # some libraries compile for minutes

The heads of an 8 B Llama and 16,384 tokens in bf16. Every way is first held against attention in
float64, forward and backward, on a batch like the first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_ways import WAYS, Attend, Packed, Way, flex_mask
from benchmarks.table import write_table

ROOT = Path(__file__).parents[1]
REPEATS = 15
NEAR = 0.02  # of the norm; bf16 alone makes 0.003, a token that sees another document 0.1 and more
HEADINGS = (
    "way",
    "documents, in tokens",
    "forward, ms",
    "forward + backward, ms",
    "forward, TFLOP/s",
    "both, TFLOP/s",
    "over the dense mask",
    "first time, ms",
)
CHARACTERS = 4  # of a token, about: no tokenizer has to be there


@dataclass(frozen=True)
class Size:
    """Of a micro-batch and of its heads."""

    tokens: int
    heads: int
    groups: int
    dim: int
    dtype: torch.dtype
    shrink: int = 1
    """Documents are so many times shorter."""


LLAMA = Size(16_384, heads=32, groups=8, dim=128, dtype=torch.bfloat16)
TINY = Size(1_024, heads=4, groups=2, dim=16, dtype=torch.float32, shrink=16)


def lengths_of(kind: str, seed: int) -> Iterator[int]:
    """Documents without end, the same ones every time."""
    draw = random.Random(seed)
    found = _real_lengths(kind)
    draw.shuffle(found)
    while found:
        yield from found
    low, high = {"50 to 2,000": (50, 2_000), "2,000 to 8,000": (2_000, 8_000)}[kind]
    while True:
        yield round(math.exp(draw.uniform(math.log(low), math.log(high))))


def _real_lengths(kind: str) -> list[int]:
    if kind == "instructions (data/code.jsonl)":
        lines = (ROOT / "data" / "code.jsonl").read_text(encoding="utf-8").splitlines()
        return [len("".join(json.loads(line).values())) // CHARACTERS for line in lines]
    if kind == "ShareGPT":
        file = ROOT.parent / "shared" / "data" / "sharegpt_conversations.json"
        talks = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        return [
            max(8, sum(len(turn["value"]) for turn in talk["conversations"]) // CHARACTERS)
            for talk in talks
        ]
    return []


def batches(size: Size, device: torch.device, seed: int = 0) -> dict[str, Packed]:
    """By the kind of documents. What doesn't fit into its row is cut off."""
    widths = {
        "50 to 2,000": size.tokens // 8,
        "instructions (data/code.jsonl)": size.tokens // 8,
        "ShareGPT": size.tokens // 8,
        "2,000 to 8,000": size.tokens // 2,
    }
    found = {}
    for kind, width in widths.items():
        if kind == "ShareGPT" and not _real_lengths(kind):
            continue
        documents, lengths = lengths_of(kind, seed), []
        for _ in range(size.tokens // width):
            room = width
            while room:
                lengths.append(min(room, max(1, next(documents) // size.shrink)))
                room -= lengths[-1]
        found[kind] = Packed(tuple(lengths), size.tokens // width, width, device)
    return found


def tensors(size: Size, device: torch.device) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output."""
    torch.manual_seed(0)
    heads = (size.heads, size.groups, size.groups, size.heads)
    made = [torch.randn(size.tokens, n, size.dim, device=device) for n in heads]
    return [
        each.to(size.dtype).requires_grad_(number < 3)  # the last one is a gradient itself
        for number, each in enumerate(made)
    ]


def exact(packed: Packed, given: list[Tensor]) -> list[Tensor]:
    """Output and gradients in float64, document by document."""
    found: list[list[Tensor]] = []
    for parts in zip(*(each.detach().split(packed.lengths) for each in given), strict=True):
        *inputs, outer = (each.double().transpose(0, 1) for each in parts)
        query, key, value = (each.requires_grad_() for each in inputs)
        repeats = len(query) // len(key)
        wide_key, wide_value = (each.repeat_interleave(repeats, 0) for each in (key, value))
        scores = query @ wide_key.transpose(1, 2) / query.shape[-1] ** 0.5
        ahead = torch.ones(scores.shape[1:], device=scores.device).triu(1).bool()
        answer = scores.masked_fill(ahead, -torch.inf).softmax(-1) @ wide_value
        gradients = torch.autograd.grad(answer, (query, key, value), outer)
        found.append([each.detach().transpose(0, 1) for each in (answer, *gradients)])
    return [torch.cat(each) for each in zip(*found, strict=True)]


def farthest(attend: Attend, given: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative distance of output and gradients from what they should be."""
    *inputs, outer = given
    answer = attend(*inputs)
    found = (answer.detach(), *torch.autograd.grad(answer, inputs, outer))
    distances = [
        (each.double() - right).norm() / right.norm()
        for each, right in zip(found, expected, strict=True)
    ]
    return float(torch.stack(distances).max())


def milliseconds(work: Callable[[], Any], device: torch.device) -> float:
    """The median of several runs, after two that don't count."""
    seconds = []
    for _ in range(REPEATS + 2):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end))
        else:
            since = time.perf_counter()
            work()
            seconds.append((time.perf_counter() - since) * 1e3)
    return statistics.median(seconds[2:])


def first_time(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a run with lengths that were never seen, until its result is there."""
    since = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - since) * 1e3


@dataclass(frozen=True)
class Timing:
    """Milliseconds."""

    first: float
    forward: float
    both: float


def time_way(way: Way, packed: Packed, given: list[Tensor]) -> Timing:
    *inputs, outer = given

    def both() -> None:
        torch.autograd.grad(way_of(*inputs), inputs, outer)

    @torch.no_grad()
    def forward() -> None:
        way_of(*inputs)

    way_of = way.prepare(packed)
    first = first_time(both, packed.device)
    return Timing(first, milliseconds(forward, packed.device), milliseconds(both, packed.device))


def useful_flops(packed: Packed, size: Size) -> float:
    """Of the forward pass: two products for each pair of tokens of which one may see the other."""
    return 4 * size.heads * size.dim * sum(n * (n + 1) / 2 for n in packed.lengths)


def failure(error: Exception) -> str:
    """What a library had to say, in one line of a table."""
    reason = (str(error).strip().splitlines() or [repr(error)])[0].replace("|", "/")
    print(f"{type(error).__name__}: {reason[:160]}", flush=True)
    return f"not here: {type(error).__name__}"


def judge(
    size: Size, device: torch.device, given: list[Tensor], without: list[str]
) -> Iterator[tuple[Way, str]]:
    """Every way that this device may have, and what speaks against it."""
    packed = next(iter(batches(size, device, seed=1).values()))  # the timed ones stay unseen
    expected = exact(packed, given)
    for way in WAYS:
        if device.type == "cpu" and not way.on_cpu:
            continue
        if any(word in way.name for word in without):
            yield way, "left out of this run"
            continue
        try:
            distance = farthest(way.prepare(packed), given, expected)
        except Exception as error:  # noqa: BLE001 - it is the way's own line
            yield way, failure(error)
            continue
        print(f"{way.name}: {distance:.1e} from float64", flush=True)
        wrong = way.isolates and not distance < NEAR
        yield way, f"wrong: {distance:.2g} from float64" if wrong else ""


def measure(
    size: Size, device: torch.device, without: list[str]
) -> Iterator[tuple[list[list[str]], str]]:
    """The rows of the table so far, and what is missing, after each way. What a way can't do is one
    line."""
    given = tensors(size, device)
    judged = list(judge(size, device, given, without))
    against = [[way.name, reason, *["-"] * 6] for way, reason in judged if reason]
    rows = []
    kinds = batches(size, device)
    for done, (kind, packed) in enumerate(kinds.items()):
        flops, dense = useful_flops(packed, size), math.nan
        what = f"{kind}: {len(packed.lengths)} in {packed.rows} x {packed.width}"
        for way in (way for way, reason in judged if not reason):
            try:
                timing = time_way(way, packed, given)
            except Exception as error:  # noqa: BLE001 - as above
                rows.append([way.name, f"{what}: {failure(error)}", *["-"] * 6])
                continue
            dense = timing.both if "dense mask" in way.name else dense
            rows.append(
                [
                    way.name,
                    what,
                    f"{timing.forward:.2f}",
                    f"{timing.both:.2f}",
                    f"{flops / timing.forward / 1e9:.0f}",
                    f"{3.5 * flops / timing.both / 1e9:.0f}",
                    "-" if math.isnan(dense) else f"{dense / timing.both:.1f} x",
                    f"{timing.first:.0f}",
                ]
            )
            print(" | ".join(rows[-1]), flush=True)
            yield rows + against, f"Cut off: {done} of {len(kinds)} kinds of documents are whole. "
    yield rows + against, ""


def mask_milliseconds(size: Size, device: torch.device) -> str:
    """What FlexAttention's mask takes, which is made once for each micro-batch."""
    packed = next(iter(batches(size, device).values()))
    documents = packed.documents
    try:
        took = milliseconds(lambda: flex_mask(packed, documents), device)
    except Exception as error:  # noqa: BLE001 - as above
        return f"FlexAttention's mask can't be made ({type(error).__name__}). "
    return f"FlexAttention's mask, made once for each micro-batch, takes {took:.1f} ms more. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small, on any machine; no table")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="WORD", help="ways to leave out"
    )
    told = parser.parse_args()
    tiny, without = told.tiny, told.without
    if not tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: python -m benchmarks.attention --tiny runs anywhere")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = TINY if tiny else LLAMA
    mask = "" if tiny or "Flex" in without else mask_milliseconds(size, device)
    for rows, missing in measure(size, device, without):  # what is cut off leaves what it has
        if not tiny:
            write(rows, size, mask + missing, shown=not missing)


def write(rows: list[list[str]], size: Size, more: str, *, shown: bool) -> None:
    write_table(
        "attention",
        "Attention that isolates packed documents",
        HEADINGS,
        rows,
        f"On one {torch.cuda.get_device_name()}: {note(size)} {more}".strip(),
        command=" ".join(["attention", *sys.argv[1:]]),
        shown=shown,
    )


def note(size: Size) -> str:
    """What the figures are of."""
    return (
        f"{size.tokens:,} tokens in bf16, {size.heads} query heads and "
        f"{size.groups} key-value heads of {size.dim}; medians of {REPEATS} runs. "
        "FLOPs count only where a token attends to another (the backward pass as 2.5 forward "
        "passes). *First time* is forward and backward with lengths that this process has not "
        "seen, until the result is there: in training every micro-batch has new ones, and a way "
        "that prepares a kernel for each length pays it again and again. "
        "Lengths are drawn evenly in their logarithm between the two numbers, or are those of real "
        "data at four characters a token. Every way was "
        f"held against float64 on such a batch, forward and backward ({NEAR:.0%} of the norm "
        "allowed), except the one that isolates nothing."
    )


if __name__ == "__main__":
    main()
