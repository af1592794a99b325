"""Every family of the table trains by default: the losses are those of plain transformers and peft,
on one process, under DDP and under FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtune.core.world import World
from tests.models.families import CONFIGS
from tests.models.family_runs import (
    ADAPTERS,
    Outcome,
    family_job,
    plain_losses,
    run,
    run_all,
    write_family,
)
from tests.ranks import on_ranks

SAME = 1e-5
QUICK = ("bloom", "gemma2", "gpt2", "gptj", "llama", "mixtral")
"""As unlike as families get; the others take minutes together."""
STRATEGIES = ("ddp", "fsdp")

Case = tuple[str, str, str]
pytestmark = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not"  # plain peft's, of experts
)


def rows() -> list[Any]:
    slow = [pytest.mark.long]
    return [pytest.param(name, marks=() if name in QUICK else slow) for name in sorted(CONFIGS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, chosen: set[str]) -> Path:
    """The tiny models of all families that are tested."""
    path = tmp_path_factory.mktemp("families")
    for family in sorted(chosen):
        write_family(path, family)
    return path


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> set[str]:
    """The families of those tests that run."""
    here = [item for item in request.session.items if item.path == request.path]
    calls = (getattr(item, "callspec", None) for item in here)
    return {call.params["family"] for call in calls if call and "family" in call.params}


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path, chosen: set[str]) -> dict[Case, Outcome]:
    """All families under all strategies, one after the other on the same two ranks."""
    cases = [(f, adapter, s) for f in sorted(chosen) for adapter in ADAPTERS for s in STRATEGIES]
    found: dict[Case, Outcome] = on_ranks(2, run_all, folder, cases, timeout=1200)[0]
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    known: dict[tuple[str, str], list[float]] = {}

    def losses(family: str, adapter: str) -> list[float]:
        if (family, adapter) not in known:
            job = family_job(folder, family, adapter, "ddp", 1)
            known[family, adapter] = plain_losses(job)
        return known[family, adapter]

    return losses


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", rows())
def test_one_process(family: str, adapter: str, folder: Path, plain: Any) -> None:
    found = run(World(), family_job(folder, family, adapter, "ddp", 1))
    assert not found.refused
    assert found.losses == pytest.approx(plain(family, adapter), rel=SAME)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", rows())
def test_two_ranks(
    family: str, adapter: str, strategy: str, on_two_ranks: dict[Case, Outcome], plain: Any
) -> None:
    found = on_two_ranks[family, adapter, strategy]
    assert not found.refused
    assert found.losses == pytest.approx(plain(family, adapter), rel=SAME)
