"""The measurement of products: short, without traces, and what is made of it in a process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from shardtune.compat import cpu_half_precision
from shardtune.core.host.matmul_speed import FAST_PRECISIONS
from shardtune.core.setup import Precision
from shardtune.kernels.measure_matmul import fastest, measure_cpu_matmul, widen_slow_products


def test_every_precision_has_a_rate_within_a_second_and_threads_stay() -> None:
    before, begun = torch.get_num_threads(), time.process_time()
    found = measure_cpu_matmul()
    assert time.process_time() - begun < 1
    assert set(found) == {"fp32", "bf16", "fp16"}
    assert found["fp32"] > 0
    assert all(rate >= 0 for rate in found.values())
    assert torch.get_num_threads() == before


class SlowAtFirst:
    """A machine that takes ten times as long until a moment, and products on it."""

    def __init__(self, until: float) -> None:
        self.now, self.until = 0.0, until

    def product(self, seconds: float) -> None:
        self.now += seconds * (10 if self.now < self.until else 1)


@pytest.mark.parametrize("until", [0.0, 60.0, 100.0])
def test_a_slow_moment_falls_on_no_precision_alone(until: float) -> None:
    machine = SlowAtFirst(until)
    taken: dict[Precision, float] = {"fp32": 1.0, "bf16": 5.0}
    products = {each: partial(machine.product, cost) for each, cost in taken.items()}
    assert fastest(products, lambda: machine.now) == pytest.approx(taken)


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    widen_slow_products()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("bf16,fp16", set()),
        ("bf16", {torch.float16}),
        ("fp16", {torch.bfloat16}),
        ("fp32", {torch.bfloat16, torch.float16}),
    ],
)
def test_products_are_widened_in_what_the_machine_is_slow_in(
    said: str, expected: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv(FAST_PRECISIONS, said)
        widen_slow_products()
    assert cpu_half_precision._slow == expected
