"""On a GPU a step is enqueued without waiting for it, and computes what it should.

torch counts what it knows to wait; the profiler counts the driver's calls; and a GPU that is held
up shows whatever both may miss.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardtune.core.step import LateResult, MicroBatch
from shardtune.engine.native import NativeEngine
from shardtune.training.meter import Meter
from tests.engine.test_build_optimizer import RULES, clipped_as_torch_does, left_out
from tests.engine.test_native import batch
from tests.engine.test_waiting import ADAPTERS, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler (2.11) warns of what it does itself
]
DEVICE = "cuda:0"
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
CYCLES = 2_000_000_000  # about a second of any GPU of today


def steps(count: int) -> list[list[MicroBatch]]:
    return [[batch(2 * n, 4, 64), batch(2 * n + 1, 4, 64)] for n in range(count)]


def ready(adapter: str, kernels: str, **settings: Any) -> NativeEngine:
    """An engine that has compiled what it compiles, and has its memory."""
    engine = make(DEVICE, ADAPTERS[adapter], kernels=kernels, **settings)
    for given in steps(3):
        engine.step(engine.stage(given)).read()
    torch.cuda.synchronize()
    return engine


@contextmanager
def forbidden_to_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def driver_calls(work: Callable[[], object]) -> Counter[str]:
    """Calls that wait, and copies from or to memory that isn't page-locked, inside `work`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("inside"):
            work()
        torch.cuda.synchronize()  # the copies' own events; after the span that counts
    events = list(profile.events() or ())
    (span,) = {
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.name == "inside" and e.device_type == torch.autograd.DeviceType.CPU
    }
    waits = (e for e in events if e.name in WAITING)
    inside = (e.name for e in waits if span[0] <= e.time_range.start <= span[1])
    copies = (e.name for e in events if "Memcpy" in e.name and "Pageable" in e.name)
    assert any(e.name.startswith("cudaLaunchKernel") for e in events), "the profiler saw nothing"
    return Counter([*inside, *copies])


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_step_never_waits_and_a_look_does_once(adapter: str, kernels: str) -> None:
    engine = ready(adapter, kernels)
    with forbidden_to_wait():
        results = [engine.step(engine.stage(given)) for given in steps(4)]
    assert all(isinstance(result, LateResult) for result in results)
    assert all(result.read().applied for result in results)

    def take() -> None:
        results[:] = [engine.step(engine.stage(given)) for given in steps(2)]

    def look() -> None:
        assert results[-1].loss > 0
        assert results[-1].busy is not None

    assert driver_calls(take) == Counter()
    assert driver_calls(lambda: (take(), look())) == Counter({"cudaEventSynchronize": 1})


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_no_rule_and_no_precision_waits(optimizer: str, precision: Any) -> None:
    engine = ready("lora", "eager", optimizer=optimizer, precision=precision, loss="plain")
    with forbidden_to_wait():
        result = engine.step(engine.stage(steps(1)[0]))
    assert result.loss > 0


def test_transformers_own_mask_is_all_that_asks() -> None:
    """Whether rows are packed, once in each forward pass, before it makes a mask."""
    engine = ready("all", "eager", attention="sdpa")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step(engine.stage(steps(1)[0]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = [each.filename for each in caught if "synchronizing" in str(each.message)]
    assert len(places) <= 2
    assert all(place.endswith("masking_utils.py") for place in places), places


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_step_is_enqueued_while_the_gpu_is_held_up(adapter: str) -> None:
    engine = ready(adapter, "eager")
    # One micro-batch: a driver's queue has an end, some thousand kernels. And not the first such
    # step: another precision of gradients is another kernel, and to load it waits.
    engine.step(engine.stage(steps(1)[0][:1])).read()
    staged = engine.stage(steps(1)[0][:1])
    begun = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    result = engine.step(staged)
    enqueued = time.perf_counter() - begun
    result.read()
    through = time.perf_counter() - begun
    assert through > 0.5
    assert enqueued < 0.6 * through


def test_a_step_takes_what_the_gpu_took_however_late_one_looks() -> None:
    engine = ready("lora", "eager")
    given = steps(1)[0][:1]
    engine.step(engine.stage(given)).read()
    meter = Meter(4, DEVICE)
    results = [engine.step(engine.stage(given)) for _ in range(2)]
    torch.cuda._sleep(CYCLES)
    results.append(engine.step(engine.stage(given)))
    results[-1].read()
    time.sleep(1.0)  # nobody looks
    for result in results:
        (reading,) = meter.tick([result])
        seconds = reading.seconds
    assert 0.5 < seconds < 5  # the held up one, of about a second
    assert results[1].since_last < 0.5  # the one before
    with meter.paused():
        time.sleep(1.0)
    (reading,) = meter.tick([engine.step(engine.stage(given)).read()])
    assert reading.seconds < 2.0  # of which a second was nobody looking


def test_what_was_sent_ahead_is_what_is_computed() -> None:
    """Sent by another thread, many steps ahead, while the GPU is busy with others."""

    def losses(stage: Callable[[NativeEngine, list[list[MicroBatch]]], Sequence[Any]]) -> Any:
        engine = ready("all", "eager")
        given = stage(engine, steps(12))
        return [result.loss for result in [engine.step(each) for each in given]]

    def ahead(engine: NativeEngine, given: list[list[MicroBatch]]) -> Sequence[Any]:
        with ThreadPoolExecutor(1) as thread:
            return list(thread.map(engine.stage, given))

    # Attention's gradient may be summed in any order; another batch's loss is some 1e-3 away.
    assert losses(ahead) == pytest.approx(losses(lambda engine, given: given), rel=1e-4)


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    engine = ready("all", "eager")
    before = {name: weight.clone() for name, weight in engine.state()[0].items()}
    weight = next(iter(engine.trained.values()))
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    results = [engine.step(given) for given in steps(2)]
    handle.remove()
    assert [result.applied for result in results] == [False, False]
    after = engine.state()[0]
    assert all(torch.equal(after[name], old) for name, old in before.items())
    assert engine.step(steps(1)[0]).applied


@pytest.mark.parametrize("rule", RULES)
def test_clipping_and_leaving_out_on_a_gpu(rule: str) -> None:
    clipped_as_torch_does(rule, DEVICE)
    left_out(rule, DEVICE)


def test_a_ranks_memory_is_in_segments_that_grow() -> None:
    """In a process of its own, which begins without the variable, as under torchrun."""
    program = (
        "import os, torch\n"
        "for name in list(os.environ):\n"
        "    if name.endswith('ALLOC_CONF'): del os.environ[name]\n"
        "from shardtune.launch.process_group import join_process_group\n"
        "with join_process_group(1) as world:\n"
        "    kept = torch.ones(1 << 20, device=world.device)\n"
        "    print(all(each['is_expandable'] for each in torch.cuda.memory_snapshot()))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["True"]
