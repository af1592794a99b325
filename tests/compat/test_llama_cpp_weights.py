"""llama.cpp multiplies with weights as they lie in a file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardtune.compat.llama_cpp_weights import without_repacking


def test_models_are_read_without_copies_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose products crash elsewhere is read in `python -m tests.exam.after`."""
    library = pytest.importorskip("llama_cpp").llama_cpp
    monkeypatch.setattr(
        library, "llama_model_default_params", library.llama_model_default_params
    )  # put back behind the test
    assert library.llama_model_default_params().use_extra_bufts
    without_repacking()
    assert not library.llama_model_default_params().use_extra_bufts


def test_a_target_that_has_changed_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip("llama_cpp").llama_cpp
    monkeypatch.setattr(library, "llama_model_default_params", SimpleNamespace)
    without_repacking()
    assert library.llama_model_default_params is SimpleNamespace
    assert "8-bit files may crash it" in capsys.readouterr().err
