"""Bytes on one GPU by class, the peak and the moment it happens; bytes in CPU memory and on disk.

States come from the layout (`predict_held`), what comes and goes from `moments`. What this module
adds is what lies around it: the allocator's losses, CUDA's own memory, the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.core.footprint import Held, predict_held
from shardtune.core.layout import Home, Layout, State
from shardtune.core.mesh import Mesh
from shardtune.core.model.shape import ModelShape
from shardtune.plan.estimate.activations import layer_bytes, waiting_bytes, working_bytes
from shardtune.plan.estimate.constants import MEMORY, MemoryConstants
from shardtune.plan.estimate.memory_timeline import ClassBytes, MemoryPhase, memory_timeline, on_gpu
from shardtune.plan.estimate.rank_share import RankShare, held_share, spread_evenly, states_of
from shardtune.plan.estimate.transient_buffers import persistent_bytes, scale_bytes
from shardtune.plan.estimate.workload import Workload, whole_bytes

NODE = 8
"""Ranks of a node for which NCCL keeps buffers."""


@dataclass(frozen=True)
class Memory:
    """One rank's bytes; on the GPU at the moment when they are most."""

    gpu: ClassBytes
    """What is allocated at the peak, by class."""
    fragmentation: float
    """What is lost between blocks: beside the peak, or what more is needed at another moment."""
    cached: float
    """Whole blocks that the allocator keeps for later, and gives back when memory is short."""
    context: float
    """CUDA's and NCCL's own memory, which torch doesn't count."""
    moment: MemoryPhase
    """When the peak happens: `forward` is its end, with the loss; and so on."""
    moments: dict[MemoryPhase, float]
    """What is allocated at each moment."""
    host: float
    """CPU memory of a rank for states that live there, and for activations that wait there."""
    host_building: float
    """CPU memory of a rank while its share of the model comes into being."""
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
    places = RankShare.extremes(shape, mesh, work)
    found = [_at_place(layout, shape, mesh, work, cut, k) for cut in places]
    return max(found, key=lambda memory: memory.required)


def _at_place(
    layout: Layout,
    shape: ModelShape,
    mesh: Mesh,
    work: Workload,
    cut: RankShare,
    k: MemoryConstants,
) -> Memory:
    part = states_of(whole_bytes(shape, work), shape, cut)
    held = held_by(layout, shape, mesh, work, cut)
    moments = memory_timeline(layout, shape, mesh, work, cut, held, k)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    peak = moments[moment]
    # A moment with less allocated may lose more between its blocks.
    needed = max(_with_fragmentation(sizes, k) for sizes in moments.values())
    cached = _cached(shape, work, cut, held, moments["forward"]["logits"], peak, k)
    neighbours = min(mesh.size, NODE)
    wider = 0.0
    if work.widths.loaded is not None:
        wider = work.trained(shape) * (work.widths.loaded - work.widths.trained)
    return Memory(
        gpu=peak,
        fragmentation=needed - sum(peak.values()),
        cached=cached,
        context=(k.own_context if work.counted else k.context)
        + (k.collective * neighbours if mesh.size > 1 else 0.0),
        moment=moment,
        moments={name: sum(sizes.values()) for name, sizes in moments.items()},
        host=_at(held, "cpu") + waiting_bytes(shape, work, cut),
        host_building=spread_evenly(layout, mesh, "params", part.params, part.experts.params)
        + wider * held_share(shape, cut)
        + _at(held, "cpu"),
        host_building_whole=whole_bytes(shape, work).params + wider + _at(held, "cpu"),
        nvme=_at(held, "nvme"),
    )


def _with_fragmentation(sizes: ClassBytes, k: MemoryConstants) -> float:
    passing = sizes["activations"] + sizes["logits"] + sizes["buffers"]
    return sum(sizes.values()) + passing * k.fragmentation


def held_by(layout: Layout, shape: ModelShape, mesh: Mesh, work: Workload, cut: RankShare) -> Held:
    """What a rank holds between two steps. Small weights and scales may be whole on every rank."""
    part = states_of(whole_bytes(shape, work), shape, cut)
    held = predict_held(layout.without_masters(), mesh, part)
    place: tuple[State, Home] = ("params", "gpu")
    scales = held_share(shape, cut) * scale_bytes(layout, shape, mesh, work)
    whole = round(persistent_bytes(layout, shape, mesh, work) + scales)
    return Held({**held.bytes, place: held.bytes.get(place, 0) + whole}) if whole else held


def _cached(
    shape: ModelShape,
    work: Workload,
    cut: RankShare,
    held: Held,
    loss: float,
    peak: ClassBytes,
    k: MemoryConstants,
) -> float:
    """Blocks that gradients or the layer at work had aren't fit for the loss; nor the reverse."""
    layer = working_bytes(shape, work, cut)
    if work.checkpointing != "none":
        layer += layer_bytes(shape, work, cut)
    stale = 0.0 if work.in_backward else max(0.0, on_gpu(held, "grads") - peak["gradients"])
    if work.counted:
        # Seen on an H200: gradients fit where activations were, and so do the pieces of a loss,
        # unless the head's gradient comes to lie between them.
        stale = 0.0
        loss = 0.0 if work.loss == "pieces" and work.adapter is not None else loss
    cached = min(loss, layer) * k.mismatch + stale * k.stale
    if work.variable_lengths:
        cached += (peak["activations"] + peak["logits"]) * k.variable
    return cached


def _at(held: Held, home: Home) -> float:
    return float(sum(size for (_, place), size in held.bytes.items() if place == home))
