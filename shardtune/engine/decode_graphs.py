"""CUDA graphs of decoding steps: all kernels of a token in one launch.

A token of a few rows keeps a GPU busy for less time than Python takes to launch its kernels. So a
step of a shape is run as it is when the shape first comes, recorded when it comes again, and from
then on replayed. A shape that may pass soon (rows join, others have ended) takes a larger one that
is recorded already. A step reads and writes tensors that stay where they are: nothing is handed
over. Where a step can't be recorded (a layer that asks the GPU for a number, say), the reason is
told once, and steps are launched kernel by kernel.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

import torch

from shardtune.engine.graph_pool import GraphPool

MOST_DECODE_GRAPHS = 64
"""Shapes that are recorded at a time; the one that was not used for longest makes room."""
PATIENCE = 8
"""Steps for which a shape takes a larger one before it is recorded itself."""

Bucket = tuple[int, int]
"""Rows and columns of a step."""
DecodeStep = Callable[[], None]
Recorder = Callable[[DecodeStep], DecodeStep]
"""Makes of a step one that does the same from then on; it computes nothing by that."""
_log = logging.getLogger("shardtune")


class DecodeGraphs:
    """Steps by their owners and shapes, as they are or recorded."""

    def __init__(self, record: Recorder | None, most: int = MOST_DECODE_GRAPHS) -> None:
        """Without a recorder every step runs as it is."""
        self._record, self._most = record, most
        self._seen: Counter[tuple[Hashable, Bucket]] = Counter()
        self._ran: set[tuple[Hashable, Bucket]] = set()
        self._recorded: OrderedDict[tuple[Hashable, Bucket], DecodeStep] = OrderedDict()
        self.refused = "" if record else "the model is not on a GPU"
        """Why nothing is recorded."""

    def run(self, owner: Hashable, bucket: Bucket, step: Callable[[Bucket], None]) -> None:
        """One step of this bucket, or of one with more rows or columns. `step` must do the same for
        a bucket each time, until its owner is forgotten."""
        if self.refused:
            return step(bucket)
        key = owner, bucket
        self._seen[key] += 1
        if self._seen[key] <= PATIENCE:
            key = owner, self._chosen(owner, bucket)
        if key not in self._recorded and not self._add(key, lambda: step(bucket)):
            return step(bucket)
        self._recorded.move_to_end(key)
        return self._recorded[key]()

    def _chosen(self, owner: Hashable, bucket: Bucket) -> Bucket:
        """The smallest that is recorded and large enough; the bucket itself where none is."""
        large = [
            each
            for whose, each in self._recorded
            if whose == owner and each[0] >= bucket[0] and each[1] >= bucket[1]
        ]
        return min(large, key=lambda each: each[0] * each[1], default=bucket)

    def _add(self, key: tuple[Hashable, Bucket], step: DecodeStep) -> bool:
        """Records a step; returns whether it could. One that never ran can't be: it sets up what
        libraries keep."""
        assert self._record is not None
        if key not in self._ran:
            self._ran.add(key)
            return False
        try:
            replay = self._record(step)
        except Exception as error:  # noqa: BLE001  whatever a model's own code may raise
            self.refused = _first_line(error)
            _log.warning("no CUDA graphs for decoding: %s; tokens cost more time", self.refused)
            self._recorded.clear()
            return False
        if len(self._recorded) == self._most:
            self._recorded.popitem(last=False)
        self._recorded[key] = replay
        return True

    def forget(self, owner: Hashable) -> None:
        """Its tensors have moved: what was recorded for them is gone."""
        for key in [each for each in self._seen if each[0] == owner]:
            del self._seen[key]
            self._ran.discard(key)
            self._recorded.pop(key, None)


def cuda_recorder(device: torch.device) -> Recorder | None:
    """Records CUDA graphs in one pool of memory; None where there is no GPU."""
    if device.type != "cuda":
        return None
    pool = GraphPool()

    def record(step: DecodeStep) -> DecodeStep:
        graph = torch.cuda.CUDAGraph()
        try:
            with pool.capture(graph):
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
