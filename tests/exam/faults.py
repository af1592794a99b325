"""Faults that strike a rank of a real run at a chosen step and phase, from the inside.

They hang on the pulse, through which every rank passes many times a step. The package itself knows
nothing of them: they come in by `inject/sitecustomize.py`, which only the exam's runs see.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardtune.core.host.heartbeat import Heartbeat, Phase

SMALL_DISK = "small"


@dataclass(frozen=True)
class Fault:
    """`action` strikes rank `rank` when it enters `phase` of `step` for the `nth` time."""

    action: str
    rank: int
    step: int
    phase: Phase = "forward"
    nth: int = 1
    always: bool = False
    """In every attempt, not only in the first that gets there."""
    value: float = 0.0


@dataclass
class Plan:
    """The faults of a run, in a file that its ranks read; each leaves the time when it struck."""

    path: Path
    faults: list[Fault] = field(default_factory=list)

    def write(self) -> None:
        self.path.write_text(json.dumps([asdict(fault) for fault in self.faults]), "utf-8")

    def struck(self, index: int) -> float | None:
        """When a fault struck first, by the clock on the wall."""
        try:
            return float(mark(self.path, index).read_text("utf-8"))
        except (OSError, ValueError):
            return None


def mark(path: Path, index: int) -> Path:
    return path.with_suffix(f".{index}")


def install(path: str, rank: int) -> None:
    """From now on this process suffers what the file says."""
    plan = [Fault(**each) for each in json.loads(Path(path).read_text("utf-8"))]
    mine = [(index, fault) for index, fault in enumerate(plan) if fault.rank == rank]
    passed: dict[int, tuple[int, int]] = {}
    enter = Heartbeat.enter

    def striking(heartbeat: Heartbeat, phase: Phase) -> None:
        for _, fault in mine:
            if fault.action == "slow":
                _slow(fault, heartbeat, phase)
        enter(heartbeat, phase)
        for index, fault in mine:
            if (fault.step, fault.phase) != (heartbeat.step, phase) or fault.action == "slow":
                continue
            step, times = passed.get(index, (0, 0))
            times = times + 1 if step == heartbeat.step else 1
            passed[index] = (heartbeat.step, times)
            if times == fault.nth and (_first(Path(path), index) or fault.always):
                ACTIONS[fault.action](fault)

    Heartbeat.enter = striking  # type: ignore[method-assign]


def _first(path: Path, index: int) -> bool:
    try:
        with mark(path, index).open("x", encoding="utf-8") as file:
            file.write(str(time.time()))
    except FileExistsError:
        return False
    return True


def _slow(fault: Fault, heartbeat: Heartbeat, phase: Phase) -> None:
    """Makes the phase that ends here `value` times as long, from its step on for 22 steps."""
    if fault.step <= heartbeat.step < fault.step + 22 and heartbeat._phase == fault.phase:
        time.sleep((fault.value - 1) * max(0.05, time.monotonic() - heartbeat._since))


def _signal_self(number: signal.Signals) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


def _signal_launcher(number: signal.Signals) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getppid(), number)


def _hold_gil(fault: Fault) -> None:
    ctypes.PyDLL(None).sleep(30)  # a PyDLL call keeps the lock


def _raise(fault: Fault) -> None:
    raise RuntimeError("injected: this rank raises")


def _eat_memory(fault: Fault) -> None:
    """Asks for more than this process may have; `value` rows or fewer still fit."""
    import torch

    if _engine().world.heartbeat._rows <= fault.value:
        return
    resource.setrlimit(resource.RLIMIT_AS, (1 << 35, resource.RLIM_INFINITY))
    torch.empty(1 << 36, dtype=torch.uint8)


def _fail_write(fault: Fault) -> None:
    """The next file of a checkpoint can't be written; `value` is the number of the error."""
    from shardtune.checkpoint import safetensors_writer as shards

    write = shards.write_file

    def failing(*given: Any) -> Any:
        shards.write_file = write
        raise OSError(int(fault.value), os.strerror(int(fault.value)))

    shards.write_file = failing


def _fill_disk(fault: Fault) -> None:
    """Leaves no byte free on the small disk, or, without `value`, gives them all back."""
    filler = Path(os.environ["EXAM_FAULTS"]).parent / SMALL_DISK / "filler"
    if not fault.value:
        filler.unlink()
        return
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def _engine() -> Any:
    kinds = ("NativeEngine", "DDPEngine")
    return next(each for each in gc.get_objects() if type(each).__name__ in kinds)


def _scale_logits(fault: Fault) -> None:
    """Multiplies the logits of this micro-batch by `value`, or by NaN where that is 0."""
    factor = fault.value or float("nan")

    def spoil(module: Any, inputs: Any, output: Any) -> None:
        output.logits = output.logits * factor
        handle.remove()

    handle = _engine().model.register_forward_hook(spoil)


def _spoil_gradient(fault: Fault) -> None:
    """The gradient of one weight is infinite, as long as this step is computed."""
    engine = _engine()
    parameter = next(iter(engine.trained.values()))

    def spoil(gradient: Any) -> Any:
        return gradient * float("inf") if engine.world.heartbeat.step == fault.step else gradient

    parameter.register_hook(spoil)


def _spoil_weight(fault: Fault) -> None:
    next(iter(_engine().trained.values())).data[0] = float("nan")


ACTIONS: dict[str, Callable[[Fault], None]] = {
    "kill": _signal_self(signal.SIGKILL),
    "stop": _signal_self(signal.SIGSTOP),
    "terminate rank": _signal_self(signal.SIGTERM),
    "interrupt rank": _signal_self(signal.SIGINT),
    "terminate": _signal_launcher(signal.SIGTERM),
    "interrupt": _signal_launcher(signal.SIGINT),
    "kill launcher": _signal_launcher(signal.SIGKILL),
    "hang up": _signal_launcher(signal.SIGHUP),
    "hold gil": _hold_gil,
    "pause": lambda fault: time.sleep(fault.value),
    "raise": _raise,
    "eat memory": _eat_memory,
    "fail write": _fail_write,
    "fill disk": _fill_disk,
    "scale logits": _scale_logits,
    "spoil gradient": _spoil_gradient,
    "spoil weight": _spoil_weight,
}
