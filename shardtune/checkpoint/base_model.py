"""The model that a result was trained from, as far as a folder of the result tells of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.checkpoint.model_card import hide_path

if TYPE_CHECKING:
    from shardtune.models.model_files import ModelFiles


@dataclass(frozen=True)
class BaseModel:
    """Where the model was loaded from, and what others may know of it."""

    path: str
    name: str
    processor: tuple[Path, ...] = ()
    """Its files that say how pictures become inputs. A model that sees isn't served without them;
    training on text leaves them as they are."""

    @classmethod
    def of(cls, files: ModelFiles) -> BaseModel:
        return cls(files.path, files.public_name, files.processor)

    def name_in(self, folder: Path) -> None:
        """Writes the name wherever a file in `folder` has the place."""
        hide_path(folder, self.path, self.name)

    def copy_processor(self, folder: Path) -> None:
        """A folder with all weights is loaded without the model that it came from."""
        for file in self.processor:
            shutil.copyfile(file, folder / file.name)
