"""Fake tensors and a fake process group: no memory and no other ranks, but the real code.

Weights and activations are fake: they have a shape, a type and a device, and nothing in them. What
is small and decides the way that the code takes (positions, labels, counts, meshes: whole numbers)
stays real, so that the same branches are taken as in a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardtune.measure.allocation_ledger import tensors_in

INTEGER_TYPES = (torch.int32, torch.int64)
"""Types of numbers that decide something. Weights are never stored in them."""

REAL_BYTES = 1 << 20
"""Bytes up to which something computed from real numbers is real itself."""

FAKE_SCALAR = 2.0
"""What any fake number is read as: a gradient's norm, finite and long enough to be clipped."""

DRAW = 1.0
"""What a single number drawn at random is: models leave out a layer where it is below a probability
(`layerdrop`), and the most memory is taken where all are there."""


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """This process is the first of `ranks`, the others don't answer and nothing takes memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), RealSmallIntegers():  # type: ignore[no-untyped-call]
            yield
    finally:
        if ranks > 1:
            dist.destroy_process_group()


class RealSmallIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Decides, operation by operation, what is real. The fake mode has been entered before."""

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        kwargs = kwargs or {}
        if func is torch.ops.aten.rand.default and not args[0]:
            with unset_fake_temporarily():
                return torch.full((), DRAW, **kwargs)
        given = list(tensors_in((*args, *kwargs.values())))
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in given):
            if func is torch.ops.aten._local_scalar_dense.default:
                return torch.tensor(FAKE_SCALAR, dtype=args[0].dtype).item()
            result = func(*args, **kwargs)
            if func is torch.ops.c10d.allreduce_.default:
                return result[0], _done(result[0])
            return result
        return self._of_real(func, args, kwargs, whole_numbers=not given)

    def _of_real(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole_numbers: bool
    ) -> Any:
        """The result of an operation on real tensors, or on none: real only if it is small.

        What comes out of nothing must consist of whole numbers too, or it would be a weight.
        """
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass  # depends on the numbers, and we have them
        else:
            made = list(tensors_in(result))
            if any(_size(tensor) > REAL_BYTES for tensor in made):
                return result
            if whole_numbers and any(tensor.dtype not in INTEGER_TYPES for tensor in made):
                return result
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _done(tensors: list[Tensor]) -> Any:
    """A finished collective that has its result, which DDP asks for and the fake backend lacks."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()
