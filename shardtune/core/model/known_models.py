"""The catalogue: shapes of published models by name, so that planning needs no download."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from shardtune.core.model.architectures import read_shape
from shardtune.core.model.shape import ModelShape
from shardtune.errors import ModelError, Problem, did_you_mean

MODEL_NAME = "model.name"
"""Where a job says which model it is about."""


@dataclass(frozen=True)
class KnownModel:
    """A published model: what its config says, and how many parameters it is said to have."""

    name: str
    aliases: tuple[str, ...]
    """Other models of exactly this shape, and shorter names."""
    config: dict[str, Any]
    parameters: int
    source: str
    """Where the count comes from."""

    @property
    def shape(self) -> ModelShape:
        return read_shape(self.config, self.name)


def known_model(name: str) -> ModelShape:
    """The shape of a model by its hub id or short name, in upper or lower case.

    A model that was tuned to chat has the shape of the one that it was made from.
    """
    return find_model(name).shape


def find_model(name: str) -> KnownModel:
    """The entry of the catalogue; ModelError says what is near."""
    found = _find(name)
    if found is None:
        near = did_you_mean(_plain(name), _names())
        fix = f"did you mean {_names()[near].name}? " if near else ""
        fix += "name a folder or a config.json for any other model"
        raise ModelError(Problem(MODEL_NAME, f"{name!r} is not in the catalogue of models", fix))
    return found


def copied_model(name: str) -> str | None:
    """The model of the catalogue that has this name behind the slash, whoever published a copy."""
    found = _names().get(_untuned(name).rpartition("/")[2])
    return found.name if found else None


def hub_id(name: str) -> str:
    """The full name of a model of the catalogue. One that was tuned keeps the word that says so:
    its weights are others."""
    if (found := _names().get(_plain(name))) is not None:
        ids = (each for each in found.aliases if _plain(each).endswith(f"/{_plain(name)}"))
        return next(ids, found.name)  # a model of the same shape has weights of its own, too
    organisation, slash, _ = find_model(name).name.rpartition("/")
    return f"{organisation}{slash}{name}"


def is_known(name: str) -> bool:
    """Whether the catalogue has the model."""
    return _find(name) is not None


@cache
def catalogue() -> tuple[KnownModel, ...]:
    """Every model that we know, in the order of the file."""
    text = files("shardtune.core.model").joinpath("data/models.json").read_text("utf-8")
    return tuple(
        KnownModel(**{**entry, "aliases": tuple(entry["aliases"])})
        for entry in json.loads(text)["models"]
    )


def _find(name: str) -> KnownModel | None:
    return _names().get(_plain(name)) or _names().get(_untuned(name))


@cache
def _names() -> dict[str, KnownModel]:
    """By hub id and by what stands behind its slash, each with and without a word for tuning."""
    found: dict[str, KnownModel] = {}
    for spell in (_plain, _untuned):
        for model in catalogue():
            for name in (model.name, *model.aliases):
                found.setdefault(spell(name), model)
                found.setdefault(spell(name).rpartition("/")[2], model)
    return found


_TUNED = re.compile(r"([-_](instruct|chat|it|pt|base|hf))+$")


def _plain(name: str) -> str:
    return name.strip().lower()


def _untuned(name: str) -> str:
    return _TUNED.sub("", _plain(name))
