"""Finds what a data set's path means: a file, a folder, or a data set on the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.data.data_file import ENDINGS, FILE_KINDS, OpenedSource, open_data_file, scan
from shardtune.data.open_file import ending
from shardtune.data.readers import SavedRows
from shardtune.errors import DataError, Problem, did_you_mean

if TYPE_CHECKING:
    import datasets

    from shardtune.config.job import Source

PART_ROWS = 10_000  # rows of a part of a table

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def open_source(source: Source) -> OpenedSource:
    """Finds the source; raises DataError if it is neither here nor on the hub."""
    path = Path(source.path).expanduser()
    try:
        if path.is_file():
            return open_data_file(source, path)
        if path.is_dir():
            return _open_folder(source, path)
    except OSError as error:
        fact, fix = (
            f"can't be read: {error.strerror or error}",
            "correct the path or its permissions",
        )
        if error.strerror is None:  # of a decompressor
            fix = "fetch or write the file again"
        raise DataError(Problem(source.path, fact, fix)) from error
    if _looks_like_a_file(path, source.path):
        raise DataError(_missing(path, source.path))
    return _open_hub(source)


def _open_folder(source: Source, path: Path) -> OpenedSource:
    import datasets

    if (path / "dataset_dict.json").is_file():
        names = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        if source.split not in names:
            raise DataError(_no_split(source, names))
        path = path / source.split
    elif not (path / "state.json").is_file():
        fact = "is a folder that `datasets` did not save"
        fix = "name a file in it, or save the data set with save_to_disk"
        raise DataError(Problem(source.path, fact, fix))
    loaded = _with_library(source, lambda: datasets.load_from_disk(str(path)))
    digest = hashlib.sha256()
    size = 0
    for file in sorted(path.rglob("*")):
        if file.is_file():
            scanned = scan(file)
            digest.update(f"{file.relative_to(path)} {scanned.digest}\n".encode())
            size += scanned.size
    return _open_dataset(source, loaded, digest.hexdigest(), size)


def _open_hub(source: Source) -> OpenedSource:
    import datasets

    if _HUB_ID.fullmatch(source.path) is None:
        fact = "is neither a file here nor a hub id"
        raise DataError(Problem(source.path, fact, f"name a {FILE_KINDS} file, or a hub id"))
    loaded = _with_library(source, lambda: datasets.load_dataset(source.path, split=source.split))
    # The library derives the fingerprint from the revision and the files of the split.
    digest = f"{loaded._fingerprint} {loaded.info.download_checksums} {len(loaded)}"
    size = int(loaded.data.nbytes)
    return _open_dataset(source, loaded, hashlib.sha256(digest.encode()).hexdigest(), size)


def _open_dataset(source: Source, loaded: datasets.Dataset, digest: str, size: int) -> OpenedSource:
    parts = tuple(
        SavedRows(loaded, start, min(start + PART_ROWS, len(loaded)))
        for start in range(0, len(loaded), PART_ROWS)
    )
    return OpenedSource(source.path, digest, parts, "row", size)


def _with_library(source: Source, load: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    """What `load` returns, with the library's errors told as ours."""
    import datasets
    import pyarrow

    try:
        return load()
    except (
        OSError,  # unreachable, or files missing
        ValueError,  # no such split or configuration
        RuntimeError,  # a repository with a loading script
        pyarrow.ArrowException,
        datasets.exceptions.DatasetsError,
    ) as error:
        reason = str(error).strip().split("\n")[0]
        if Path(source.path).exists():
            fact, fix = f"`datasets` can't load it: {reason}", "save it again with save_to_disk"
        else:
            fact = f"is neither a file here nor a data set that the hub gives: {reason}"
            fix = "correct the path or the id, or check the network"
        raise DataError(Problem(source.path, fact, fix)) from error


def _no_split(source: Source, names: list[str]) -> Problem:
    fact = f"has no split {source.split!r}; it has {', '.join(names)}"
    return Problem(source.path, fact, f"split: {did_you_mean(source.split, names) or names[0]}")


def _looks_like_a_file(path: Path, written: str) -> bool:
    if ending(path) in ENDINGS or written.startswith((".", "/", "~")):
        return True
    return written.count("/") > 1 or (path.parent != Path() and path.parent.is_dir())


def _missing(path: Path, written: str) -> Problem:
    folder = path.parent
    if not folder.is_dir():
        fact = f"there is no such file, nor the folder {folder}"
        return Problem(written, fact, "correct the path")
    near = did_you_mean(path.name, sorted(entry.name for entry in folder.iterdir()))
    fix = f"did you mean {folder / near}?" if near else "correct the path"
    return Problem(written, f"there is no such file (looked for {path.absolute()})", fix)
