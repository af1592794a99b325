"""What the fast way tells torch's compiler."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

from shardtune.compat.torch_compiler import (
    RECOMPILE_LIMIT,
    WHOLE_ROW,
    hide_checkpoint_warning,
    raise_recompile_limit,
    read_rows_once,
    report_compiling,
)
from shardtune.core.host.heartbeat import Heartbeats, open_heartbeat
from tests.conftest import Logged


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = InductorChoices.should_use_persistent_reduction
    plain = staticmethod(getattr(usual, "usual", usual))
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", plain)


@contextmanager
def compiling_for(device: str) -> Iterator[None]:
    sizes = SimpleNamespace(statically_known_leq=lambda left, right: left <= right)
    place = SimpleNamespace(type=device)
    graph: Any = SimpleNamespace(sizevars=sizes, get_current_device_or_throw=lambda: place)
    with V.set_graph_handler(graph):
        yield


def held_at_once(numbers: int, hint: ReductionHint = ReductionHint.INNER, **more: bool) -> bool:
    features: Any = SimpleNamespace(get_reduction_hint=lambda: hint, reduction_numel=numbers)
    return InductorChoices.should_use_persistent_reduction(features, more.get("cooperative", False))


def test_whole_rows_are_held_on_a_gpu() -> None:
    with compiling_for("cuda"):
        assert not held_at_once(4096)
        read_rows_once()
        read_rows_once()  # once is enough
        usual = InductorChoices.should_use_persistent_reduction.usual  # type: ignore[attr-defined]
        assert not hasattr(usual, "usual")
        assert held_at_once(1024)
        assert held_at_once(4096)
        assert held_at_once(WHOLE_ROW)
        assert not held_at_once(WHOLE_ROW + 1)


def test_everything_else_is_as_torch_has_it() -> None:
    read_rows_once()
    with compiling_for("cuda"), config.patch({"triton.persistent_reductions": False}):
        assert not held_at_once(4096)
    with compiling_for("cpu"):
        assert not held_at_once(4096)
        assert held_at_once(1024)


def test_a_watcher_hears_of_every_compilation() -> None:
    """Also of the one for another length, in any step."""
    heartbeats = Heartbeats(1)
    heartbeat = open_heartbeat(os.dup(heartbeats.file), 0, 1)
    torch._dynamo.reset()
    report_compiling(heartbeat.compile_began, heartbeat.compile_ended)
    report_compiling(heartbeat.compile_began, heartbeat.compile_ended)  # once is enough
    seen = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(heartbeats.read(0).phase)
        return graph

    double = torch.compile(lambda x: x + x, backend=backend, dynamic=False)
    heartbeat.begin(3)
    heartbeat.forward(2, 8)
    for length in (3, 4, 3):
        double(torch.ones(length))
        assert heartbeats.read(0).phase == "forward"
    assert seen == ["compile", "compile"]
    assert heartbeats.read(0).beats == 2 + 2 * 2
    torch._dynamo.reset()
    heartbeats.close()


def test_a_layer_may_be_compiled_often() -> None:
    dynamo: Any = torch._dynamo.config
    with dynamo.patch(recompile_limit=8):
        raise_recompile_limit()
        assert dynamo.recompile_limit == RECOMPILE_LIMIT
    with dynamo.patch(recompile_limit=100):
        raise_recompile_limit()
        assert dynamo.recompile_limit == 100


def test_one_warning_of_torch_is_not_shown(logged: Logged) -> None:
    hide_checkpoint_warning()
    log = logging.getLogger("torch._higher_order_ops.wrap")
    log.warning("a context_fn is passed to torch.utils.checkpoint")
    log.warning("another one")
    assert [record.getMessage() for record in logged.records] == ["another one"]
