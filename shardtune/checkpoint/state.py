"""Checkpoints: what training needs to go on, written whole or not at all.

A checkpoint is the trained weights and the optimizer's state by parameter name, and a few numbers.
The position in the data is the number of the step: the order of samples is a pure function of it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shardtune.core.cache import atomic_folder
from shardtune.errors import Problem, RunError

if TYPE_CHECKING:
    from torch import Tensor

_TENSORS, _NUMBERS = "state.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{6,})")


def save_state(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    *,
    keep: int,
) -> Path:
    """Writes `folder/step-N` after `step` steps, then removes all but the `keep` newest."""
    target = folder / f"step-{step:06d}"
    with atomic_folder(target) as partial:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, partial / _TENSORS)
        found = {"step": step, "numbers": dict(numbers)}
        (partial / _NUMBERS).write_text(json.dumps(found), encoding="utf-8")
    for _, old in _all(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def newest(folder: Path) -> Path | None:
    """The checkpoint of the latest step, if there is any."""
    found = _all(folder)
    return found[-1][1] if found else None


def load_state(checkpoint: Path) -> tuple[int, dict[str, Tensor], dict[str, float]]:
    """The step that a checkpoint was written after, its tensors and its numbers."""
    try:
        found = json.loads((checkpoint / _NUMBERS).read_text(encoding="utf-8"))
        return int(found["step"]), load_file(checkpoint / _TENSORS), found["numbers"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        fix = "remove that folder and resume again: the checkpoint before it is used"
        raise RunError(Problem(str(checkpoint), f"can't be read: {error}", fix)) from error


def _all(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)
