"""`data`: what a run is trained and judged on, and how rows become documents."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field

from shardtune.config.sections.field_types import LARGEST_COUNT, Auto, Positive
from shardtune.core.job_section import Section

Format = Literal["instruction", "chat", "completion", "pretokenized", "source_target"]


TemplateScalar = str | bool | int | float | None
TemplateValue = TemplateScalar | tuple[TemplateScalar, ...]


class Columns(Section):
    """Which columns of the files hold what. Columns that a format doesn't use are ignored."""

    instruction: str = "instruction"
    """The instruction (format `instruction`)."""
    input: str = "input"
    """Context of the instruction; may be missing or empty (format `instruction`)."""
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
    """Label ids, -100 where not trained; may be missing (format `pretokenized`). For an
    encoder-decoder: the target."""
    source: Auto | str = "auto"
    """What the encoder reads (format `source_target`). `auto` knows common names: `source`,
    `input`, `prompt`, `document`, `article`, `dialogue`, `question`, `inputs`."""
    target: Auto | str = "auto"
    """What the decoder learns to write (format `source_target`). `auto` takes the name that goes
    with the source's: `target`, `output`, `completion`, `summary`, `highlights`, `answer`,
    `targets`."""


class Separator(Section):
    """Splits a text file into documents at each occurrence of a text."""

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
    """Text before each source (format `source_target`), such as T5's `summarize: `."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """How an instruction becomes text: by the tokenizer's chat template, or under plain headings.
    `auto` takes the chat template where the tokenizer has one."""
    documents: Auto | Literal["file", "blank_line", "line"] | Separator = "auto"
    """What a document of a text file is: the whole file, what stands between blank lines or
    separators, or a line. `auto` decides by the file's beginning and prints what it took."""
    overflow: Literal["truncate", "split", "drop"] = "truncate"
    """What happens to a document longer than the sequence: it is truncated, split into several
    documents, or dropped. Counted either way."""

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
    """Whether documents have to end with a stop token. `none` trains a set in which none does, from
    which a model learns to continue, not to stop. Token ids that all fill the sequence are a corpus
    cut into windows, and don't need `stop: none`."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often its rows are trained in an epoch: 0.5 takes half of them (the other half in the
    next epoch), 2 takes each twice."""


class EvalShare(Section):
    """Rows of the training sets that are held out, chosen by a hash of their content: the same ones
    when rows are added or reordered, and never one whose copy is trained."""

    share: Annotated[float, Field(gt=0, lt=1)]
    """The approximate fraction of the rows."""


class DataSection(Section):
    """What the model is trained and evaluated on."""

    train: Annotated[tuple[TrainSource, ...], Field(min_length=1)]
    """The data sets to train on."""
    eval: tuple[Source, ...] | EvalShare = ()
    """Held-out data sets, or `{share: 0.02}` of the training sets; each is reported by its own
    name."""
    sequence_length: Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = 1024
    """The longest row, in tokens; for an encoder-decoder the longest source."""
    target_length: Auto | Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = "auto"
    """The longest target of an encoder-decoder (T5, BART), in tokens; `auto` is as many as
    `sequence_length`. A decoder-only model has source and target in one row."""
    packing: Auto | bool = "auto"
    """Fill each row with several documents, isolated in attention and positions. `auto` does so
    where the model's family isolates them, and else pads one document per row."""
    shuffle: bool = True
    """Shuffle the documents, anew in each epoch; false keeps the files' order."""
    chat_template: str | None = None
    """A chat template that replaces the tokenizer's own, if it has one: a Jinja file, or one of
    chatml, llama3, gemma, phi3, mistral, zephyr, alpaca, vicuna. It is saved with the result, and
    the token that ends its answers is a stop token."""
    chat_template_kwargs: dict[str, TemplateValue] = Field(default_factory=dict)
    """Values for variables of the chat template, such as `{enable_thinking: false}`. They become
    its defaults, which are saved with the result; a request to a server may set others."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What to do when rows can't be read: list them all and stop, or list them and go on."""
    control_tokens: Literal["refuse", "text", "token"] = "refuse"
    """What to do with a row whose own text contains a control token of the tokenizer (`<|im_end|>`,
    `</s>`): refuse it as a bad row, tokenize it as ordinary text, or as that token. Tokens that the
    chat template writes, the job's `add_tokens` and an end-of-text token at the end of a text are
    exempt."""
    workers: Auto | Positive = "auto"
    """Processes that tokenize."""

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
