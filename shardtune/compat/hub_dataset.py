"""Data sets of the hub, without waiting for one that this machine can't reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.core.host.hub_address import hub_is_reachable, not_in_cache

if TYPE_CHECKING:
    import datasets


def load_dataset(path: str, config: str | None, split: str) -> datasets.Dataset:
    """A split of a data set of the hub, or of a folder in its form. Where the hub's name can't be
    looked up, only the cache is asked: `datasets` would try six times, in 24 seconds."""
    import datasets

    if Path(path).is_dir() or hub_is_reachable():
        return datasets.load_dataset(path, name=config, split=split)
    with _offline():
        try:
            return datasets.load_dataset(path, name=config, split=split)
        except ConnectionError as error:
            raise ConnectionError(not_in_cache()) from error


@contextmanager
def _offline() -> Iterator[None]:
    """`load_dataset` has no argument that keeps it from asking."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
