"""Bytes on one GPU by class, the peak and the moment it happens; bytes in main memory and on disk.

States come from the layout (`predict_held`). What this module adds is what comes and goes while a
step runs: activations, logits, gathered weights, buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardtune.core.footprint import Held, predict_held
from shardtune.core.layout import Home, Layout, State
from shardtune.core.mesh import Mesh
from shardtune.core.shape import ModelShape
from shardtune.estimate.activations import (
    boundary_bytes,
    kept_logit_bytes,
    layer_bytes,
    logit_bytes,
    stack_bytes,
    working_bytes,
)
from shardtune.estimate.constants import MEMORY, MemoryConstants
from shardtune.estimate.parts import WEIGHTS, Cut, held_share, scaled
from shardtune.estimate.workload import Workload, whole_bytes

Moment = Literal["forward", "backward", "optimizer", "evaluation", "save"]
Class = Literal["params", "gradients", "optimizer", "activations", "logits", "buffers"]
Sizes = dict[Class, float]
NODE = 8
"""Ranks of a node for which NCCL keeps buffers."""


@dataclass(frozen=True)
class Memory:
    """One rank's bytes; on the GPU at the moment when they are most."""

    gpu: Sizes
    """What is allocated at the peak, by class."""
    fragmentation: float
    """What is lost between its blocks."""
    cached: float
    """Whole blocks that the allocator keeps for later, and gives back when memory is short."""
    context: float
    """CUDA's and NCCL's own memory, which torch doesn't count."""
    moment: Moment
    """When the peak happens: `forward` is its end, with the loss; and so on."""
    moments: dict[Moment, float]
    """What is allocated at each moment."""
    host: float
    """Main memory of a rank for states that live there."""
    host_building: float
    """Main memory of a rank while its share of the model comes into being."""
    host_building_whole: float
    """The same where every rank builds the whole model first."""
    nvme: float

    @property
    def allocated(self) -> float:
        return sum(self.gpu.values())

    @property
    def overhead(self) -> float:
        """What the device has in use beside what is allocated."""
        return self.fragmentation + self.cached + self.context

    @property
    def reserved(self) -> float:
        """What torch's allocator takes from the device."""
        return self.allocated + self.fragmentation + self.cached

    @property
    def peak(self) -> float:
        """All that the device has in use, as nvidia-smi shows it."""
        return self.reserved + self.context

    @property
    def required(self) -> float:
        """What must fit: torch gives back whole cached blocks before it runs out of memory."""
        return self.allocated + self.fragmentation + self.context


def estimate_memory(
    layout: Layout, shape: ModelShape, mesh: Mesh, work: Workload, k: MemoryConstants = MEMORY
) -> Memory:
    """The bytes of the rank that holds most."""
    cut = Cut.of(mesh)
    share = held_share(shape, cut)
    part = scaled(whole_bytes(shape, work), share)
    held = predict_held(layout.without_masters(), mesh, part)
    moments = _moments(layout, shape, mesh, work, cut, held, k)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    peak = moments[moment]
    passing = peak["activations"] + peak["logits"] + peak["buffers"]
    cached = _cached(shape, work, cut, held, moments["forward"]["logits"], peak, k)
    neighbours = min(mesh.size, NODE)
    return Memory(
        gpu=peak,
        fragmentation=passing * k.fragmentation,
        cached=cached,
        context=(k.own_context if work.counted else k.context)
        + (k.collective * neighbours if mesh.size > 1 else 0.0),
        moment=moment,
        moments={name: sum(sizes.values()) for name, sizes in moments.items()},
        host=_at(held, "cpu"),
        host_building=part.params / max(1, layout.divisor("params", mesh)) + _at(held, "cpu"),
        host_building_whole=whole_bytes(shape, work).params + _at(held, "cpu"),
        nvme=_at(held, "nvme"),
    )


