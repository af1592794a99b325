"""Why a candidate of the search won or lost, in words with numbers."""

from __future__ import annotations

from shardtune.core.units import GIB
from shardtune.plan.forecast import Forecast

ALIKE = 0.01  # steps that differ by less are equally fast, for all that a forecast can say


def praise_or_blame(found: Forecast, best: Forecast | None) -> str:
    """What speaks for a candidate, or against it, beside the best one (None where none fits)."""
    if not found.fits:
        return _too_large(found)
    if best is None or found is best:
        return _praise(found)
    longer = found.speed.step.total / best.speed.step.total - 1
    if longer < ALIKE:
        more = (found.memory.peak - best.memory.peak) / GIB
        return f"as fast, with {abs(more):.1f} GiB {'more' if more >= 0 else 'less'}"
    return f"fits, {longer:.0%} slower: {_slower(found, best)}{provided(found)}"


_WORDS = {
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
        return f"{found.over / GIB:.1f} GiB over at {at}; {_WORDS[largest]} are {share:.1f} GiB"
    room = found.cluster.host_gib or 0.0
    return f"a node needs {found.host / GIB:.0f} GiB of CPU memory and has {room:.0f}"


def _praise(found: Forecast) -> str:
    left = -found.over / GIB
    part, seconds = _largest_wait(found)
    share = seconds / found.speed.step.total
    waits = f"; {share:.0%} of the time goes to {part}" if share > 0.02 else ""
    return f"fits with {left:.1f} GiB to spare{waits}{provided(found)}"


def provided(found: Forecast) -> str:
    """What nobody said about the nodes, where it matters."""
    states = found.memory.host * min(found.mesh.size, found.cluster.gpus_per_node)
    if not states or found.cluster.host_gib is not None:
        return ""
    return f", if a node has {found.host / GIB:,.0f} GiB of CPU memory"


def _slower(found: Forecast, best: Forecast) -> str:
    ours, theirs = found.speed.step, best.speed.step
    parts = ("compute", "communication", "optimizer", "offload", "bubble")
    lost = {part: getattr(ours, part) - getattr(theirs, part) for part in parts}
    part = max(lost, key=lambda name: lost[name])
    if part == "compute":
        if found.work.checkpointing not in ("none", best.work.checkpointing):
            return "it needs activation checkpointing to fit"
        if found.work.kernels != best.work.kernels:
            return "its layers can't be compiled"
        return f"micro-batches of {found.work.micro_batch} keep the GPU less busy"
    return _named(part, found)


def _largest_wait(found: Forecast) -> tuple[str, float]:
    step = found.speed.step
    parts = {name: getattr(step, name) for name in ("communication", "offload", "bubble")}
    part = max(parts, key=lambda name: parts[name])
    return _named(part, found), parts[part]


def _named(part: str, found: Forecast) -> str:
    """A part of the step in words, with the link that it waits for."""
    if part == "optimizer":
        return "each rank updates more weights"
    if part == "offload":
        return "states that travel between CPU memory and the GPU"
    if part == "bubble":
        return "stages that wait for each other"
    if not found.speed.sent:
        return "communication"
    largest = max(found.speed.sent, key=lambda each: each.total)
    names = {**dict.fromkeys(("params", "recalled", "trained"), "weights"), "grads": "gradients"}
    what = names.get(largest.move.what, "activations")
    kind = {
        "all_gather": f"gathers of {what}",
        "reduce_scatter": f"reductions of {what}",
        "all_reduce": f"reductions of {what}",
        "send_recv": f"sending {what}",
    }[largest.move.op]
    cluster = found.cluster
    inside = {"nvlink": "NVLink", "pcie": "PCIe"}[cluster.link]
    network = f"the network between nodes ({cluster.inter_node_gbps:g} Gbps)"
    return f"{kind} exposed on {inside if largest.where == 'intra_node' else network}"
