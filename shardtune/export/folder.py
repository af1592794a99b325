"""The folder of an export: it appears whole and sealed, and replaces only an older export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shardtune import __version__
from shardtune.checkpoint.manifest import Damaged
from shardtune.checkpoint.model_folder import model_folder
from shardtune.checkpoint.seal import files_of, folder_faults, seal_folder
from shardtune.errors import Problem, RunError

EXPORT_FILE = "export.json"


@dataclass(frozen=True)
class ExportFacts:
    """What a folder is an export of, for people and for the next export."""

    to: str
    weights: str
    """What the weights are written in, as `bf16` or `q8_0`."""
    base: str
    """The model that was trained, as others know it."""
    stops: list[int]
    dialogues: int
    """How many dialogues the chat template was compared on."""
    shardtune: str = __version__


@contextmanager
def export_folder(target: Path, facts: ExportFacts) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when all in the block has held."""
    require_ours(target)
    with model_folder(target, replace=True) as partial:
        yield partial
        text = json.dumps(asdict(facts), indent=2, sort_keys=True) + "\n"
        (partial / EXPORT_FILE).write_text(text, encoding="utf-8")
        seal_folder(partial)


def require_ours(target: Path) -> None:
    """Refuses a target that is there and isn't an export, or holds files that aren't of it."""
    if not target.exists() and not target.is_symlink():
        return
    fix = "name a folder that doesn't exist yet"
    if target.is_symlink() or not target.is_dir():
        raise RunError(Problem(str(target), "exists already, and is no folder", fix))
    if not any(target.iterdir()):
        return
    if not (target / EXPORT_FILE).is_file():
        raise RunError(Problem(str(target), "exists already, and is no export", fix))
    try:
        faults = list(folder_faults(target, files_of(target)))
    except Damaged as error:
        faults = [str(error)]
    if faults:
        fact = f"is an export that was changed since: {faults[0]}"
        raise RunError(Problem(str(target), fact, fix))
