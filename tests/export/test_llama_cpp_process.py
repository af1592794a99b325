"""llama.cpp in a process of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from shardtune.errors import RunError
from shardtune.export.llama_cpp_process import ask_llama_cpp


@pytest.mark.process
def test_what_it_can_not_read_is_told(tmp_path: Path) -> None:
    """Also where it isn't installed: its process ends with an error, ours goes on."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF, and no more")
    with pytest.raises(RunError) as error:
        ask_llama_cpp(tmp_path / "model.gguf", rows=[[1, 2]])
    (problem,) = error.value.problems
    assert problem.place == "model.gguf"
    missing = "ModuleNotFoundError: No module named 'llama_cpp'"
    why = "Failed to load model" if find_spec("llama_cpp") else missing
    assert "llama.cpp can't read it: " in problem.fact
    assert why in problem.fact
