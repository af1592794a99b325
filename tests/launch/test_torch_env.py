"""Settings of torch that ranks begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.launch.torch_env import torch_environment


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_segments_grow_and_compiled_kernels_are_kept(tmp_path: Path) -> None:
    assert torch_environment({}) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "shardtune" / "compiled"),
        "TRITON_CACHE_DIR": str(tmp_path / "shardtune" / "kernels"),
    }


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_a_person_has_set_is_left_alone(name: str) -> None:
    """By either name; torch would prefer the older one, and ours would only confuse."""
    folders = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), "/theirs")
    theirs = {name: "max_split_size_mb:64", **folders}
    assert torch_environment(theirs) == {}
