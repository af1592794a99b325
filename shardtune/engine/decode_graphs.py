"""CUDA graphs of decoding steps: all kernels of a token in one launch.

A token of a few rows keeps a GPU busy for less time than Python takes to launch its kernels. So a
step of a shape is run as it is when the shape first comes, recorded when it comes again, and from
then on replayed. A step reads and writes tensors that stay where they are: nothing is handed over.
Where a step can't be recorded (a layer that asks the GPU for a number, say), the reason is told
once, and steps are launched kernel by kernel.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

MOST_DECODE_GRAPHS = 64
"""Shapes that are recorded at a time; the one that was not used for longest makes room."""

DecodeStep = Callable[[], None]
Recorder = Callable[[DecodeStep], DecodeStep]
"""Makes of a step one that does the same from then on; it computes nothing by that."""
_log = logging.getLogger("shardtune")


class DecodeGraphs:
    """Steps by their shapes, as they are or recorded."""

    def __init__(self, record: Recorder | None, most: int = MOST_DECODE_GRAPHS) -> None:
        """Without a recorder every step runs as it is."""
        self._record, self._most = record, most
        self._seen: set[Hashable] = set()
        self._recorded: OrderedDict[Hashable, DecodeStep] = OrderedDict()
        self.refused = "" if record else "the model is not on a GPU"
        """Why nothing is recorded."""

    def run(self, shape: Hashable, step: DecodeStep) -> None:
        """One step. The same shape must always come with a step that does the same."""
        if self.refused or not (shape in self._seen or self._first(shape)):
            return step()
        replay = self._recorded.get(shape) or self._new(shape, step)
        if replay is None:
            return step()
        self._recorded.move_to_end(shape)
        return replay()

    def _first(self, shape: Hashable) -> bool:
        """Notes a shape. Its first step sets up what libraries keep, which can't be recorded."""
        self._seen.add(shape)
        return False

    def _new(self, shape: Hashable, step: DecodeStep) -> DecodeStep | None:
        assert self._record is not None
        try:
            replay = self._record(step)
        except Exception as error:  # noqa: BLE001  whatever a model's own code may raise
            self.refused = _first_line(error)
            _log.warning("no CUDA graphs for decoding: %s; tokens cost more time", self.refused)
            self.forget()
            return None
        if len(self._recorded) == self._most:
            old, _ = self._recorded.popitem(last=False)
            self._seen.discard(old)
        self._recorded[shape] = replay
        return replay

    def forget(self, owner: Hashable = None) -> None:
        """Tensors have moved: what was recorded for them is gone. An owner is the first part of its
        shapes; without one, all are meant."""
        for shape in [each for each in self._seen if owner is None or _owner(each) == owner]:
            self._seen.discard(shape)
            self._recorded.pop(shape, None)


def _owner(shape: Hashable) -> Hashable:
    return shape[0] if isinstance(shape, tuple) else shape


def cuda_recorder(device: torch.device) -> Recorder | None:
    """Records CUDA graphs in one pool of memory; None where there is no GPU."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()

    def record(step: DecodeStep) -> DecodeStep:
        graph = torch.cuda.CUDAGraph()
        try:
            # Another thread may use the GPU meanwhile, which is no part of it.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step()
        except Exception:
            torch.cuda.synchronize(device)
            raise
        replay: DecodeStep = graph.replay
        return replay

    return record


def _first_line(error: BaseException) -> str:
    """What went wrong first: a capture that has failed says so once more when it ends."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [repr(error)])[0][:200]
