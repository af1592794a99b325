"""An ordinary Hugging Face folder, written once to the user's cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtune.core.files.cache import cache_dir, made_once
from shardtune.errors import ModelError, Problem

if TYPE_CHECKING:
    from torch import Tensor


def cached_folder(name: str) -> Path:
    """Where the model folder `name` lies, or will lie. If it exists it is complete."""
    return cache_dir() / "models" / name


def cached_model(name: str, write: Callable[[Path], None]) -> Path:
    """The model folder `name` of the cache, filled by `write(folder)` if it is missing."""
    folder = cached_folder(name)
    try:
        return made_once(folder, write)
    except OSError as error:
        fix = "free the disk or fix the permissions, or set XDG_CACHE_HOME to another folder"
        raise ModelError(Problem(str(folder), f"can't be written: {error}", fix)) from error


def write_folder(folder: Path, config: Any, tensors: dict[str, Tensor], tokenizer: Any) -> None:
    """Write what transformers' auto classes read, weights as safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    weights = folder / "model.safetensors"
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
    except SafetensorError as error:  # its own word for a full disk, among other things
        raise OSError(str(error)) from error
    # safetensors writes for its owner alone; in a shared cache the others couldn't read it.
    weights.chmod((folder / "config.json").stat().st_mode)
    tokenizer.save_pretrained(folder)
