"""What `evaluate`, `chat` and `serve` are told to speak to: a run, or any model, still unread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.cli.result_command import open_result
from shardtune.errors import ModelError, Problem

if TYPE_CHECKING:
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.job import Job, ModelSection
    from shardtune.models.model_files import ModelFiles

_NAMED = re.compile(r"(?P<name>[\w.-]+)=(?P<source>.+)", re.DOTALL)


@dataclass(frozen=True)
class ModelSource:
    """A run or a model that a command names, before its weights are read."""

    name: str
    source: str
    section: ModelSection
    job: Job | None = None
    adapter: Path | None = None
    """The folder of the adapter that a run has trained."""
    folder: Path | None = None
    """The run's result: its tokenizer is there, and without an adapter the model."""
    run: RunDir | None = None


def is_run(name: str) -> bool:
    """Whether this is the directory of a run; else it names a model."""
    return (Path(name).expanduser() / "job.yaml").is_file()


def read_source(text: str) -> ModelSource:
    """What `RUN`, `MODEL` or `NAME=RUN` of a command line means."""
    from shardtune.config.job import ModelSection

    named = None if Path(text).exists() else _NAMED.fullmatch(text)
    source = named["source"] if named else text
    if is_run(source):
        found = run_source(source)
    else:
        found = model_source(named_files(ModelSection(name=source)).section)
    return replace(found, name=named["name"]) if named else found


def model_source(section: ModelSection) -> ModelSource:
    """A model that no run has changed."""
    from shardtune.models.catalogue import public_name

    return ModelSource(public_name(section.name), section.name, section)


def run_source(directory: str) -> ModelSource:
    """What a run has trained."""
    from shardtune.config.job import NoAdapter

    path = Path(directory).expanduser()
    run, job = open_result(path)
    whole = isinstance(job.adapter, NoAdapter)
    # A whole model has its new tokens already.
    own = {"name": str(run.result), "revision": None, "add_tokens": (), "quantization": "none"}
    section = job.model.model_copy(update=own) if whole else job.model
    adapter = None if whole else run.result
    return ModelSource(path.resolve().name, directory, section, job, adapter, run.result, run)


def tokenizer_and_stops(source: ModelSource, files: ModelFiles) -> tuple[Any, frozenset[int]]:
    """How it is spoken to, and which tokens end its answers: a run's as they were saved with its
    result, which knows better than its model."""
    from transformers import GenerationConfig

    from shardtune.models.load_result import load_result_tokenizer

    if source.folder is None:
        return files.tokenizer, files.stop_ids
    tokenizer = load_result_tokenizer(str(source.folder), source.section)
    ends = GenerationConfig.from_pretrained(str(source.folder)).eos_token_id
    return tokenizer, frozenset(ends if isinstance(ends, list) else [ends])


def require_own_names(found: Sequence[ModelSource]) -> None:
    """Refuses two models of one name: a request couldn't choose."""
    names = [each.name for each in found]
    problems = [
        Problem(each.source, f"two models are called {each.name!r}", f"call it: NAME={each.source}")
        for place, each in enumerate(found)
        if each.name in names[:place]
    ]
    if problems:
        raise ModelError(problems)


def named_files(section: ModelSection) -> ModelFiles:
    """The files of a model that a command names; where there are none, what may have been meant: a
    run that is misspelt looks like a hub id."""
    from shardtune.checkpoint.near_names import MODEL_MARKS, near_folder
    from shardtune.errors import did_you_mean
    from shardtune.models.catalogue import BUILT_IN
    from shardtune.models.model_files import LOADING_FIX, ModelFiles

    files, name = ModelFiles(section), section.name
    if (Path(name).expanduser() / "adapter_config.json").is_file():
        fact = "is the folder of an adapter, which alone answers nothing"
        fix = "name the run that it comes from, or merge it: shardtune merge RUN OUT"
        raise ModelError(Problem(name, fact, fix))
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
