"""Finds what a data set's path means: a file, a folder, or a data set on the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.compat.hub_dataset import load_dataset
from shardtune.core.files.regular_file import other_kind
from shardtune.data.data_file import ENDINGS, FILE_KINDS, OpenedSource, open_data_file, scan
from shardtune.data.open_file import ending
from shardtune.data.readers import SavedRows
from shardtune.data.row_slice import sliced
from shardtune.errors import DataError, Problem, did_you_mean

if TYPE_CHECKING:
    import datasets

    from shardtune.config.job import Source

PART_ROWS = 10_000  # rows of a part of a table

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_SPLIT_NAME = re.compile(r"(?<![a-z])(train|test|valid|validation|val|dev|eval)(?![a-z])", re.I)
_SLICE = re.compile(r"\[[^\]]*\](\+train\[[^\]]*\])*$")
_CHOICES = re.compile(r"\[(.+)\]", re.DOTALL)


def open_source(source: Source) -> OpenedSource:
    """Finds the source; raises DataError if it is neither here nor on the hub."""
    path = Path(source.path).expanduser()
    try:
        if path.is_file():
            return _whole_or_sliced(source, lambda: open_data_file(source, path))
        if path.is_dir():
            return _open_folder(source, path)
        if "*" in source.path:
            return _whole_or_sliced(source, lambda: _open_files(source, _matching(path)))
        if why := other_kind(path):
            fix = "name a file; what another program writes has to be saved in one first"
            raise DataError(Problem(source.path, why, fix))
    except OSError as error:
        fact, fix = f"can't be read: {error.strerror or error}", "fetch or write the file again"
        if error.strerror:  # without one it is a decompressor's
            fix = "correct the path or its permissions"
        raise DataError(Problem(source.path, fact, fix)) from error
    if _looks_like_a_file(path, source.path):
        raise DataError(_missing(path, source.path))
    if _HUB_ID.fullmatch(source.path) is None:
        fact = "is neither a file here nor a hub id"
        raise DataError(Problem(source.path, fact, f"name a {FILE_KINDS} file, or a hub id"))
    loaded = _load(source, source.path)
    # The library derives the fingerprint from the revision and the files of the split.
    digest = f"{loaded._fingerprint} {loaded.info.download_checksums} {len(loaded)}"
    return _open_dataset(source, loaded, digest, int(loaded.data.nbytes))


def _whole_or_sliced(source: Source, opened: Callable[[], OpenedSource]) -> OpenedSource:
    """Files by themselves: their rows are their split `train`, of which a slice may be taken. What
    they don't have is refused; it would be passed over in silence."""
    split = _SLICE.sub("", source.split)
    for key, given, usual in (("split", split, "train"), ("config", source.config, None)):
        if given != usual:
            kind = "names files, which have" if "*" in source.path else "is a file, which has"
            fix = f"leave {key} out; data.eval: {{share: 0.02}} holds rows of it out"
            raise DataError(Problem(source.path, f"{kind} no {key} {given!r}", fix))
    return sliced(opened(), source.split) if "[" in source.split else opened()


def _matching(pattern: Path) -> list[Path]:
    """The files that match a pattern, in the order of their names."""
    first = next(place for place, part in enumerate(pattern.parts) if "*" in part)
    folder, rest = Path(*pattern.parts[:first]), pattern.parts[first:]
    found = folder.glob("/".join(rest))
    asked = any(part.startswith(".") for part in rest)
    return sorted(
        file for file in found if file.is_file() and (asked or not _is_hidden(file, folder))
    )


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether a program keeps it for itself: a notebook the copies of files (.ipynb_checkpoints), a
    Mac what belongs to each (._rows.jsonl)."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


# Folders ------------------------------------------------------------------------------------------


def _open_folder(source: Source, path: Path) -> OpenedSource:
    """A folder that `datasets` saved, one that it can load, or just files."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _open_dataset(source, _load_saved(source, path), *_content(path))
    files = [
        file
        for file in sorted(path.rglob("*"))
        if ending(file) in ENDINGS and file.is_file() and not _is_hidden(file, path)
        if file.name.lower() != "readme.md"
    ]
    divided = any(_SPLIT_NAME.search(str(file.relative_to(path))) for file in files)
    if source.config or source.split != "train" or divided or _has_card(path):
        return _open_dataset(source, _load(source, str(path.absolute())), *_content(path))
    return _open_files(source, files)


def _has_card(path: Path) -> bool:
    """Whether a data set's card says which files are what."""
    card = path / "README.md"
    return card.is_file() and "\nconfigs:" in card.read_text(encoding="utf-8", errors="replace")


