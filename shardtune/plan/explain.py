"""Why a candidate of the search won or lost: words that are computed from its own forecast.

Each figure is a part of the time or of the memory that the tables show, the largest cause first.
`tests/plan/test_sentences.py` takes the sentences apart again and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardtune.core.layout import Cargo
from shardtune.core.units import GIB
from shardtune.plan.estimate.step_time import Wait, estimate_speed
from shardtune.plan.estimate.workload import Workload
from shardtune.plan.forecast import Forecast

Aim = Literal["time", "cost", "memory"]

ALIKE = 0.01  # steps that differ by less are equally fast, for all that a forecast can say
WORTH_SAYING = 0.25  # of the time lost: a second cause is named from here on
SMALL = 0.02  # of a step: what is less is no reason to name what it goes to


def praise_or_blame(found: Forecast, best: Forecast | None, aim: Aim = "time") -> str:
    """What speaks for a candidate, or against it, beside the best one (None where none fits)."""
    if not found.fits:
        return _too_large(found)
    if best is None or found is best:
        return _praise(found)
    more = (found.memory.required - best.memory.required) / GIB
    size = f"{abs(more):.1f} GiB {'more' if more >= 0 else 'less'}"
    longer = found.speed.step.total / best.speed.step.total - 1
    if abs(longer) < ALIKE:
        return f"{found.verdict}, as fast, with {size}{provided(found)}"
    if aim == "memory" or longer < 0:
        return f"{found.verdict}, with {size}, {times(found, best)}{provided(found)}"
    causes = "; ".join(str(each) for each in why_slower(found, best))
    return f"{found.verdict}, {times(found, best)}: {causes}{provided(found)}"


def times(found: Forecast, best: Forecast) -> str:
    """How much faster or slower it is; as a factor where that is easier to read."""
    ours, theirs = found.speed.step.total, best.speed.step.total
    slower = ours > theirs
    factor = ours / theirs if slower else theirs / ours
    if factor < 2:
        return f"{ours / theirs - 1:.0%} slower" if slower else f"{1 - ours / theirs:.0%} less time"
    digits = f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"
    return f"{digits} x {'as slow' if slower else 'as fast'}"


# Memory ------------------------------------------------------------------------------------------

CLASS_WORDS = {
    "params": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
}


def _too_large(found: Forecast) -> str:
    at = f"micro-batch {found.work.micro_batch}"
    at += ", with activation checkpointing" if found.work.checkpointing != "none" else ""
    if found.over > 0:
        largest = max(found.memory.gpu, key=lambda name: found.memory.gpu[name])
        share = found.memory.gpu[largest] / GIB
        words = f"{CLASS_WORDS[largest]} are {share:.1f} GiB"
        return f"{found.over / GIB:.1f} GiB over at {at}; {words}"
    room = found.cluster.host_gib or 0.0
    return f"a node needs {found.host / GIB:.0f} GiB of CPU memory and has {room:.0f}"


def provided(found: Forecast) -> str:
    """What is not known of the nodes or of the routers, where it matters."""
    if found.imbalance > 1:  # no strategy that divides experts has states in CPU memory
        return f", if the busiest rank's experts get {found.imbalance:.2f} x the mean of tokens"
    states = found.memory.host * min(found.mesh.size, found.cluster.gpus_per_node)
    if not states or found.cluster.host_gib is not None:
        return ""
    needed = found.host / GIB
    words = f"{needed:.2g}" if needed < 10 else f"{needed:,.0f}"
    return f", if a node has {words} GiB of CPU memory"


# Time --------------------------------------------------------------------------------------------


def _praise(found: Forecast) -> str:
    left, step = -found.over / GIB, found.speed.step
    waits = {name: getattr(step, name) for name in ("communication", "offload", "bubble")}
    part = max(waits, key=lambda name: waits[name])
    share = waits[part] / step.total
    words = f"; {share:.0%} of the time goes to {_named(part, found)}" if share > SMALL else ""
    return f"{found.verdict} with {left:.1f} GiB to spare{words}{provided(found)}"


@dataclass(frozen=True)
class Cause:
    """Seconds of a step that a candidate loses, and what to."""

    seconds: float
    words: str

    def __str__(self) -> str:
        return f"{lasting(self.seconds)} {self.words}"


def lasting(seconds: float) -> str:
    """A part of a step in seconds, or in milliseconds."""
    return f"{seconds:,.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def why_slower(found: Forecast, best: Forecast) -> list[Cause]:
    """What costs a candidate most beside the best, and what else weighs."""
    causes = sorted(_causes(found, best), key=lambda each: -each.seconds)
    lost = found.speed.step.total - best.speed.step.total
    return causes[:1] + [each for each in causes[1:2] if each.seconds >= WORTH_SAYING * lost]


def _causes(found: Forecast, best: Forecast) -> Iterator[Cause]:
    ours, theirs = found.speed.step, best.speed.step
    for part in ("communication", "offload", "bubble", "optimizer"):
        more = getattr(ours, part) - getattr(theirs, part)
        yield Cause(more, f"more for {_named(part, found)}")
    rest = ours.compute - theirs.compute
    work, other = found.work, best.work
    if work.checkpointing not in ("none", other.checkpointing):
        kept = {"checkpointing": other.checkpointing, "kept_layers": other.kept_layers}
        again = _spared(found, replace(work, **kept))  # type: ignore[arg-type]
        yield Cause(again, f"more for recomputation ({work.checkpointing})")
        rest -= again
    if work.kernels == "eager" and other.kernels == "compiled":
        eager = _spared(found, replace(work, kernels="compiled"))
        yield Cause(eager, "more because its layers can't be compiled")
        rest -= eager
    yield Cause(rest, f"more for matmuls{_smaller(found, best)}")


def _spared(found: Forecast, work: Workload) -> float:
    """Seconds of computing that a candidate would not need if it worked otherwise."""
    other = estimate_speed(found.layout, found.shape, found.mesh, found.cluster, work)
    return found.speed.step.compute - other.step.compute


def _smaller(found: Forecast, best: Forecast) -> str:
    """What makes a candidate's matmuls smaller than the best one's."""
    slices = found.mesh.size_of("tensor")
    if found.work.micro_batch < best.work.micro_batch:
        return f" (micro-batch {found.work.micro_batch}, not {best.work.micro_batch})"
    return f" ({slices} tensor shards)" if slices > best.mesh.size_of("tensor") else ""


def _named(part: str, found: Forecast) -> str:
    """A part of the step in words, with the link that it waits for most."""
    if part == "optimizer":
        return "the optimizer's update"
    if part == "offload":
        return f"offload to {'disk' if found.memory.nvme else 'CPU memory'}"
    if part == "bubble":
        return "the pipeline bubble"
    waits = found.speed.waits
    if not waits:
        return "communication"
    return f"communication, most of it {_move(max(waits, key=lambda w: w.seconds), found)}"


_CARGO: dict[Cargo, str] = {
    "params": "weights",
    "recalled": "weights",
    "trained": "weights",
    "grads": "gradients",
    "unsliced": "gradients",
    "tied": "gradients",
}


def _move(wait: Wait, found: Forecast) -> str:
    what = _CARGO.get(wait.what, "activations")
    kind = {
        "all_gather": f"gathers of {what}",
        "reduce_scatter": f"reductions of {what}",
        "all_reduce": f"reductions of {what}",
        "send_recv": f"sending {what}",
        "all_to_all": "sending tokens to experts and back",
    }[wait.op]
    cluster = found.cluster
    inside = {"nvlink": "NVLink", "pcie": "PCIe"}[cluster.link]
    network = f"the network between nodes ({cluster.inter_node_gbps:g} Gbps)"
    return f"{kind} on {inside if wait.where == 'intra_node' else network}"
