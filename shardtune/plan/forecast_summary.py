"""The figures of a forecast, as `estimate --json` and `plan --json` print them."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from shardtune.core.layout import Cargo, Of, Op, When
from shardtune.core.record import Record
from shardtune.plan.estimate.comms import Where
from shardtune.plan.estimate.memory_band import Verdict
from shardtune.plan.estimate.memory_timeline import MemoryPhase


class GpuMemory(Record):
    """GiB on the GPU of the rank that holds most, at its peak."""

    params: float
    """Weights."""
    gradients: float
    optimizer: float
    """Optimizer states."""
    activations: float
    """What the forward pass saves for the backward pass."""
    logits: float
    buffers: float
    """Gathered and cast weights, and what collectives send."""
    overhead: float
    """Fragmentation, and CUDA's and NCCL's own memory."""
    peak: float
    """All that the device has in use, as nvidia-smi shows it."""
    required: float
    """What must fit: `peak` without blocks that the allocator would give back."""
    lower: float
    upper: float
    """The band in which `required` lies, as forecasts of such jobs were off."""
    capacity: float
    """Of one GPU, or `train.memory_gib` where that is less."""
    moment: MemoryPhase
    """When the peak happens."""
    moments: dict[MemoryPhase, float]
    """What is allocated at each moment."""


class HostMemory(Record):
    """GiB of CPU memory."""

    states: float
    """Of a rank: states and activations that are offloaded there."""
    building: float
    """Of a rank, while its share of the model is loaded."""
    building_whole: float
    """The same if every rank built the whole model."""
    node: float
    """Of all ranks of a node together."""
    node_capacity: float | None
    """What a node has; null if unknown."""


class TrafficMove(Record):
    """One collective of the strategy, all its messages of a step together."""

    op: Op
    what: Cargo
    """What it carries."""
    of: Of
    """Whose: of all weights, of experts, or of all others."""
    axis: str
    """The mesh axis whose ranks take part."""
    when: When
    link: Where
    gib: float
    """What one GPU sends for it in a step."""


class Traffic(Record):
    """GiB that one GPU sends in a step."""

    intra_node: float
    inter_node: float
    leaves_node: float
    """What all GPUs of a node together send out of it."""
    moves: tuple[TrafficMove, ...]


class StepSeconds(Record):
    """One optimizer step, part by part. Of parts that overlap the longer one counts."""

    compute: float
    communication: float
    """Exposed communication: what no compute hides."""
    optimizer: float
    offload: float
    bubble: float
    """Pipeline bubble: stages that wait for others."""
    data: float
    total: float


class ParameterCounts(Record):
    """Parameters of the model; an adapter counts in `trained` only."""

    total: int
    active: int
    """Parameters that one token uses: with experts fewer than `total`."""
    trained: int


class ForecastSummary(Record):
    """One job on one cluster: memory, traffic and time."""

    fits: bool
    verdict: Verdict
    """`tight` if the expected memory fits, but not the upper end of its error band."""
    strategy: str
    mesh: dict[str, int]
    """Ranks of each mesh axis."""
    gradient_checkpointing: str
    """The level of activation checkpointing."""
    keep_layers: int
    """Layers that are exempt from it."""
    parameters: ParameterCounts
    gpu_gib: GpuMemory
    host_gib: HostMemory
    nvme_gib: float
    """Of a rank, on its disk."""
    traffic_gib: Traffic
    step_seconds: StepSeconds
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    expert_imbalance: float
    """Tokens of the busiest rank's experts over the mean, as assumed; 1 where ranks don't divide
    experts."""
    mfu: float
    """Model FLOPs utilisation; relative to the FP8 peak if frozen weights are multiplied in it."""
    hours: float | None
    """Of the whole run; null where only the data tells how many steps it has."""
    cost: float | None
    """Of the whole run; null without a price."""
    reasons: tuple[str, ...]
    """What was assumed; for a job that doesn't fit also what is missing, and the fix."""


class DryRunSummary(Record):
    """A step that was run on fake tensors, compared with the closed form."""

    kernels: Literal["eager"]
    allocated_gib: float
    moment: str
    gpu_gib: dict[str, float]
    """What the peak is made of."""
    closed_form_gib: float
    difference: float
    """The closed form's, as a share of what was replayed."""


class ChosenValue(Record):
    """The value chosen for an `auto` of the job."""

    key: str
    value: JsonValue
    why: str


class EstimateResult(ForecastSummary):
    """What `estimate --json` prints."""

    chosen: tuple[ChosenValue, ...]
    """The values chosen for each `auto`: strategy, micro-batch, activation checkpointing, precision
    and so on."""
    dry_run: DryRunSummary | None = None
    """With `--dry-run` only."""


class BestCandidate(ForecastSummary):
    """The forecast of the best strategy."""

    name: str


class CandidateSummary(Record):
    """A strategy that was tried. Figures are null if it is impossible."""

    name: str
    fits: bool
    verdict: Verdict
    why: str
    """Why it wins or loses."""
    step_seconds: float | None
    gpu_gib: float | None
    """What must fit."""
    cost: float | None
    micro_batch: int | None
    gradient_checkpointing: str | None
    keep_layers: int | None


class PlanResult(Record):
    """What `plan --json` prints."""

    best: BestCandidate | None
    """Null where nothing fits."""
    fix: str | None
    """The smallest change or cluster that would do, where nothing fits."""
    candidates: tuple[CandidateSummary, ...]
    """The best first."""
