"""A row of `benchmarks.gpu` through the command `shardtune train`: the weights as files, the tokens
as a data set, a job with nothing in it that a person wouldn't write, and the run's own metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_cases import TINY_BATCH, Case
from benchmarks.gpu_data import Batch, batches, config_of, flops
from shardtune.core.files.yaml_document import dump_document
from shardtune.launch.torch_env import torch_environment

STOP = 2  # the token that ends a document, by the tokenizer below
SHOWN = 2_000  # characters of a failed run's output


def measure_train(case: Case, *, warm: int, steps: int, device: str, tiny: bool) -> dict[str, Any]:
    """The figures of the table, of the steps after `warm` ones."""
    config = config_of(case, tiny=tiny)
    data = batches(case, config.vocab_size, tiny=tiny)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = [sys.executable, "-m", "benchmarks.gpu_run", case.name]
        writer += ["--write", str(folder / "model"), *(["--tiny"] if tiny else [])]
        subprocess.run(writer, check=True)
        write_tokenizer(folder / "model", config.vocab_size)
        write_rows(folder / "rows.jsonl", data, steps=warm + steps)
        job = train_job(case, folder, steps=warm + steps, tiny=tiny)
        (folder / "job.yaml").write_text(dump_document(job), encoding="utf-8")
        _run(folder)
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    done = [line for line in map(json.loads, lines) if line["kind"] == "step"]
    timed = done[warm:]
    kind = "labels" if case.packed else "tokens"
    rates = [line[kind] / line["seconds"] for line in timed]
    work = median(flops(case, config, batch) / batch.ours.tokens for batch in data)
    return {
        "seconds": median(line["seconds"] for line in timed),
        "tokens_per_second": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "flops_per_second": work * median(line["tokens"] / line["seconds"] for line in timed),
        "allocated_gib": done[-1]["memory_gib"] if device == "cuda" else None,
        "reserved_gib": None,
        "first_step_seconds": None,  # what compiles is the preflight before it
        "losses": [line["loss"] for line in done],
        "steps": steps,
    }


def train_job(case: Case, folder: Path, *, steps: int, tiny: bool) -> dict[str, Any]:
    """Model, adapter, data and how much of it; everything else is what we choose by ourselves."""
    rows, length = TINY_BATCH if tiny else (case.rows, case.length)
    model = {"name": str(folder / "model")} | (
        {"quantization": "nf4"} if case.base == "nf4" else {}
    )
    source = {"path": str(folder / "rows.jsonl"), "format": "pretokenized"}
    return {
        "model": model,
        "adapter": case.adapter,
        "data": {"train": [source], "sequence_length": length},
        "train": {"steps": steps, "global_batch": rows},
        "save": {"directory": str(folder / "run")},
    }


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One with a word for each token: rows are token ids already, and have to be in range."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary)}
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="w0", bos_token="w1", eos_token=f"w{STOP}", pad_token="w3"
    ).save_pretrained(folder)


def write_rows(file: Path, data: list[Batch], *, steps: int) -> None:
    """Documents for so many steps, the table's own over and over, each with a stop token at its
    end: a run refuses a set that has none."""
    with file.open("w", encoding="utf-8") as out:
        for number in range(steps + 1):  # one more: a shuffled pass needn't pack as tightly
            for tokens in documents_of(data[number % len(data)]):
                out.write(json.dumps({"input_ids": [*tokens[:-1], STOP]}) + "\n")


def documents_of(batch: Batch) -> Iterable[list[int]]:
    """The token ids of each."""
    if batch.documents:
        return (document.tolist() for document in batch.documents)
    return (row.tolist() for row in batch.ours.input_ids)


def _run(folder: Path) -> None:
    """With the compiler's cache of every run, but with no data or profile of an earlier one."""
    command = [sys.executable, "-m", "shardtune", "train", str(folder / "job.yaml")]
    apart = torch_environment(os.environ) | {"XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        command,
        env=os.environ | apart,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout[-SHOWN:], file=sys.stderr, flush=True)
    if done.returncode:
        raise SystemExit(f"`shardtune train` ended with {done.returncode}")
