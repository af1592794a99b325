"""The shape of the model that a job names, without its weights and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardtune.config.job import ModelSection
from shardtune.core.files.regular_file import read_regular
from shardtune.core.host.hub_address import hub_is_reachable, not_in_cache
from shardtune.core.model.architectures import read_shape
from shardtune.core.model.kind import ModelKind, kind_of
from shardtune.core.model.known_models import (
    MODEL_NAME,
    copied_model,
    find_model,
    is_known,
)
from shardtune.core.model.shape import ModelShape
from shardtune.core.model.tiny_config import TINY_CONFIG
from shardtune.errors import ModelError, Problem

LARGEST_CONFIG = 64 << 20
"""Bytes of a config.json; none is near it."""
SHAPED_LIKE = {"smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M"}
"""Names of our own, and the published model of the same shape."""


def shape_of(section: ModelSection) -> ModelShape:
    """The model's shape; ModelError if it can't be told."""
    return read_shape(config_of(section), section.name)


def kind_if_known(section: ModelSection) -> ModelKind:
    """The model's kind; `decoder`, as most are, where its config.json can't be had."""
    try:
        return kind_of(config_of(section))
    except ModelError:
        return "decoder"


def config_of(section: ModelSection) -> dict[str, Any]:
    """From a folder or config.json, the catalogue, or at last the hub; weights are never opened."""
    path = Path(section.name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.name.endswith(".json") and file.is_file():
        return _read(file)
    if section.name == "tiny":
        return TINY_CONFIG
    name = SHAPED_LIKE.get(section.name, section.name)
    if "/" not in name or (section.revision is None and is_known(name)):
        return find_model(name).config
    return _read(_from_hub(section))


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_regular(file, LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        fix = "give a folder that holds a model's config.json"
        raise ModelError(Problem(MODEL_NAME, f"{file} can't be read: {error}", fix)) from None
    if not isinstance(config, dict):
        raise ModelError(
            Problem(MODEL_NAME, f"{file} holds no JSON object", "give a model's config")
        )
    return config


def _from_hub(section: ModelSection) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    reachable = hub_is_reachable()
    try:
        return Path(
            hf_hub_download(
                section.name,
                "config.json",
                revision=section.revision,
                local_files_only=not reachable,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if not reachable and isinstance(error, LocalEntryNotFoundError):
            reason = not_in_cache()
        fact = f"{section.name!r} is neither in the catalogue nor to be had from the hub: {reason}"
        fix = "download its config.json, and name that file or its folder"
        if (same := copied_model(section.name)) is not None:
            fix = f"the catalogue has {same}; or {fix}"
        raise ModelError(Problem(MODEL_NAME, fact, fix)) from None
