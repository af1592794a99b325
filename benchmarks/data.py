"""Preparation and packing: ours beside TRL's, on the same files in the same run.

    python -m benchmarks.data [--data DIR] [--repeats N] [--workers N]

Needs the extra `bench`. Prints a table and writes it to docs/benchmarks/data.md. `--data` is a
folder with GSM8K, ShareGPT and TinyStories files; where it isn't there, the project's own
data/code.jsonl is used, repeated.

Cold is everything from the file to packed rows: reading, checking, masking, tokenising, packing.
Warm is the same again with what the first time left on disk. TRL is driven through the method that
SFTTrainer prepares its data with, and gets the same rows in the form that it wants, written to a
file beforehand; that conversion is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tokenizers
import transformers
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.config.job import Columns, DataSection, TrainSource
from shardtune.data.loader import Loader
from shardtune.data.prepare import prepare
from shardtune.models.catalogue import resolve

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "data.md"
LENGTH = 2048
CODE_COPIES = 20  # of the project's small data set, so that there is something to measure

# TRL masks by marks in the chat template and refuses SmolLM2's, which has none. This writes the
# same text, with the marks around what ours trains.
MARKED = """\
{%- for message in messages -%}
{%- if loop.first and opening and message['role'] != 'system' -%}{{- opening -}}{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- message['content'] + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Workload:
    """One data set: how ours reads it, and its rows as TRL wants them."""

    name: str
    source: TrainSource
    rows: list[dict[str, Any]]

    @property
    def chat(self) -> bool:
        return "messages" in self.rows[0]


@dataclass(frozen=True)
class Result:
    """What a preparation made, and how long it took."""

    seconds: float
    tokens: int
    labels: int
    rows: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def fill(self) -> float:
        return self.tokens / (self.rows * LENGTH)


def workloads(folder: Path, scratch: Path) -> list[Workload]:
    """The data sets to measure."""
    if not (folder / "gsm8k_train_2000.jsonl").is_file():
        return [_code(ROOT / "data" / "code.jsonl", scratch)]
    gsm8k = folder / "gsm8k_train_2000.jsonl"
    sharegpt = folder / "sharegpt_conversations.json"
    stories = folder / "tinystories.jsonl"
    asked = Columns(instruction="question", output="answer")
    roles = {"human": "user", "gpt": "assistant"}
    return [
        Workload(
            "GSM8K (instruction)",
            TrainSource(path=str(gsm8k), format="instruction", columns=asked),
            [_pair(row["question"], row["answer"]) for row in _lines(gsm8k)],
        ),
        Workload(
            "ShareGPT (chat)",
            TrainSource(path=str(sharegpt), format="chat"),
            [
                {"messages": [_turn(roles[t["from"]], t["value"]) for t in row["conversations"]]}
                for row in json.loads(sharegpt.read_text("utf-8"))
            ],
        ),
        Workload(
            "TinyStories (completion)",
            TrainSource(path=str(stories), format="completion"),
            [{"text": row["text"]} for row in _lines(stories)],
        ),
    ]


def _code(path: Path, scratch: Path) -> Workload:
    rows = _lines(path) * CODE_COPIES
    repeated = scratch / "code.jsonl"
    _write(repeated, rows)
    pairs = [
        _pair("\n\n".join(filter(None, (row["instruction"], row.get("input")))), row["output"])
        for row in rows
    ]
    source = TrainSource(path=str(repeated), format="instruction")
    return Workload(f"data/code.jsonl × {CODE_COPIES} (instruction)", source, pairs)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _pair(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": [_turn("user", question)], "completion": [_turn("assistant", answer)]}


class Ours:
    """`prepare` and the packing of the first epoch."""

    def __init__(self, workload: Workload, tokenizer: Any, workers: int) -> None:
        self._tokenizer = tokenizer
        self._section = DataSection(
            train=(workload.source,), sequence_length=LENGTH, workers=workers
        )

    def run(self, cache: Path) -> Result:
        begin = time.perf_counter()
        stops = frozenset({self._tokenizer.eos_token_id})
        data = prepare(self._section, self._tokenizer, stops, cache=cache, quiet=True)
        loader = Loader(data, self._section, seed=0, global_batch=1, micro_batch=1, rank=0,
                        ranks=1, pad_id=0)  # fmt: skip
        rows = loader.total_steps(1)  # a step of one row each
        seconds = time.perf_counter() - begin
        (made,) = data.train
        return Result(seconds, int(made.lengths.sum()), int(made.labels.sum()), rows)


class TRLs:
    """`SFTTrainer._prepare_dataset`, which its constructor calls with the data set."""

    def __init__(self, workload: Workload, tokenizer: Any, workers: int, scratch: Path) -> None:
        self._file = scratch / "trl.jsonl"
        _write(self._file, workload.rows)
        self._tokenizer = tokenizer
        self._config = trl.SFTConfig(
            output_dir=str(scratch / "trl"), use_cpu=True, bf16=False, report_to=[],
            packing=True, packing_strategy="bfd", max_length=LENGTH,
            assistant_only_loss=workload.chat,
            dataset_num_proc=None if workers == 1 else workers,
        )  # fmt: skip
        # The constructor prepares a data set and looks at its form; a few rows are enough for it.
        self._trainer = trl.SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(resolve("tiny")),
            args=self._config,
            train_dataset=datasets.Dataset.from_list(workload.rows[:4]),
            processing_class=tokenizer,
        )

    def run(self, cache: Path) -> Result:
        begin = time.perf_counter()
        read = datasets.load_dataset(
            "json", data_files=str(self._file), split="train", cache_dir=str(cache)
        )
        packed = self._trainer._prepare_dataset(
            read, self._tokenizer, self._config, True, None, "train"
        )
        seconds = time.perf_counter() - begin
        table = packed.with_format("arrow")[:]
        labels = table["labels"].combine_chunks().flatten().to_numpy() != -100
        lengths = table["seq_lengths"].combine_chunks().flatten().to_numpy()
        labels[np.cumsum(lengths) - lengths] = False  # its collator masks each first token
        return Result(seconds, int(lengths.sum()), int(labels.sum()), len(packed))


@dataclass(frozen=True)
class Pair:
    """Median results of both sides on one data set."""

    name: str
    ours_cold: Result
    ours_warm: Result
    trl_cold: Result
    trl_warm: Result


def measure(workload: Workload, tokenizer: Any, marked: Any, repeats: int, workers: int) -> Pair:
    """Both sides in turn, so that a busy moment of the machine doesn't strike one of them only."""
    cold: tuple[list[Result], list[Result]] = ([], [])
    warm: tuple[list[Result], list[Result]] = ([], [])
    with _folder() as scratch:
        sides = (
            Ours(workload, tokenizer, workers).run,
            TRLs(workload, marked, workers, scratch).run,
        )
        for _ in range(repeats):
            for side, run in enumerate(sides):
                with _folder() as cache:
                    cold[side].append(run(cache))
                    warm[side].append(run(cache))
    return Pair(
        workload.name, _median(cold[0]), _median(warm[0]), _median(cold[1]), _median(warm[1])
    )


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _median(results: list[Result]) -> Result:
    # `median_low` takes one that was really measured.
    middle = statistics.median_low(result.seconds for result in results)
    return next(result for result in results if result.seconds == middle)


def total(pairs: list[Pair]) -> Pair:
    def added(pick: Callable[[Pair], Result]) -> Result:
        results = [pick(pair) for pair in pairs]
        return Result(
            sum(result.seconds for result in results),
            sum(result.tokens for result in results),
            sum(result.labels for result in results),
            sum(result.rows for result in results),
        )

    return Pair(
        "together",
        added(lambda pair: pair.ours_cold),
        added(lambda pair: pair.ours_warm),
        added(lambda pair: pair.trl_cold),
        added(lambda pair: pair.trl_warm),
    )


def table(pairs: list[Pair]) -> str:
    """Each data set in two lines, ours and TRL's."""
    lines = [
        "| data | by | tokens | trained | cold, tokens/s | warm, tokens/s | rows | fill |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for pair in pairs:
        ours, theirs = pair.ours_cold, pair.trl_cold
        cold = ours.rate / theirs.rate
        warm = pair.ours_warm.rate / pair.trl_warm.rate
        lines += [
            f"| {pair.name} | shardtune | {ours.tokens:,} | {ours.labels:,} "
            f"| {ours.rate:,.0f} ({cold:.1f} ×) | {pair.ours_warm.rate:,.0f} ({warm:.1f} ×) "
            f"| {ours.rows} | {ours.fill:.2%} |",
            f"| | TRL | {theirs.tokens:,} | {theirs.labels:,} "
            f"| {theirs.rate:,.0f} | {pair.trl_warm.rate:,.0f} "
            f"| {theirs.rows} | {theirs.fill:.2%} |",
        ]
    return "\n".join(lines)


def page(made: str, tokenizer: str, repeats: int, workers: int, load: float) -> str:
    versions = (
        f"Python {platform.python_version()}, trl {trl.__version__}, "
        f"transformers {transformers.__version__}, datasets {datasets.__version__}, "
        f"tokenizers {tokenizers.__version__}, {os.cpu_count()} cores "
        f"(load {load:.1f} before the run)"
    )
    return f"""\
# Data preparation, beside TRL's

This page is written by

    python -m benchmarks.data

which needs `pip install shardtune[bench]`. Rows of {LENGTH} tokens; tokenizer: {tokenizer};
processes for each side: {workers}; medians of {repeats} repeats, both sides in turn.
{versions}.

{made}

What is compared:

- *Cold* is everything from the file to packed rows, with empty caches: reading, checking, masking,
  tokenising, packing (ours: the first epoch's). *Warm* is the same again with what the first time
  left on disk: about a tenth of a second of fixed costs on files as small as these (ours is mostly
  the tokenizer's fingerprint), and there the two are close. Speeds vary from run to run, the
  more the busier the machine; tokens, rows and fill don't.
- TRL runs through `SFTTrainer._prepare_dataset`, with `packing=True, packing_strategy="bfd"`. The
  rows are given to it in the form that it wants, in a file; writing that isn't counted.
- *Trained* counts the targets that the loss sees, in the same way for both: a document's first
  token is none. Where TRL has more, it is the line break that the chat template writes after an
  answer: TRL counts it to a completion, we end with the answer's terminator. In chats TRL masks by
  marks in the chat template; it was given the tokenizer's own template with such marks added.
- *Fill* is the share of the rows' places that hold tokens. TRL packs each thousand documents by
  themselves and once for the whole run; we pack an epoch as a whole, and each epoch anew.
- Both keep packed documents apart in the same way, by positions that start again at zero. TRL
  doesn't pad rows but puts those of a batch one after the other, so an unfilled place costs it no
  computation; it has fewer tokens in a batch instead.
- The tokenizers library has threads of its own for a call with many texts. We make such calls, TRL
  does not. `RAYON_NUM_THREADS=1` in front of the command takes them away.
"""


def find_tokenizer(folder: Path) -> tuple[Any, Any, str]:
    """A tokenizer, the same with marks in its chat template, and its name."""
    real = folder.parent / "tokenizers" / "smollm2"
    where, name = (
        (str(real), "SmolLM2's") if real.is_dir() else (resolve("tiny"), "the built-in tiny's")
    )
    plain, marked = AutoTokenizer.from_pretrained(where), AutoTokenizer.from_pretrained(where)
    question = [_turn("user", "?")]
    opening = plain.apply_chat_template(question, tokenize=False).partition("<|im_start|>user")[0]
    marked.chat_template = f"{{%- set opening = {json.dumps(opening)} -%}}{MARKED}"
    talk = [*question, _turn("assistant", "!"), *question, _turn("assistant", "…")]
    for messages in (talk, [_turn("system", "."), *talk]):
        texts = [each.apply_chat_template(messages, tokenize=False) for each in (plain, marked)]
        assert texts[0] == texts[1], "the two chat templates write different texts"
    return plain, marked, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes, the same for both")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()

    load = os.getloadavg()[0]
    tokenizer, marked, name = find_tokenizer(options.data)
    with _folder() as scratch:
        pairs = [
            measure(workload, tokenizer, marked, options.repeats, options.workers)
            for workload in workloads(options.data, scratch)
        ]
    made = table([*pairs, total(pairs)] if len(pairs) > 1 else pairs)
    print(made)
    PAGE.write_text(page(made, name, options.repeats, options.workers, load), "utf-8")
    print(f"written to {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
