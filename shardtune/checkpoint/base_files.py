"""What a folder of a result owes to the model that it was trained from: its processor, no place."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.checkpoint.model_card import hide_path

if TYPE_CHECKING:
    from shardtune.models.model_files import ModelFiles


def leave_base(folder: Path, base: ModelFiles) -> None:
    """Copies how pictures become inputs into a folder with the weights of a model that sees, which
    isn't served without it; then writes the name of `base` wherever a file has its place."""
    if _sees(folder):
        for file in base.processor:
            with suppress(ValueError):  # what nobody can read is no loss
                _copy_processor(file, folder / file.name)
    hide_path(folder, base.path, base.public_name)


def _sees(folder: Path) -> bool:
    """By what was written: of some families that see the part for text is trained alone."""
    config = folder / "config.json"
    return config.is_file() and "vision_config" in json.loads(config.read_text(encoding="utf-8"))


def _copy_processor(file: Path, target: Path) -> None:
    """Without a chat template: it would win over that of the tokenizer, by which was trained."""
    said = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(said, dict):
        said.pop("chat_template", None)
    target.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
