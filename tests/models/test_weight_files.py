"""An index of weights is read, but not believed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardtune.config.job import ModelSection, NoAdapter
from shardtune.errors import ModelError
from shardtune.models.catalogue import resolve
from shardtune.models.load import check_weights
from shardtune.models.model_files import ModelFiles
from shardtune.models.weight_files import INDEX, SINGLE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of tiny whose weights are in two places, one of them outside."""
    made = Path(shutil.copytree(resolve("tiny"), tmp_path / "model"))
    shutil.copy(made / SINGLE, made / "part.safetensors")
    (made / SINGLE).rename(tmp_path / "outside.safetensors")
    return made


def write_index(folder: Path, file: object) -> ModelSection:
    names = {"model.embed_tokens.weight": "part.safetensors", "model.norm.weight": file}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    return ModelSection(name=str(folder))


def test_files_of_the_folder_are_found(folder: Path) -> None:
    found = ModelFiles(write_index(folder, "part.safetensors")).weights
    assert {path.name for path in found.file_of.values()} == {"part.safetensors"}


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "{absolute}", "part/../../outside.safetensors", "..", ""]
)
def test_a_file_outside_is_refused(folder: Path, file: str) -> None:
    absolute = str(folder.parent / "outside.safetensors")
    section = write_index(folder, file.replace("{absolute}", absolute))
    with pytest.raises(ModelError, match="outside of its folder"):
        _ = ModelFiles(section).weights
    with pytest.raises(ModelError, match="outside of its folder"):
        check_weights(ModelFiles(section), NoAdapter())


@pytest.mark.parametrize("file", [7, None, ["part.safetensors"]])
def test_what_is_no_name_is_refused(folder: Path, file: object) -> None:
    with pytest.raises(ModelError, match="can't be read"):
        _ = ModelFiles(write_index(folder, file)).weights
