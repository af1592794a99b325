"""Probes that passed are remembered until something that they depend on changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.kernels.probe_cache import has_passed, probe_key, remember


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shardtune"


def test_what_passed_is_remembered() -> None:
    key = probe_key(["torch", "no-such-package"], gpu="H200", shape=(4, 128))
    assert set(key) == {"torch", "gpu", "shape"}
    assert not has_passed(key)
    remember(key)
    assert has_passed(key)


@pytest.mark.parametrize("changed", [{"gpu": "B200"}, {"shape": (8, 128)}, {"cuda": "13.0"}])
def test_anything_else_is_tried_again(changed: dict[str, object]) -> None:
    facts: dict[str, object] = {"gpu": "H200", "shape": (4, 128)}
    remember(probe_key(["torch"], **facts))
    assert not has_passed(probe_key(["torch"], **facts | changed))
    assert not has_passed(probe_key([], **facts))


def test_a_cache_that_is_broken_or_closed_costs_a_probe(own_cache: Path) -> None:
    key = probe_key([], gpu="H200")
    remember(key)
    (file,) = (own_cache / "probes").iterdir()
    file.write_text("{", encoding="utf-8")
    assert not has_passed(key)
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder", encoding="utf-8")
    remember(key)
    assert not has_passed(key)