def _cached(
    shape: ModelShape,
    work: Workload,
    cut: Cut,
    held: Held,
    loss: float,
    peak: Sizes,
    k: MemoryConstants,
) -> float:
    """Blocks that gradients or the layer at work had aren't fit for the loss; nor the reverse."""
    layer = working_bytes(shape, work, cut)
    if work.checkpointing != "none":
        layer += layer_bytes(shape, work, cut)
    stale = 0.0 if work.in_backward else max(0.0, _on_gpu(held, "grads") - peak["gradients"])
    if work.counted:
        # Seen on an H200: gradients fit where activations were, and so do the pieces of a loss,
        # unless the head's gradient comes to lie between them.
        stale = 0.0
        loss = 0.0 if work.loss == "pieces" and work.adapter is not None else loss
    cached = min(loss, layer) * k.mismatch + stale * k.stale
    if work.variable_lengths:
        cached += (peak["activations"] + peak["logits"]) * k.variable
    return cached


def _moments(
    layout: Layout,
    shape: ModelShape,
    mesh: Mesh,
    work: Workload,
    cut: Cut,
    held: Held,
    k: MemoryConstants,
) -> dict[Moment, Sizes]:
    params, optim = _on_gpu(held, "params"), _on_gpu(held, "optim")
    grads = 0.0 if work.in_backward else _on_gpu(held, "grads")
    before = grads if work.microbatches > 1 else 0.0  # summed up by the micro-batches before
    at_loss, gathered = _gathered(layout, shape, mesh, work, cut)
    casts = _casts(shape, work, cut)
    sending = _sending(layout, shape, mesh, work, cut)
    stack, layer = stack_bytes(shape, work, cut), layer_bytes(shape, work, cut)
    at_work = working_bytes(shape, work, cut) + (0.0 if work.checkpointing == "none" else layer)
    if work.counted and work.checkpointing == "full":
        at_work -= boundary_bytes(shape, work, cut)  # what the layer begins with is in the stack
    logits = logit_bytes(shape, work, cut, k)
    head = _head_gradient(shape, work, cut)

    def sizes(**classes: float) -> Sizes:
        base: Sizes = {"params": params, "gradients": 0.0, "optimizer": optim, "activations": 0.0}
        base |= {"logits": 0.0, "buffers": 0.0}
        return base | classes  # type: ignore[return-value]

    start = sizes(
        gradients=before + head,
        activations=stack + at_work,
        logits=kept_logit_bytes(shape, work, cut),
        buffers=gathered
        + casts.backward
        + (head * work.widths.reduced / work.widths.compute if sending else 0.0),
    )
    # The last layer's turn: nothing is kept any more but what it works on.
    end = sizes(
        gradients=max(before, grads - _still_to_come(shape, work, grads)),
        activations=layer + working_bytes(shape, work, cut),
        buffers=gathered + sending + casts.layer,
    )
    return {
        "forward": sizes(
            gradients=before + (head if work.loss == "pieces" or not work.counted else 0.0),
            activations=stack,
            logits=logits,
            buffers=at_loss + casts.forward,
        ),
        "backward": max(start, end, key=lambda each: sum(each.values())),
        "optimizer": sizes(gradients=grads, buffers=_updating(layout, shape, mesh, held, work)),
        "evaluation": sizes(
            activations=working_bytes(shape, work, cut) + boundary_bytes(shape, work, cut),
            logits=logits * 0.6,  # without the gradient
            buffers=gathered,
        ),
        "save": sizes(buffers=gathered),
    }


@dataclass(frozen=True)
class _Casts:
    """16-bit copies of fp32 weights: at the loss, as the backward pass begins, and of a layer."""

    forward: float
    backward: float
    layer: float


def _casts(shape: ModelShape, work: Workload, cut: Cut) -> _Casts:
    if not work.autocast:
        return _Casts(0.0, 0.0, 0.0)
    width = work.widths.compute / cut.tensor
    layers = shape.layers + shape.encoder_layers
    if work.adapter is not None:
        every, head = work.trained(shape) * width / cut.pipeline, 0.0
    else:
        every = (shape.parameters - shape.embedding_parameters) * width / cut.pipeline
        head = 0.0 if work.loss == "pieces" else shape.vocab * shape.hidden * width
    one = every / layers * cut.pipeline
    if work.checkpointing == "none":
        return _Casts(every + head, every, one)
    # Autocast remembers its casts until the forward pass is over; what is compiled has its own.
    return _Casts((0.0 if work.kernels == "compiled" else every) + head, one, one)


