"""What a first job follows from: a look at its model and its data, and lengths and counts of a run
that suit the two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.core.units import in_units
from shardtune.errors import ModelError

if TYPE_CHECKING:
    from shardtune.core.model.kind import ModelKind
    from shardtune.core.model.shape import ModelShape
    from shardtune.data.recognise import RecognisedFormat, SampledSource, SampleLengths

FULL_FINE_TUNE = 100_000_000  # parameters up to which all weights are trained
ROUND_LENGTH = 64  # a sequence length is a multiple of this
COMMON_LENGTH = 2048  # tokens up to which the longest row decides the sequence length
UNMEASURED_LENGTH = 1024  # tokens where no row can be measured
LONGEST_SEQUENCE = 8192  # tokens that a first job takes at most, whatever the context
FEW_ROWS = 10_000  # rows below which a set is seen several times
LARGEST_BATCH, SMALLEST_BATCH = 16, 4
LEAST_STEPS = 8  # of an epoch, where a smaller batch gives as many
PLAIN_TEMPLATE = "zephyr"  # needs no tokens of its own


@dataclass(frozen=True)
class StarterModel:
    """What a model's config.json says."""

    name: str
    config: dict[str, Any]
    shape: ModelShape | None
    """None for a family that the planner doesn't know."""
    kind: ModelKind

    @property
    def context(self) -> int:
        """Its longest sequence, in tokens; 0 where config.json names none."""
        if self.shape is not None:
            return self.shape.max_positions
        inner = self.config.get("text_config") or self.config
        return int(inner.get("max_position_embeddings") or 0)

    @property
    def quantized(self) -> str:
        """How its files are quantized; empty where they aren't."""
        found = self.config.get("quantization_config")
        return str(found.get("quant_method", "quantized")) if isinstance(found, dict) else ""

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained: the model is large, of unknown size, or quantized."""
        small = self.shape is not None and self.shape.parameters <= FULL_FINE_TUNE
        return bool(self.quantized) or not small

    @property
    def packs(self) -> bool:
        """Whether `data.packing: auto` packs its rows."""
        from shardtune.core.model.family_support import support_of

        support = support_of(self.config)
        return self.kind == "decoder" and support is not None and not support.mixes_documents

    def __str__(self) -> str:
        kind = "an encoder and a decoder" if self.kind == "encoder_decoder" else "a decoder"
        words = [str(self.config.get("model_type", "of an unnamed family")), kind]
        if self.shape is not None:
            words.append(f"{_count(self.shape.parameters)} parameters")
        words.append(f"context {self.context:,} tokens" if self.context else "no context length")
        words.append(f"files quantized ({self.quantized})" if self.quantized else "not quantized")
        return ", ".join(words)


@dataclass(frozen=True)
class StarterData:
    """What the data set holds."""

    source: SampledSource
    found: RecognisedFormat
    lengths: SampleLengths | None
    """None where the tokenizer can't be had."""
    chat_template: str = ""
    """One for a tokenizer that has none and needs one."""

    @property
    def label(self) -> str:
        """What reports call it."""
        from shardtune.config.job import TrainSource

        return TrainSource(path=self.source.path, format=self.found.format).label


def look_at_model(name: str) -> StarterModel:
    """Reads config.json; no weights."""
    from shardtune.config.job import ModelSection
    from shardtune.config.model_config import config_of
    from shardtune.core.model.architectures import read_shape
    from shardtune.core.model.kind import kind_of, require_trained_family
    from shardtune.models.catalogue import BUILT_IN, resolve

    if name not in BUILT_IN:
        resolve(name)  # says what is wrong with a name; a built-in one would be fetched
    config = config_of(ModelSection(name=name))
    require_trained_family(config, name)
    try:
        shape = read_shape(config, name)
    except ModelError:
        shape = None
    return StarterModel(name, config, shape, kind_of(config))


