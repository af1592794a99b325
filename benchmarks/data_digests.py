"""What digests of prepared data cost: `python -m benchmarks.data_digests --gigabytes 10`.

The start of a run reads its source to know whether it has changed; that is the time that the check
of the prepared data is compared with, imports and the model left out. Both have as many bytes as
are asked for, in files with holes: no disk slows the start down. Beside it stand the check of every
byte, which follows when a file was touched, and what a document costs when it is read in training.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardtune.data.cache_digests import (
    document_digest,
    find_cache_damage,
    mark_checked,
    write_digests,
)
from shardtune.data.data_file import scan

LIMIT = 0.02
WHOLE = 10**9  # bytes by which the speed of hashing is measured
DOCUMENT = 2048  # tokens


def main() -> int:
    """Prints the figures; exit code 1 if the check at a start costs more than its limit."""
    parser = argparse.ArgumentParser(prog="benchmarks.data_digests")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, help="where to make two files of that size")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        folder, source = Path(place) / "prepared", Path(place) / "source.jsonl"
        folder.mkdir()
        for path in (folder / "documents-00000.arrow", source):
            path.touch()
            os.truncate(path, int(asked.gigabytes * 1e9))
        mark_checked(folder)
        check = _seconds(lambda: find_cache_damage(folder))
        start = _seconds(lambda: scan(source))
        os.truncate(folder / "documents-00000.arrow", WHOLE)
        whole = _seconds(lambda: write_digests(folder)) / WHOLE * asked.gigabytes * 1e9
    ids, flags = np.zeros(DOCUMENT, dtype=np.int32), np.ones(DOCUMENT, dtype=np.bool_)
    each = _seconds(lambda: [document_digest(ids, flags) for _ in range(1000)]) / 1000
    share = check / start
    print(f"{asked.gigabytes:g} GB of prepared tokens, of a source as large")
    print(f"  the source is read at each start      {start:8.2f} s")
    print(f"  sizes and times are compared          {check:8.5f} s, {share:.4%} of it")
    print(f"  every byte, where a file was touched  {whole:8.2f} s, by {WHOLE / 1e9:g} GB of them")
    print(f"  a document of {DOCUMENT:,} tokens, when read  {each * 1e6:8.1f} us")
    return int(share > LIMIT)


def _seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


if __name__ == "__main__":
    raise SystemExit(main())
