"""The table of families is what its command writes."""

from __future__ import annotations

from typing import Any

import pytest

from docs.make_families import declared, known, rows, written

FEW = ["bloom", "gpt2", "llama"]


def chosen() -> list[Any]:
    """A few in the gate, all of them where there is time."""
    slow = pytest.mark.long
    return [pytest.param(name, marks=() if name in FEW else slow) for name in known()]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not")
@pytest.mark.parametrize("name", chosen())
def test_a_row_is_what_the_command_writes(name: str) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    assert rows([name])[name] == written()[name]


@pytest.mark.parametrize("name", known())
def test_what_tables_declare_stands_in_each_row(name: str) -> None:
    assert written()[name].endswith(f"| {' | '.join(declared(name))} |")


def test_all_families_are_there() -> None:
    assert list(written()) == known()
    assert len(known()) >= 30