def look_at_data(model: StarterModel, path: str) -> StarterData:
    """Recognises the format, and measures rows with the model's tokenizer where there is one."""
    from shardtune.config.job import Columns, ModelSection, TrainSource
    from shardtune.data.recognise import measure_lengths, recognise, sample_source
    from shardtune.models.model_files import ModelFiles
    from shardtune.models.set_chat_template import set_chat_template

    source = sample_source(path)
    found = recognise(source, model.kind)
    files = ModelFiles(ModelSection(name=model.name))
    try:
        tokenizer = files.tokenizer
    except ModelError:
        if Path(model.name).expanduser().is_dir():
            raise  # what a folder lacks, no network brings
        return StarterData(source, found, None)
    template = ""
    if found.format == "chat" and not getattr(tokenizer, "chat_template", None):
        template = _fitting_template(tokenizer.get_vocab())
        set_chat_template(tokenizer, template)
    setting = TrainSource(path=path, format=found.format, columns=Columns(**found.columns))
    lengths = measure_lengths(source, setting, tokenizer, files.stop_ids, model.kind)
    return StarterData(source, found, lengths, template)


def _fitting_template(vocabulary: dict[str, int]) -> str:
    """The chat template whose tokens the vocabulary has; else one that needs none."""
    from shardtune.core.model.chat_templates import TEMPLATE_TOKENS

    fitting = (
        name
        for name, tokens in TEMPLATE_TOKENS.items()
        if tokens and all(token in vocabulary for token in tokens)
    )
    return next(fitting, PLAIN_TEMPLATE)


@dataclass(frozen=True)
class RunSize:
    """Lengths and counts of the run."""

    sequence_length: int
    target_length: int | None
    splits: bool
    """Whether texts are longer than the sequence."""
    stopless: bool
    """Whether token ids never end with a stop token."""
    epochs: int
    global_batch: int
    save_every: int
    why: str
    """How many steps that makes, in words."""

    @staticmethod
    def of(model: StarterModel, data: StarterData, ranks: int) -> RunSize:
        """What suits the rows, on so many ranks."""
        rows, found, format = data.source.rows, data.lengths, data.found.format
        sequence = min(model.context or UNMEASURED_LENGTH, UNMEASURED_LENGTH)
        target, splits, stopless, batch_rows = None, False, False, rows
        if found is not None:
            sequence = _length(found.lengths, model.context)
            longest = int(found.lengths.max())
            if found.targets is not None:
                target = _length(found.targets, model.context)
            elif format == "pretokenized":
                windows = found.lengths.min() == longest and longest <= (model.context or longest)
                sequence = max(8, longest) if windows else sequence
                stopless = not (found.stopped or windows)
            text = format in ("completion", "pretokenized")
            splits = text and target is None and longest > sequence
            if model.packs:
                batch_rows = math.ceil(rows * float(found.lengths.mean()) / sequence)
        epochs = 3 if rows < FEW_ROWS and format != "completion" else 1
        batch = LARGEST_BATCH
        while batch > SMALLEST_BATCH and batch_rows < LEAST_STEPS * batch:
            batch //= 2
        batch = -(-batch // ranks) * ranks  # each rank has as many rows
        steps = max(1, round(epochs * batch_rows / batch))
        packed = f" ({batch_rows:,} once they are packed)" if batch_rows != rows else ""
        times = "once" if epochs == 1 else f"{epochs} times"
        why = f"{rows:,} rows{packed} are seen {times}: about {steps:,} steps."
        every = steps // 5 if steps >= 10 else 0
        return RunSize(sequence, target, splits, stopless, epochs, batch, every, why)


def _length(lengths: Any, context: int) -> int:
    """A sequence length for rows like these: the longest, or where that is much, nearly all."""
    import numpy as np

    length = _up(int(lengths.max()))
    if length > COMMON_LENGTH:
        length = max(COMMON_LENGTH, _up(math.ceil(np.percentile(lengths, 95))))
    return min(length, LONGEST_SEQUENCE, context or length)


def _up(length: int) -> int:
    return -(-length // ROUND_LENGTH) * ROUND_LENGTH


def _count(number: int) -> str:
    """1.2 billion, 135 million."""
    words = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (10**3, "thousand"))
    return in_units(number, words)
