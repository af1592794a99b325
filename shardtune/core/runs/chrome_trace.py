"""Chrome traces, as torch's profiler writes them: read, and added up to a rank's profile.

A trace has complete events (`ph: X`) with a begin and a duration in microseconds. `kernel`,
`gpu_memcpy` and `gpu_memset` ran on a GPU; `cpu_op` is an operation of a thread, and holds those
that it calls. NCCL's collectives are kernels whose names begin with `nccl`, gloo's are annotations
of gloo's own threads (`gloo:all_reduce`).
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.core.runs.rank_profile import Collective, OperationTime, RankProfile

SHOWN_OPERATIONS = 12
_MATMUL = re.compile(r"gemm|cutlass|cublas|xmma|wgmma|matmul|::(add|b|badd|_scaled_|addb)?mm$|conv")
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.I)
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")
_GLOO = "gloo:"
_SENDING = "c10d::"

TimeSpan = tuple[float, float]


@dataclass(frozen=True)
class TraceEvent:
    """What ran from when to when, in microseconds."""

    name: str
    kind: str
    """`cpu_op`, `kernel`, ..."""
    thread: str
    begin: float
    end: float


def read_trace(path: Path) -> list[TraceEvent]:
    """The complete events of a trace, which may be packed by gzip."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    return [
        TraceEvent(
            str(each["name"]),
            str(each.get("cat", "")),
            f"{each.get('pid')}/{each.get('tid')}",
            float(each["ts"]),
            float(each["ts"]) + float(each["dur"]),
        )
        for each in json.loads(text)["traceEvents"]
        if each.get("ph") == "X" and "dur" in each
    ]


def add_up(events: Sequence[TraceEvent], *, rank: int, steps: int, seconds: float) -> RankProfile:
    """The profile of a rank whose `steps` took so many `seconds`."""
    kernels = [each for each in events if each.kind == "kernel"]
    return (_of_gpu if kernels else _of_cpu)(events, rank, steps, seconds)


def _of_gpu(events: Sequence[TraceEvent], rank: int, steps: int, seconds: float) -> RankProfile:
    kernels = [each for each in events if each.kind == "kernel"]
    sent = [each for each in kernels if _NCCL.search(each.name)]
    computed = [each for each in kernels if not _NCCL.search(each.name)]
    copied = [each for each in events if each.kind in ("gpu_memcpy", "gpu_memset")]
    busy = union((each.begin, each.end) for each in computed)
    sending = union((each.begin, each.end) for each in sent)
    moving = union((each.begin, each.end) for each in copied)
    every = union([*busy, *sending, *moving])
    kinds = _by_kind((each.name, each.end - each.begin) for each in computed)
    return RankProfile(
        rank=rank,
        steps=steps,
        seconds=seconds,
        on_gpu=True,
        **kinds,
        copies=length(moving) / 1e6,
        exposed=(length(sending) - overlap(sending, busy)) / 1e6,
        idle=max(0.0, seconds - length(every) / 1e6),
        operations=len(kernels),
        collectives=_collectives([(_nccl_name(each.name), each) for each in sent], busy),
        top=_top((each.name, each.end - each.begin) for each in computed),
    )


def _of_cpu(events: Sequence[TraceEvent], rank: int, steps: int, seconds: float) -> RankProfile:
    """The thread that trains is the one with most operations; gloo's threads only send."""
    operations = [each for each in events if each.kind == "cpu_op"]
    by_thread: dict[str, list[TraceEvent]] = defaultdict(list)
    for each in operations:
        by_thread[each.thread].append(each)
    main = max(by_thread.values(), key=len, default=[])
    own = own_times(main)
    within = union((each.begin, each.end) for each in main)
    waiting = union((e.begin, e.end) for e in main if e.name.startswith(_SENDING))
    busy = subtract(within, waiting)
    sent = [(each.name.removeprefix(_GLOO), each) for each in events if each.name.startswith(_GLOO)]
    sending = union((each.begin, each.end) for _, each in sent)
    exposed = length(sending) - overlap(sending, busy)
    computing = [(name, took) for name, took in own if not name.startswith(_SENDING)]
    return RankProfile(
        rank=rank,
        steps=steps,
        seconds=seconds,
        on_gpu=False,
        **_by_kind(computing),
        copies=0.0,
        exposed=exposed / 1e6,
        idle=max(0.0, seconds - (length(busy) + exposed) / 1e6),
        operations=len(main),
        collectives=_collectives(sent, busy),
        top=_top(computing),
    )


