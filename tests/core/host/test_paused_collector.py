"""The collector rests while something is imported, and is as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from shardtune.core.host.paused_collector import paused_collector


def test_no_collection_falls_into_it_and_what_is_made_is_looked_through_no_more() -> None:
    frozen = gc.get_freeze_count()
    before = sum(each["collections"] for each in gc.get_stats())
    with paused_collector():
        kept = [[number] for number in range(100_000)]
        assert sum(each["collections"] for each in gc.get_stats()) == before
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_it_goes_on_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), paused_collector():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_rested_before_still_rests() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
