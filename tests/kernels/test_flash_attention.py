"""FlashAttention 4's place in a model, as far as a machine without a GPU can show it.

tests/gpu/test_attention.py has the package itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardtune.errors import ModelError
from shardtune.kernels import flash_attention as flash
from shardtune.models.fused.activation_checkpointing import POLICIES, CheckpointPolicy

HEADS = (4, 2, 32)
"""Of queries, of keys and values, and how wide."""
TRIED = (2, 32)
"""Heads of queries to one of keys and values, and how wide."""


@pytest.mark.parametrize("packed", [False, True])
def test_shapes_are_known_without_running_it(packed: bool):
    with FakeTensorMode():
        query, key, value = (torch.empty(2, 16, n, 8, requires_grad=True) for n in (4, 2, 2))
        ends = torch.empty(65, dtype=torch.int32) if packed else None
        answer, sums = flash.flash_attention(query, key, value, ends, 16, 0.5)
        assert answer.shape == query.shape
        assert sums.shape == ((4, 32) if packed else (2, 4, 16))
        gradients = torch.autograd.grad(answer.sum(), (query, key, value))
    assert [each.shape[2] for each in gradients] == [4, 2, 2]


def test_without_a_gpu_it_is_left_alone():
    assert flash.why_unavailable("cpu", torch.bfloat16, *HEADS) == "there is no GPU"


@pytest.mark.parametrize("what", ["none", "mlp", "most"])
def test_what_it_gives_is_kept_whatever_else_is_not(what: Any):
    operation = torch.ops.shardtune.flash_attention.default
    assert POLICIES[what](None, operation) == CheckpointPolicy.MUST_SAVE


class ByHand:
    """The two functions of the package, in plain torch; `deaf` doesn't hear of documents."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf = deaf

    def weights(self, query: Tensor, key: Tensor, told: dict[str, Any]) -> Tensor:
        place = torch.arange(query.shape[-2])
        seen = place[:, None] >= place
        ends = told.get("cu_seqlens_q")
        if ends is not None and not self.deaf:
            document = torch.searchsorted(ends, place.int(), right=True)
            seen &= document[:, None] == document
        scores = query @ key.transpose(-1, -2) * self.scale(query)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)

    def scale(self, query: Tensor) -> float:
        return float(query.shape[-1] ** -0.5)

    def _flash_attn_fwd(self, *parts: Tensor, out: Tensor, lse: Tensor, **told: Any) -> None:
        query, key, value = self.by_head(parts, out.shape[-2])
        out.copy_((self.weights(query, key, told) @ value).transpose(-2, -3))
        lse.zero_()

    def _flash_attn_bwd(
        self, *given: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **told: Any
    ) -> None:
        query, key, value, _, outer = self.by_head(given[:5], dq.shape[-2])
        weights = self.weights(query, key, told)
        through = outer @ value.transpose(-1, -2)
        inner = weights * (through - (through * weights).sum(-1, keepdim=True)) * self.scale(query)
        dq.copy_((inner @ key).transpose(-2, -3))
        for place, found in (
            (dk, inner.transpose(-1, -2) @ query),
            (dv, weights.transpose(-1, -2) @ outer),
        ):
            groups = found.unflatten(-3, (place.shape[-2], -1)).sum(-3)
            place.copy_(groups.transpose(-2, -3))

    def by_head(self, parts: tuple[Tensor, ...], heads: int) -> list[Tensor]:
        each_head = (each.float().transpose(-2, -3) for each in parts)
        return [each.repeat_interleave(heads // each.shape[-3], -3) for each in each_head]


@pytest.mark.parametrize(("deaf", "right"), [(False, True), (True, False)])
def test_it_is_tried_before_it_is_trusted(monkeypatch, deaf: bool, right: bool):
    monkeypatch.setattr(flash, "_kernels", ByHand(deaf=deaf))
    assert (flash._probe_error("cpu", torch.bfloat16, *TRIED) < flash.PROBE_TOLERANCE) is right


def test_sums_in_any_order_are_refused(monkeypatch):
    class AnyOrder(ByHand):
        calls = 0

        def _flash_attn_bwd(self, *given: Tensor, **told: Any) -> None:
            super()._flash_attn_bwd(*given, **told)
            self.calls += 1
            told["dq"][0] *= 1 + 0.01 * self.calls  # less than results may be off

    monkeypatch.setattr(flash, "_kernels", AnyOrder())
    assert not flash._probe_error("cpu", torch.bfloat16, *TRIED) < flash.PROBE_TOLERANCE


def test_numbers_that_are_none_are_far_from_right(monkeypatch):
    nothing = SimpleNamespace(
        _flash_attn_fwd=lambda *_, out, lse, **__: out.fill_(torch.nan),
        _flash_attn_bwd=lambda *_, **__: None,
    )
    monkeypatch.setattr(flash, "_kernels", nothing)
    assert not flash._probe_error("cpu", torch.bfloat16, *TRIED) < flash.PROBE_TOLERANCE


@pytest.mark.parametrize(
    ("kind", "package", "why"),
    [
        ((8, 0), flash.PACKAGE, "it has no kernels for compute capability 8.0"),
        ((9, 0), "no_such_package.interface", "no_such_package is not installed"),
        ((9, 0), "json", "it fails: "),
    ],
)
def test_what_speaks_against_it_is_told(monkeypatch, kind, package: str, why: str):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: kind)
    monkeypatch.setattr(flash, "PACKAGE", package)
    monkeypatch.setattr(flash, "_kernels", None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    found = flash._probe("cuda", torch.bfloat16, HEADS[0] // HEADS[1], HEADS[2], windowed=False)
    assert found is not None
    assert found.startswith(why)


def test_a_gpu_that_is_lost_is_told_as_such(monkeypatch):
    """Nothing else can be computed by this process, so it can't go on with another kernel."""

    def lost(_: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(flash, "PACKAGE", "json")
    monkeypatch.setattr(flash, "_kernels", None)
    with pytest.raises(ModelError, match=r"took the GPU with it(.|\n)*pip uninstall"):
        flash._probe("cuda", torch.bfloat16, HEADS[0] // HEADS[1], HEADS[2], windowed=False)