def own_times(events: Iterable[TraceEvent]) -> list[tuple[str, float]]:
    """Each operation of a thread with its own time: without those that it calls."""
    own: list[float] = []
    names: list[str] = []
    stack: list[tuple[float, int]] = []  # the end, and the place of those that are open
    for each in sorted(events, key=lambda event: (event.begin, -event.end)):
        while stack and stack[-1][0] <= each.begin:
            stack.pop()
        took = each.end - each.begin
        if stack:
            own[stack[-1][1]] -= took
        stack.append((each.end, len(own)))
        own.append(took)
        names.append(each.name)
    return list(zip(names, (max(0.0, each) for each in own), strict=True))


def _by_kind(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums = {"matmul": 0.0, "attention": 0.0, "memory": 0.0}
    for name, took in times:
        kind = "memory"
        if _ATTENTION.search(name):
            kind = "attention"
        elif _MATMUL.search(name):
            kind = "matmul"
        sums[kind] += took / 1e6
    return sums


def _collectives(
    sent: Iterable[tuple[str, TraceEvent]], busy: Sequence[TimeSpan]
) -> tuple[Collective, ...]:
    by_op: dict[str, list[TimeSpan]] = defaultdict(list)
    for op, each in sent:
        by_op[op].append((each.begin, each.end))
    found = []
    for op, times in by_op.items():
        whole = union(times)
        exposed = length(whole) - overlap(whole, busy)
        found.append(
            Collective(op=op, count=len(times), seconds=length(whole) / 1e6, exposed=exposed / 1e6)
        )
    return tuple(sorted(found, key=lambda each: -each.exposed))


def _nccl_name(kernel: str) -> str:
    """`ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)` is an `all_reduce`."""
    match = _NCCL.search(kernel)
    words = re.findall(r"[A-Z][a-z]+", match[1]) if match else []
    return "_".join(word.lower() for word in words) or "send_recv"


def _top(times: Iterable[tuple[str, float]]) -> tuple[OperationTime, ...]:
    sums: dict[str, list[float]] = defaultdict(list)
    for name, took in times:
        sums[name].append(took)
    ordered = sorted(sums.items(), key=lambda each: -sum(each[1]))[:SHOWN_OPERATIONS]
    return tuple(
        OperationTime(name=name[:120], count=len(each), seconds=sum(each) / 1e6)
        for name, each in ordered
    )


# Intervals ---------------------------------------------------------------------------------------


def union(intervals: Iterable[TimeSpan]) -> list[TimeSpan]:
    """The same time as intervals that don't touch, in order."""
    found: list[TimeSpan] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[TimeSpan]) -> float:
    return sum(end - begin for begin, end in intervals)


def overlap(one: Sequence[TimeSpan], other: Sequence[TimeSpan]) -> float:
    """How long both of two unions are."""
    found, place = 0.0, 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        at = place
        while at < len(other) and other[at][0] < end:
            found += min(end, other[at][1]) - max(begin, other[at][0])
            at += 1
    return found


def subtract(one: Sequence[TimeSpan], other: Sequence[TimeSpan]) -> list[TimeSpan]:
    """What is in the first of two unions and not in the second."""
    found: list[TimeSpan] = []
    place = 0
    for begin, end in one:
        while place < len(other) and other[place][1] <= begin:
            place += 1
        at = place
        while at < len(other) and other[at][0] < end:
            if other[at][0] > begin:
                found.append((begin, other[at][0]))
            begin = max(begin, other[at][1])
            at += 1
        if begin < end:
            found.append((begin, end))
    return found
