"""A model's weights on disk: safetensors files, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.config.job import ModelSection
from shardtune.core.host.hub_address import hub_is_reachable
from shardtune.core.model.known_models import MODEL_NAME
from shardtune.errors import ModelError, Problem

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Where each tensor of a model lies. Nothing is read before it is asked for."""

    file_of: dict[str, Path]

    @classmethod
    def find(cls, source: str, section: ModelSection) -> WeightFiles:
        """The files of `section`, from its folder or hub id `source`; no more than is needed."""
        index = fetch_file(source, section, INDEX)
        if index is not None:
            shards = read_index(index)
            paths = {
                shard: fetch_file(source, section, shard) for shard in sorted(set(shards.values()))
            }
            missing = sorted(shard for shard, path in paths.items() if path is None)
            if missing:
                fact = f"{INDEX} of {section.name!r} names files that are not there: "
                fix = "fetch the model again"
                raise ModelError(Problem(MODEL_NAME, fact + ", ".join(missing), fix))
            found = {shard: path for shard, path in paths.items() if path is not None}
            held = {shard: set(_names(path)) for shard, path in found.items()}
            lacking = sorted(name for name, shard in shards.items() if name not in held[shard])
            if lacking:
                fact = f"{INDEX} of {section.name!r} names {len(lacking)} tensors that their files "
                fact += f"lack, {lacking[0]} in {shards[lacking[0]]} among them"
                raise ModelError(Problem(MODEL_NAME, fact, "fetch the model again"))
            return cls({name: found[shard] for name, shard in shards.items()})
        single = fetch_file(source, section, SINGLE)
        if single is None:
            fact = f"{section.name!r} has neither {SINGLE} nor {INDEX}"
            fix = "convert its weights to safetensors; other formats can run code when read"
            raise ModelError(Problem(MODEL_NAME, fact, fix))
        return cls(dict.fromkeys(_names(single), single))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, as it lies on disk.

        What comes out is a view of the mapped file, alive until the next is asked for: copy it.
        The files are unmapped at the end, so that their pages don't count as this process's memory.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_of[name], []).append(name)
        for path, wanted in by_file.items():
            with _opened(path) as file:
                for name in wanted:
                    yield name, file.get_tensor(name)


def read_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor. Files are in the model's folder: a name that leads elsewhere
    would have us open what the model's author has no business with."""
    try:
        shards: dict[str, str] = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(shards.values()))
        outside = [name for name in names if name in ("", "..") or Path(name).name != name]
    except (ValueError, KeyError, TypeError) as error:
        fact = f"{path} can't be read: {error}"
        raise ModelError(Problem(MODEL_NAME, fact, "fetch the model again")) from None
    if outside:
        fact = f"{path} names files outside of its folder: {', '.join(outside)}"
        raise ModelError(Problem(MODEL_NAME, fact, "don't use this model: its index is forged"))
    return shards


@dataclass(frozen=True)
class NoFiles:
    """Shapes without weights, for whoever wants to know only what a model would take."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the right shapes, with whatever lies in memory."""
        import torch

        for name in names:
            yield name, torch.empty(self.shapes[name], dtype=torch.bfloat16)


def _names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def _opened(path: Path) -> Any:
    """The file; its header has been read, and fits its size."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        fact = f"{path} is no sound safetensors file: {error}"
        raise ModelError(Problem(MODEL_NAME, fact, "fetch or write the model again")) from None


def fetch_file(source: str, section: ModelSection, file: str) -> Path | None:
    """The local path of one of the model's files, or None where the model has no such file."""
    from transformers.utils import cached_file

    found = cached_file(
        source,
        file,
        revision=section.revision,
        local_files_only=not Path(source).is_dir() and not hub_is_reachable(),
        _raise_exceptions_for_missing_entries=False,
    )
    return Path(found) if found is not None else None