def _still_to_come(shape: ModelShape, work: Workload, grads: float) -> float:
    """Gradients that aren't there yet while the last layer is at work: its own, the embedding's."""
    if not work.counted or work.adapter is not None:
        return 0.0
    missing = shape.largest_layer + (0 if shape.tied else shape.parameters_in("embedding"))
    return grads * missing / shape.parameters


def _gathered(
    layout: Layout, shape: ModelShape, mesh: Mesh, work: Workload, cut: Cut
) -> tuple[float, float]:
    """Weights that are whole for the moment, at the loss and while a layer is at work: gathered
    from others, or unpacked."""
    unpacked = 0.0
    if work.packed_bits is not None:
        unpacked = shape.largest_linear * work.widths.compute / cut.tensor
    if layout.divisor("params", mesh) == 1 and layout.home.get("params", "gpu") == "gpu":
        return unpacked, unpacked
    width = work.widths.gathered
    layer = shape.largest_layer * width / cut.tensor
    if work.packed_bits is not None:
        layer *= work.packed_bits / 8 / width
    ends = shape.embedding_parameters * width / cut.tensor
    gathers = [move for _, move in layout.moves(mesh) if move.what in WEIGHTS]
    if len(gathers) == 1 and "params" not in _copied(layout):
        whole = shape.parameters * held_share(shape, cut) * width + unpacked
        return whole, whole
    if work.buckets is not None:
        live = min(work.buckets.live, shape.parameters / cut.tensor) * width
        whole = max(live, layer + ends) + unpacked
        return whole, whole
    several = layer * (2 if work.prefetch else 1) + unpacked
    if work.ends_apart and not shape.tied:
        return ends / 2 + layer, several
    return ends + several, ends + several


def _sending(layout: Layout, shape: ModelShape, mesh: Mesh, work: Workload, cut: Cut) -> float:
    """Gradients that are whole for the moment, and the buffers that they are sent in."""
    if mesh.size == 1 and work.buckets is None:
        return 0.0
    if work.buckets is not None:
        # One is filled while the other is sent.
        return (2 if work.overlap else 1) * work.buckets.reduce * work.widths.compute
    if layout.divisor("grads", mesh) == 1:
        return 0.0
    # A layer's, or at last those of the embedding and the head.
    ends = shape.embedding_parameters // (2 if work.ends_apart and not shape.tied else 1)
    largest = max(shape.largest_layer, ends)
    if work.adapter is not None:
        largest = work.trained(shape) // (shape.layers + shape.encoder_layers)
    return largest * (work.widths.compute + work.widths.reduced) / cut.tensor


def _head_gradient(shape: ModelShape, work: Workload, cut: Cut) -> float:
    """The first gradient that there is, while all activations are still there."""
    if work.adapter is not None:
        return 0.0
    # Autocast's backward pass ends in the width of the weight; so does our loss in pieces.
    wide = work.autocast or work.loss == "pieces"
    width = work.widths.gradients if wide else work.widths.compute
    return shape.vocab * shape.hidden * width / cut.tensor


def _updating(layout: Layout, shape: ModelShape, mesh: Mesh, held: Held, work: Workload) -> float:
    """What the update needs beside the states: a temporary, a bucket to collect weights in."""
    temporary = _on_gpu(held, "optim") / 2 if work.foreach else 0.0  # one of two moments
    whole = layout.divisor("params", mesh) == 1 and layout.divisor("optim", mesh) > 1
    if work.buckets is None or not whole:
        return temporary
    return temporary + min(work.buckets.gather, work.trained(shape)) * work.widths.gathered


def _copied(layout: Layout) -> frozenset[State]:
    return frozenset(state for rule in layout.rules for state in rule.copies)


def _on_gpu(held: Held, state: State) -> float:
    return float(held.bytes.get((state, "gpu"), 0))


def _at(held: Held, home: Home) -> float:
    return float(sum(size for (_, place), size in held.bytes.items() if place == home))
