"""A prepared data set on disk: what identifies it, and how it is written and read.

A folder holds the documents as Arrow files of the `datasets` library, `index.npz` with a line about
each document, `report.json` with what became of the rows, the bad ones included, and the digests of
all of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtune.data.cache_digests import write_digests
from shardtune.data.complaints import Complaints
from shardtune.data.tokenize import DocumentIndex, RowCounts
from shardtune.errors import DataError, Problem

if TYPE_CHECKING:
    import datasets

    from shardtune.config.job import Source
    from shardtune.data.data_file import OpenedSource
    from shardtune.data.formats import RowFormat

PREPARE_VERSION = 7
"""A change of what preparation makes of the same input, or of how that is kept, needs another."""
_DIGEST_RULE = 4
"""Of the digest that runs note. It stays while the same input becomes the same documents."""


def fingerprint(tokenizer: Any) -> str:
    """A hash of everything in a tokenizer that decides which tokens a text becomes."""
    import tokenizers
    import transformers

    facts = {
        "template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "versions": [tokenizers.__version__, transformers.__version__],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()


def cache_key(
    source: Source, opened: OpenedSource, format: RowFormat, length: int, tokenizer: str
) -> str:
    """The name of a prepared data set: a hash of all that it depends on."""
    how = (*format.settings, *format.control.settings)
    return _hash(PREPARE_VERSION, opened.digest, how, source.overflow, length, tokenizer)


def data_digests(
    source: Source, opened: OpenedSource, format: RowFormat, length: int, tokenizer: str
) -> tuple[str, ...]:
    """The digest that a run notes of a data set, then what other versions noted of the same.

    How the documents are kept isn't in it: a run goes on when the cache has another format. Where
    control tokens in a text are taken as tokens it is the key of the cache before there was a
    choice. The other one is the key of the cache in its fifth format.
    """
    how, control = format.settings, format.control
    chosen = how if control.policy == "token" else (*how, *control.settings)
    rules = ((_DIGEST_RULE, chosen), (5, (*how, *control.settings)))
    return tuple(
        _hash(rule, opened.digest, settings, source.overflow, length, tokenizer)
        for rule, settings in rules
    )


def _hash(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def documents_file(folder: Path, number: int) -> Path:
    """Where one process puts its share of the documents."""
    return folder / f"documents-{number:05}.arrow"


def write(folder: Path, tally: RowCounts, index: DocumentIndex) -> None:
    """Puts the index, the report and the digests beside the documents."""
    np.savez(folder / "index.npz", **vars(index))
    report = json.dumps(dataclasses.asdict(tally), indent=1)
    (folder / "report.json").write_text(report, encoding="utf-8")
    write_digests(folder)


def read(folder: Path) -> tuple[RowCounts, DocumentIndex]:
    """The report and the index of a folder."""
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        report["complaints"] = Complaints.of(report["complaints"]["groups"])
        with np.load(folder / "index.npz", allow_pickle=False) as arrays:
            index = DocumentIndex(
                **{name: arrays[name] for name in DocumentIndex.__dataclass_fields__}
            )
        return RowCounts(**report), index
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise _damaged(folder, str(error)) from error


def load(folder: Path, count: int) -> datasets.Dataset:
    """The documents of a folder, mapped into memory, not read."""
    import datasets
    import pyarrow

    try:
        files = sorted(folder.glob("documents-*.arrow"))
        parts = [datasets.Dataset.from_file(str(file)) for file in files]
    except (OSError, pyarrow.ArrowException) as error:
        raise _damaged(folder, str(error)) from error
    rows = datasets.concatenate_datasets([part for part in parts if len(part)])
    if len(rows) != count:
        raise _damaged(folder, f"it holds {len(rows):,} documents instead of {count:,}")
    return rows


def _damaged(folder: Path, reason: str) -> DataError:
    fact = f"this prepared data set is damaged: {reason}"
    return DataError(Problem(str(folder), fact, "remove the folder; it is made anew"))
