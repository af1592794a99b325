"""`data`: what a run is trained and judged on, and how rows become documents."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field

from shardtune.config.sections.field_types import LARGEST_COUNT, Auto, Positive
from shardtune.core.job_section import Section

Format = Literal["instruction", "chat", "completion", "pretokenized", "source_target"]


class Columns(Section):
    """Which columns of the files hold what. What a format doesn't use is left alone."""

    instruction: str = "instruction"
    """What is asked (format `instruction`)."""
    input: str = "input"
    """Further material to the question; may be missing or empty (format `instruction`)."""
    output: str = "output"
    """The answer to learn (format `instruction`)."""
    system: str = "system"
    """A system prompt; may be missing (formats `instruction` and `chat`)."""
    messages: Auto | str = "auto"
    """The turns: `messages` or `conversations`, whichever is there (format `chat`)."""
    text: str = "text"
    """The text to learn (format `completion`)."""
    input_ids: str = "input_ids"
    """Token ids (format `pretokenized`)."""
    labels: str = "labels"
    """Target ids, -100 where not trained; may be missing (format `pretokenized`). For a model with
    an encoder: what its decoder has to write."""
    source: Auto | str = "auto"
    """What the encoder reads (format `source_target`). `auto` knows common names: `source`,
    `input`, `prompt`, `document`, `article`, `dialogue`, `question`, `inputs`."""
    target: Auto | str = "auto"
    """What the decoder has to write (format `source_target`). `auto` takes the name that goes with
    the source's: `target`, `output`, `completion`, `summary`, `highlights`, `answer`,
    `targets`."""


class Separator(Section):
    """Documents of a text file are what stands between occurrences of a text."""

    separator: Annotated[str, Field(min_length=1)]
    """Such as `"\\n---\\n"`; it is no part of a document."""


class Source(Section):
    """One data set: a file, a saved `datasets` folder, or a hub id."""

    path: Annotated[str, Field(min_length=1)]
    """JSONL, JSON, CSV, Parquet, Arrow or text file (gzip, bz2 and zstd are unpacked), several by a
    pattern (`data/*.txt`) or in a folder, a folder saved by `datasets`, or a hub id."""
    format: Format
    """How a row is read."""
    name: Auto | Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "auto"
    """What reports call it; `auto` takes the file's name."""
    config: str | None = None
    """Which configuration of a hub id that has several (`load_dataset`'s `name`)."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Which split of a hub id or of a saved folder with several, or a slice: `train[:1%]`."""
    columns: Columns = Columns()
    """Which columns hold what, where they are called otherwise."""
    prefix: str = ""
    """Text before each source (format `source_target`): `summarize: `, for T5 knows its tasks by
    one."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """How an instruction becomes text: the tokenizer's chat template, or plain headings.
    `auto` takes the chat template where the tokenizer has one."""
    documents: Auto | Literal["file", "blank_line", "line"] | Separator = "auto"
    """What a document of a text file is: the whole file, what stands between blank lines or between
    occurrences of a separator, or a line. `auto` looks at the file, and what it takes is told."""
    overflow: Literal["truncate", "split", "drop"] = "truncate"
    """What becomes of a document longer than the sequence: its end is cut off, it is cut into
    several documents, or it is left out. Reported either way."""

    @property
    def label(self) -> str:
        """Its name, or what `auto` stands for: the file's name, in letters that a name may have."""
        if self.name != "auto":
            return self.name
        stem = re.sub(r"[^A-Za-z0-9_.-]", "-", PurePath(self.path).stem)
        return stem.lstrip("_.-")[:64] or "data"


class TrainSource(Source):
    """A data set to train on."""

    stop: Literal["required", "none"] = "required"
    """Whether documents have to end with a stop token. `none` trains a set in which none does: a
    model learns from it how to go on, not when to end. Rows of token ids that fill the sequence are
    a corpus cut into windows, and need no such word."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often its rows are seen in an epoch: 0.5 takes half of them (the other half the next
    time), 2 takes each twice."""


class EvalShare(Section):
    """Rows of the training sets that are held out, drawn by their content: the same ones when rows
    are added or reordered, and never one whose copy is trained."""

    share: Annotated[float, Field(gt=0, lt=1)]
    """About which part of the rows."""


class DataSection(Section):
    """What the model is trained and judged on."""

    train: Annotated[tuple[TrainSource, ...], Field(min_length=1)]
    """The data sets to train on."""
    eval: tuple[Source, ...] | EvalShare = ()
    """Held-out data sets, or `{share: 0.02}` of the training sets; each is reported by its own
    name."""
    sequence_length: Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = 1024
    """The longest row, in tokens; the longest source of a model with an encoder."""
    target_length: Auto | Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = "auto"
    """The longest target of a model with an encoder (T5, BART), in tokens; `auto` is as many as
    `sequence_length`. A decoder alone has source and target in one row."""
    packing: Auto | bool = "auto"
    """Fill each row with several documents, kept apart in attention and positions. `auto` does so
    where the model's family keeps them apart, and else gives each document a row of its own."""
    shuffle: bool = True
    """Draw the documents in a random order, another each epoch; false keeps the files' order."""
    chat_template: str | None = None
    """A chat template for a tokenizer that has none, or in the place of its own: a Jinja file, or
    one of chatml, llama3, gemma, phi3, mistral, zephyr, alpaca, vicuna. It is saved with the
    result, and the token that ends its answers is a stop token."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What to do when rows can't be read: list them all and stop, or list them and go on."""
    control_tokens: Literal["refuse", "text", "token"] = "refuse"
    """What to do with a row whose own text holds a control token of the tokenizer (`<|im_end|>`,
    `</s>`): refuse it as a bad row, read it as ordinary text, or as that token. What the chat
    template writes, the job's `add_tokens` and an end-of-text token at the end of a text are not
    meant."""
    workers: Auto | Positive = "auto"
    """Processes that tokenise."""

    @property
    def eval_sources(self) -> tuple[Source, ...]:
        """The held-out data sets that have files of their own."""
        return () if isinstance(self.eval, EvalShare) else self.eval

    @property
    def longest_target(self) -> int:
        """`target_length`, or what `auto` stands for."""
        return self.sequence_length if self.target_length == "auto" else self.target_length

    @property
    def packs(self) -> bool:
        """Whether rows are packed; `auto` that nobody has resolved packs, and is checked."""
        return self.packing is not False
