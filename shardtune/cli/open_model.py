"""Opens what `evaluate` speaks to: the result of a run, or any model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from shardtune.cli.model_source import (
    ModelSource,
    is_run,
    named_files,
    run_source,
    tokenizer_and_stops,
)

if TYPE_CHECKING:
    from shardtune.config.job import ModelSection
    from shardtune.core.setup import Precision


@dataclass(frozen=True)
class OpenedModel:
    """A model on its device, with all that speaking to it takes."""

    name: str
    """As the person named it."""
    model: Any
    tokenizer: Any
    stop_ids: frozenset[int]
    """The tokens that end an answer, as the result or the model says."""
    device: str
    precision: Precision = "fp32"
    """What it computes in."""
    before: ModelSection | None = None
    """Of a run: the model that it began with."""
    adapted: bool = False
    """Whether it is an adapter on that model, so that both are loaded."""
    plain: bool = False
    """Whether it learnt its instructions under plain headings, without a chat template."""

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """The model without its adapter, meanwhile."""
        with self.model.disable_adapter() if self.adapted else nullcontext():
            yield


def open_model(
    name: str, *, precision: Precision | None = None, device: str | None = None
) -> OpenedModel:
    """Loads RUN or MODEL. A run computes as it was trained, a model in fp32 on a CPU and in what
    its files are written in on a GPU, unless `precision` is given."""
    import torch

    from shardtune.config.job import ModelSection

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if is_run(name):
        return _open_run(run_source(name), precision, device)
    return open_section(ModelSection(name=name), precision, device)


def open_section(section: ModelSection, precision: Precision | None, device: str) -> OpenedModel:
    """Loads a model that no run has changed."""
    from shardtune.core.setup import Precision
    from shardtune.models.context_window import require_decoder
    from shardtune.models.load import COMPUTE_DTYPES, load_base

    files = named_files(section)
    require_decoder(files.config)
    if precision is None:
        own: list[Precision] = [p for p in get_args(Precision) if COMPUTE_DTYPES[p] == files.dtype]
        precision = "fp32" if device == "cpu" else (*own, "bf16")[0]
    model = load_base(files, precision).to(device)
    return OpenedModel(section.name, model, files.tokenizer, files.stop_ids, device, precision)


def _open_run(source: ModelSource, precision: Precision | None, device: str) -> OpenedModel:
    from shardtune.data.formats import learnt_plain
    from shardtune.kernels.measure_matmul import widen_slow_products
    from shardtune.models.context_window import require_decoder
    from shardtune.models.load_result import load_result
    from shardtune.models.model_files import ModelFiles

    if device == "cpu":
        widen_slow_products()
    job = source.job
    assert job is not None
    files = ModelFiles(job.model)
    require_decoder(files.config)
    precision = precision or job.train.compute_precision
    model = load_result(str(source.folder), files, precision).to(device)
    tokenizer, stops = tokenizer_and_stops(source, files)
    return OpenedModel(
        str(Path(source.source).expanduser()),
        model,
        tokenizer,
        stops,
        device,
        precision,
        before=job.model,
        adapted=source.adapter is not None,
        plain=learnt_plain(job.data, tokenizer),
    )
