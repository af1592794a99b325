"""Opens what `evaluate` speaks to: the result of a run, or any model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from shardtune.cli.result_command import open_result
from shardtune.errors import ModelError, Problem

if TYPE_CHECKING:
    from shardtune.config.job import ModelSection
    from shardtune.core.setup import Precision
    from shardtune.models.model_files import ModelFiles


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


def is_run(name: str) -> bool:
    """Whether this is the directory of a run; else it names a model."""
    return (Path(name).expanduser() / "job.yaml").is_file()


def named_files(section: ModelSection) -> ModelFiles:
    """The files of a model that a command names; where there are none, what may have been meant: a
    run that is misspelt looks like a hub id."""
    from shardtune.checkpoint.near_names import MODEL_MARKS, near_folder
    from shardtune.errors import did_you_mean
    from shardtune.models.catalogue import BUILT_IN
    from shardtune.models.model_files import LOADING_FIX, ModelFiles

    files, name = ModelFiles(section), section.name
    fact = "is neither a run nor a folder here"
    run = near_folder(name)
    if run and not _is_here(name) and Path(run).parent == Path(name).parent:
        raise ModelError(Problem(name, fact, f"did you mean {run}?"))  # the hub isn't asked
    try:
        files.kind  # noqa: B018  reads config.json, here or from the hub
    except ModelError as error:
        if _is_here(name):
            raise
        near = near_folder(name, MODEL_MARKS) or did_you_mean(name, BUILT_IN)
        fix = f"did you mean {near}?" if near else f"name a run's directory, or {LOADING_FIX[5:]}"
        unreachable = f"{fact}, and no hub id that this machine can reach"
        raise ModelError(Problem(name, unreachable, fix)) from error
    return files


def _is_here(name: str) -> bool:
    from shardtune.models.catalogue import BUILT_IN

    return name in BUILT_IN or Path(name).expanduser().exists()


def open_model(
    name: str, *, precision: Precision | None = None, device: str | None = None
) -> OpenedModel:
    """Loads RUN or MODEL. A run computes as it was trained, a model in fp32 on a CPU and in what
    its files are written in on a GPU, unless `precision` is given."""
    import torch

    from shardtune.config.job import ModelSection

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if is_run(name):
        return _open_run(Path(name).expanduser(), precision, device)
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


def _open_run(directory: Path, precision: Precision | None, device: str) -> OpenedModel:
    from shardtune.config.job import NoAdapter
    from shardtune.data.formats import learnt_plain
    from shardtune.kernels.measure_matmul import widen_slow_products
    from shardtune.models.context_window import require_decoder
    from shardtune.models.load_result import load_result, load_result_tokenizer
    from shardtune.models.model_files import ModelFiles

    if device == "cpu":
        widen_slow_products()
    run, job = open_result(directory)
    files = ModelFiles(job.model)
    require_decoder(files.config)
    precision = precision or job.train.compute_precision
    model = load_result(str(run.result), files, precision)
    tokenizer = load_result_tokenizer(str(run.result), job.model)
    return OpenedModel(
        str(directory),
        model.to(device),
        tokenizer,
        frozenset(model.generation_config.eos_token_id),  # as `save_result` wrote them
        device,
        precision,
        before=job.model,
        adapted=not isinstance(job.adapter, NoAdapter),
        plain=learnt_plain(job.data, tokenizer),
    )
