"""Serving and evaluation beside transformers: output tokens per second of concurrent requests.

    python -m benchmarks.serving                          1 B and 8 B on the GPU at hand
    python -m benchmarks.serving --models meta-llama/Llama-3.2-1B --requests 16 --out drawn
    python -m benchmarks.serving --tiny --out /tmp/x      a toy on the CPU: whether it runs

Each method has a process of its own and the same random weights. A round is so many requests at
once, with prompts of 32 to 512 tokens and 128 new tokens each. A first round of the same lengths
compiles, records and allocates; up to three more, with other tokens, are measured from the first
request to the last token. A method that fails is a line of the table; what it had measured before
stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu import Child, leave_on_sigterm
from benchmarks.serving_methods import (
    ENOUGH,
    EVALUATE,
    LONGEST,
    MEASURED,
    METHODS,
    NEW,
    PAGED,
    SERVE,
    SHORTEST,
)
from benchmarks.table import DOCS, write_table

MODELS = ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B")
REQUESTS = (16, 64, 1)
WANTED = {SERVE: (PAGED, 0.8), EVALUATE: ("HF ", 0.9)}
"""Of ours: the best of transformers' methods that begin so is what we are measured by, and the
part of its rate that we want."""

Record = dict[str, Any]
"""A model, a method, a number of requests, and a rate or an error."""


def run_all(options: argparse.Namespace) -> Iterator[Record]:
    """Each method of each model in turn; the next one imports while this one runs."""
    with tempfile.TemporaryDirectory() as folder:
        waiting: list[tuple[str, str, Path, Child]] = []
        try:
            for number, (model, method) in enumerate(
                (model, method) for model in options.models for method in options.methods
            ):
                out = Path(folder) / f"{number}.jsonl"
                words = ["serving_methods", model, method, str(out), "--requests"]
                child = Child([*words, *map(str, options.requests)], options)
                waiting.append((model, method, out, child))
                if len(waiting) > 1:
                    yield from _records(*waiting.pop(0), options.requests)
            while waiting:
                yield from _records(*waiting.pop(0), options.requests)
        finally:  # whoever was ended early leaves nothing on the card
            for *_, child in waiting:
                child.end()


def _records(
    model: str, method: str, out: Path, child: Child, requests: list[int]
) -> Iterator[Record]:
    """One for each number of requests; the error of a method stands where it has no rate."""
    error = child.result().get("error", "")
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    measured = {each["requests"]: each for each in map(json.loads, lines)}
    for number in requests:
        found = measured.get(number, {"requests": number, "error": error})
        rate = f"{found['tokens_per_second']:,.0f} tokens/s" if number in measured else error
        print(f"{model} | {number} | {method}: {rate}", flush=True)
        yield {"model": model, "method": method} | found


def table_rows(records: list[Record]) -> list[list[str]]:
    """By model and number of requests, with the part of transformers' rate that ours comes to."""
    order = {model: place for place, model in enumerate(dict.fromkeys(r["model"] for r in records))}
    shown = sorted(records, key=lambda each: (order[each["model"]], each["requests"]))
    return [
        [
            each["model"].partition("/")[2],
            str(each["requests"]),
            each["method"],
            _rate(each),
            *_to_transformers(each, records),
        ]
        for each in shown
    ]


def _rate(record: Record) -> str:
    if "error" in record:
        return record["error"].replace("|", "\\|")
    return f"{record['tokens_per_second']:,.0f}"


def _to_transformers(record: Record, records: list[Record]) -> tuple[str, str]:
    """The ratio to the best of its kind at the same requests, and the ratio that is wanted."""
    if record["method"] not in WANTED or "error" in record:
        return "", ""
    kind, wanted = WANTED[record["method"]]
    rates = [
        each["tokens_per_second"]
        for each in records
        if each["method"].startswith(kind)
        and "error" not in each
        and (each["model"], each["requests"]) == (record["model"], record["requests"])
    ]
    return f"{record['tokens_per_second'] / max(rates):.2f}" if rates else "", f"{wanted}"


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help="(1 B and 8 B)")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=METHODS, help="(all)"
    )
    parser.add_argument("--requests", nargs="+", type=int, default=REQUESTS, help="(16 64 1)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of a method (60)")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER", help="(docs)")
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU")
    options = parser.parse_args(given)
    if options.tiny and options.out == DOCS:
        parser.error("--tiny measures nothing worth a place in the docs: give --out")
    options.out.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    for record in run_all(options):
        records.append(record)
        text = json.dumps(records, indent=1) + "\n"
        (options.out / "serving.json").write_text(text, encoding="utf-8")
    write_table(
        "serving",
        "Serving and evaluation beside transformers",
        ["model", "requests", "method", "output tokens/s", "to transformers'", "wanted"],
        table_rows(records),
        f"Requests that come at once: prompts of {SHORTEST} to {LONGEST} tokens (seeded), {NEW} "
        "new tokens each, greedy, no stop token, random weights in bf16. The rate is that of whole "
        "rounds, prompts included, after one of the same lengths that isn't counted: the median "
        f"of {MEASURED}, of fewer where they take more than {ENOUGH:.0f} s. "
        f"`{SERVE}` is our engine with its thread and its detokenization, without HTTP; it is "
        "compared with the best of transformers' continuous batching. "
        f"`{EVALUATE}` is the batched generation of `shardtune evaluate`, compared with the best "
        f"of transformers (HF) altogether. transformers {version('transformers')}; its continuous "
        "batching takes FlashAttention where that is installed, else `sdpa`.",
        folder=options.out,
    )
    return 0


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
