"""A change is made where its target is as it was; elsewhere one line says what is lost."""

from __future__ import annotations

import ctypes
import os
import sys
import types
import warnings
from importlib.metadata import version
from typing import Any

import pytest
from torch.nn import functional

from shardtune.compat import c_allocator, deepspeed_process, quiet, versioned_change
from shardtune.compat.transformers_rope import APPLY_ROPE, skip_if_rotated
from shardtune.compat.versioned_change import TargetChanged, require_version
from tests.conftest import Logged


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versioned_change, "_said", set())


def test_versions_are_compared_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("2.9.1", "2.13.0+cpu", "2.15", "3.0.0.dev1"):
        monkeypatch.setattr(versioned_change, "version", lambda _, found=found: found)
        if found.startswith("2.13"):
            require_version("torch", "2.10", "2.15")
        else:
            with pytest.raises(TargetChanged, match="is not one of"):
                require_version("torch", "2.10", "2.15")


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_what_is_installed_is_among_the_versions(library: str) -> None:
    since, before = {"torch": ("2.10", "2.15"), "transformers": ("5.0", "6")}[library]
    require_version(library, since, before)
    assert version(library)


def test_another_version_is_left_alone_and_one_line_says_what_is_lost(
    logged: Logged,
) -> None:
    made = []

    @versioned_change.change("torch", since="1.0", before="1.1", lost="it is slower")
    def quicken() -> bool:
        made.append(1)
        return True

    assert quicken() is None
    assert quicken() is None
    assert not made
    (record,) = logged.records  # once
    assert record.getMessage().startswith("quicken: torch ")
    assert record.getMessage().endswith(" is not one of 1.0 to 1.1; it is slower")


@pytest.mark.parametrize("error", [ImportError, AttributeError, TargetChanged])
def test_a_target_that_is_another_one_stops_nothing(error: type[Exception], logged: Logged) -> None:
    @versioned_change.change("torch", since="2.0", before="9", lost="it is slower")
    def quicken() -> bool:
        raise error("no such thing")

    assert quicken() is None
    assert [each.getMessage() for each in logged.records] == [
        "quicken: no such thing; it is slower"
    ]


def test_a_package_that_is_missing_is_a_target_that_changed() -> None:
    with pytest.raises(TargetChanged, match="is not installed"):
        require_version("no-such-package", "1", "2")


def test_rope_of_another_signature_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    code: Any = types.ModuleType("family")

    def own(query: object, angles: object) -> None: ...

    setattr(code, APPLY_ROPE, own)
    monkeypatch.setitem(sys.modules, "family", code)
    assert not skip_if_rotated("family")
    assert getattr(code, APPLY_ROPE) is own
    assert "queries and keys are rotated by transformers" in logged.text


def test_deepspeed_compiles_no_all_reduce_that_training_has_no_use_for(
    logged: Logged,
) -> None:
    pytest.importorskip("deepspeed")
    ops = types.SimpleNamespace(__compatible_ops__={"deepspeed_shm_comm": True})
    deepspeed_process.leave_out_shm_op(types.SimpleNamespace(ops=ops))
    assert ops.__compatible_ops__ == {"deepspeed_shm_comm": False}
    other = types.SimpleNamespace(ops=types.SimpleNamespace(__compatible_ops__={}))
    deepspeed_process.leave_out_shm_op(other)
    assert "half a minute of compiling" in logged.text


def test_deepspeed_is_told_its_device_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    deepspeed_process.choose_accelerator("cpu", 1)
    assert (os.environ["DS_ACCELERATOR"], os.environ["LOCAL_RANK"]) == ("cpu", "5")


def test_linear_is_put_back() -> None:
    own = deepspeed_process.kept_linear()
    functional.linear = lambda *_: None
    deepspeed_process.restore_linear(own)
    assert functional.linear is own


def test_without_glibc_memory_stays_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    with c_allocator.freed_memory_goes_back():
        c_allocator.give_back_memory()
    assert not logged.records  # glibc's way
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with c_allocator.freed_memory_goes_back():
        c_allocator.give_back_memory()
    assert len(logged.records) == 2
    assert "memory between tensors stays with the process" in logged.text


def test_others_are_quiet() -> None:
    from transformers.utils import logging as theirs

    quiet.quiet_bitsandbytes()
    quiet.hide_loading_bars()
    assert not theirs.is_progress_bar_enabled()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet.quiet_flash_attention()
        deepspeed_process.quiet_deepspeed()
        warnings.warn("Argument aux_data is odd", stacklevel=1)
        warnings.warn("`torch.distributed.reduce_scatter_tensor` goes", FutureWarning, stacklevel=1)
    assert not seen