def _open_files(source: Source, files: Sequence[Path]) -> OpenedSource:
    """Several files as one data set, in the order of their names."""
    if not files:
        fact = "there is no data file in it" if "*" not in source.path else "no file matches it"
        raise DataError(Problem(source.path, fact, f"name {FILE_KINDS} files"))
    note = ""
    if source.documents == "auto" and len(files) > 1 and ending(files[0]) == ".txt":
        source = source.model_copy(update={"documents": "file"})
        note = f"each of its {len(files):,} files is a document (documents: file); otherwise set "
        note += "documents: blank_line, documents: line or a separator"
    opened = [open_data_file(source.model_copy(update={"path": str(file)}), file) for file in files]
    joined = OpenedSource.joined(source.path, opened)
    return replace(joined, note=note or joined.note)


def _content(path: Path) -> tuple[str, int]:
    """A hash of all files of a folder, and their bytes."""
    digest, size = hashlib.sha256(), 0
    for file in sorted(path.rglob("*")):
        if file.is_file():
            scanned = scan(file)
            digest.update(f"{file.relative_to(path)} {scanned.digest}\n".encode())
            size += scanned.size
    return digest.hexdigest(), size


def _load_saved(source: Source, path: Path) -> datasets.Dataset:
    """The split of a folder that `save_to_disk` wrote, or a slice of it."""
    import datasets

    if (path / "dataset_dict.json").is_file():
        names = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        parts = {name: path / name for name in names}
    else:
        parts = {source.split.partition("[")[0]: path}

    def load() -> datasets.Dataset:
        sets = {name: datasets.load_from_disk(str(part)) for name, part in parts.items()}
        sizes = {name: len(each) for name, each in sets.items()}
        wanted = datasets.ReadInstruction.from_spec(source.split).to_absolute(sizes)
        return datasets.concatenate_datasets(
            [sets[part.splitname].select(range(part.from_, part.to)) for part in wanted]
        )

    return _with_library(source, load)


# The `datasets` library ---------------------------------------------------------------------------


def _load(source: Source, path: str) -> datasets.Dataset:
    """A data set of the hub, or of a folder that is laid out as one."""
    return _with_library(source, lambda: load_dataset(path, source.config, source.split))


def _open_dataset(source: Source, loaded: datasets.Dataset, digest: str, size: int) -> OpenedSource:
    parts = tuple(
        SavedRows(loaded, start, min(start + PART_ROWS, len(loaded)))
        for start in range(0, len(loaded), PART_ROWS)
    )
    whole = f"{digest} {source.config} {source.split}"
    return OpenedSource(source.path, hashlib.sha256(whole.encode()).hexdigest(), parts, "row", size)


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
        raise DataError(_told(source, str(error).strip())) from error


def _told(source: Source, error: str) -> Problem:
    """An error of the library, with the key of ours that answers it."""
    reason = error.split("\n")[0]
    found = _CHOICES.search(error)
    names = [name.strip(" '\"") for name in found.group(1).split(",")] if found else []
    if "Config name is missing" in error or "BuilderConfig" in reason:
        fact = f"it has several configurations: {', '.join(names)}"
        if source.config:
            fact = f"it has no configuration {source.config!r}; it has {', '.join(names)}"
        near = did_you_mean(source.config or "", names) or names[0]
        return Problem(source.path, fact, f"config: {near}, beside its path")
    if reason.startswith("Couldn't find cache") and names:
        fact = f"the cache has no configuration {source.config!r}; it has {', '.join(names)}"
        near = did_you_mean(source.config or "", names) or names[0]
        return Problem(source.path, fact, f"config: {near}, beside its path; or check the network")
    if "Unknown split" in reason:
        base = source.split.partition("[")[0]
        fact = f"has no split {base!r}; it has {', '.join(names)}"
        return Problem(source.path, fact, f"split: {did_you_mean(base, names) or names[0]}")
    if "Unrecognized instruction format" in reason:
        fact = f"split {source.split!r} is no split's name, nor a slice of one"
        return Problem(source.path, fact, "write it as train[:1%], train[100:200] or train+test")
    if Path(source.path).exists():
        fix = "name its files, or save it again with save_to_disk"
        return Problem(source.path, f"`datasets` can't load it: {reason}", fix)
    fact = f"is neither a file here nor a data set that the hub gives: {reason}"
    return Problem(source.path, fact, "correct the path or the id, or check the network")


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
