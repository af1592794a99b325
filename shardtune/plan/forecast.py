"""One job on one cluster: its memory, traffic and step time. No weights, no data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shardtune.config.job import IA3, AdamW, Job, LoRA, NoAdapter
from shardtune.config.model_rules import check_model
from shardtune.core.footprint import Held
from shardtune.core.layout import Layout
from shardtune.core.mesh import Mesh
from shardtune.core.model.adapter_size import (
    ia3_parameters,
    lora_parameters,
    require_plain_experts,
)
from shardtune.core.model.architectures import ia3_modules
from shardtune.core.model.family_support import (
    SINK_FAMILIES,
    WITHOUT_BOUNDARIES,
    require_attention,
    require_isolation,
)
from shardtune.core.model.parallel_plan import require_cuttable
from shardtune.core.model.quantized_size import (
    quantizable,
    require_quantizable,
    require_whole_blocks,
)
from shardtune.core.model.row_length import require_short_rows
from shardtune.core.model.shape import ModelShape
from shardtune.core.setup import captured_tokens
from shardtune.core.units import GIB
from shardtune.errors import JobError, Problem
from shardtune.plan.cluster import Cluster
from shardtune.plan.estimate.comms import leaving
from shardtune.plan.estimate.constants import speed_assumption
from shardtune.plan.estimate.expert_load import imbalance, load_assumption
from shardtune.plan.estimate.memory import Memory, estimate_memory, held_by
from shardtune.plan.estimate.memory_band import MemoryBand, Verdict, memory_band
from shardtune.plan.estimate.rank_share import RankShare
from shardtune.plan.estimate.step_time import SpeedEstimate, estimate_speed
from shardtune.plan.estimate.workload import (
    ALTERNATING,
    NF4_DOUBLE_BITS,
    AdapterSize,
    Pair,
    Widths,
    Workload,
)
from shardtune.plan.forecast_summary import (
    ForecastSummary,
    GpuMemory,
    HostMemory,
    ParameterCounts,
    StepSeconds,
    Traffic,
    TrafficMove,
)

INT8_BITS = 8.0
EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256)
"""Two moments of a byte each, and an fp32 scale for 256 of them."""


@dataclass(frozen=True)
class Forecast:
    """Memory, traffic and step time of a job on a cluster."""

    job: Job
    shape: ModelShape
    cluster: Cluster
    mesh: Mesh
    layout: Layout
    work: Workload
    memory: Memory
    speed: SpeedEstimate
    reasons: tuple[str, ...]

    @property
    def capacity(self) -> float:
        """Bytes of one GPU, or `train.memory_gib` if that is less."""
        whole, told = self.cluster.gpu.memory_gib, self.job.train.memory_gib
        return (whole if told is None else min(whole, told)) * GIB

    @property
    def over(self) -> float:
        """Bytes missing on a GPU; negative if some are left."""
        return self.memory.required - self.capacity

    @property
    def host(self) -> float:
        """Bytes of CPU memory that the ranks of a node need together."""
        per_rank = max(self.memory.host, self.memory.host_building)
        return per_rank * min(self.mesh.size, self.cluster.gpus_per_node)

    @property
    def host_over(self) -> float:
        """Bytes of CPU memory missing on a node; negative if some are left."""
        room = self.cluster.host_gib
        return -1.0 if room is None else self.host - room * GIB

    @property
    def fits(self) -> bool:
        return self.over <= 0 and self.host_over <= 0

    @property
    def band(self) -> MemoryBand:
        """The error band of `memory.required`, in bytes."""
        in_parts = max(self.mesh.size_of("tensor"), self.mesh.size_of("pipeline")) > 1
        return memory_band(self.memory.required, self.work, in_parts=in_parts)

    @property
    def verdict(self) -> Verdict:
        """`tight` if the expected memory fits, but not the upper end of its error band."""
        if not self.fits:
            return "does not fit"
        return "fits" if self.band.upper <= self.capacity else "tight"

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest rank's experts over the mean; 1 where ranks don't divide them."""
        return imbalance(self.shape, self.mesh.size_of("expert"))

    @property
    def checkpointing(self) -> str:
        """The level of activation checkpointing, and how many layers are exempt from it."""
        kept = self.work.kept_layers
        return self.work.checkpointing + (f", not {kept} layers" if kept else "")

    @property
    def held(self) -> Held:
        """What the first rank holds between two steps, by state: as an engine's own answer."""
        cut = RankShare.of(self.shape, self.mesh, self.work)
        return held_by(self.layout, self.shape, self.mesh, self.work, cut)

    @property
    def hours(self) -> float | None:
        """Of the whole run; None where only the data can tell how many steps it has."""
        steps = self.job.train.steps
        return None if steps is None else steps * self.speed.step.total / 3600

    @property
    def cost(self) -> float | None:
        price = self.cluster.price_per_hour
        return None if price is None or self.hours is None else price * self.hours

    def summary(self) -> ForecastSummary:
        """The figures, for `--json`."""
        memory, speed, step = self.memory, self.speed, self.speed.step
        sizes: dict[str, float] = {name: size / GIB for name, size in memory.gpu.items()}
        return ForecastSummary(
            fits=self.fits,
            verdict=self.verdict,
            strategy=self.job.strategy.type,
            mesh=dict(self.mesh.axes),
            gradient_checkpointing=self.work.checkpointing,
            keep_layers=self.work.kept_layers,
            gpu_gib=GpuMemory(
                **sizes,
                overhead=memory.overhead / GIB,
                peak=memory.peak / GIB,
                required=memory.required / GIB,
                lower=self.band.lower / GIB,
                upper=self.band.upper / GIB,
                capacity=self.capacity / GIB,
                moment=memory.moment,
                moments={name: size / GIB for name, size in memory.moments.items()},
            ),
            host_gib=HostMemory(
                states=memory.host / GIB,
                building=memory.host_building / GIB,
                building_whole=memory.host_building_whole / GIB,
                node=self.host / GIB,
                node_capacity=self.cluster.host_gib,
            ),
            nvme_gib=memory.nvme / GIB,
            traffic_gib=self.traffic(),
            step_seconds=StepSeconds(**asdict(step), total=step.total),
            tokens_per_second=speed.tokens_per_second,
            tokens_per_second_per_gpu=speed.tokens_per_second_per_gpu,
            expert_imbalance=self.imbalance,
            mfu=speed.mfu,
            hours=self.hours,
            cost=self.cost,
            parameters=ParameterCounts(
                total=self.shape.parameters,
                active=self.shape.active_parameters,
                trained=self.work.trained(self.shape),
            ),
            reasons=self.reasons,
        )

    def traffic(self) -> Traffic:
        """GiB that one GPU sends in a step, by link and by move."""
        moves = tuple(
            TrafficMove(
                op=each.move.op,
                what=each.move.what,
                of=each.message.of,
                axis=each.axis,
                when=each.move.when,
                link=each.where,
                gib=each.wire / GIB,
            )
            for each in self.speed.sent
        )
        return Traffic(
            intra_node=sum(move.gib for move in moves if move.link == "intra_node"),
            inter_node=sum(move.gib for move in moves if move.link == "inter_node"),
            leaves_node=leaving(self.speed.sent, self.mesh, self.cluster) / GIB,
            moves=moves,
        )


def forecast(job: Job, shape: ModelShape, cluster: Cluster) -> Forecast:
    """Forecasts memory, traffic and step time of `job` on all GPUs of `cluster`."""
    mesh, layout = job.strategy.mesh(cluster.gpus), job.layout(cluster.gpus)
    mesh.require(cluster.gpus)
    check_model(job, shape.kind)
    require_cuttable(shape, mesh, layout.pipelining)
    require_attention(shape.family, job.model.attention)
    require_isolation(shape.family, packing=job.data.packing is True)
    require_short_rows(shape, job.data.sequence_length)
    _require_precision(job, cluster)
    if job.model.quantization != "none":
        kind, experts = job.model.quantization, shape.experts is not None
        require_quantizable(quantizable(shape), kind, experts=experts)
    if job.model.quantization == "nf4" and shape.experts and mesh.size_of("expert") > 1:
        require_whole_blocks((shape.hidden, shape.experts.ffn))
    work = workload(job, shape, mesh)
    memory = estimate_memory(layout, shape, mesh, work)
    speed = estimate_speed(layout, shape, mesh, cluster, work)
    reasons = [*cluster.assumptions, *load_assumption(shape, mesh.size_of("expert"))]
    if not cluster.measured.matmul and cluster.gpu.name != "CPU":
        reasons += speed_assumption(cluster.gpu.name)
    if job.train.steps is None:
        reasons.append(
            "hours: only the data tells how many steps the epochs have; give train.steps"
        )
    return Forecast(job, shape, cluster, mesh, layout, work, memory, speed, tuple(reasons))


def _require_precision(job: Job, cluster: Cluster) -> None:
    """Refuses bf16 on a GPU that multiplies no such numbers."""
    if job.train.precision != "bf16" or "bf16" in cluster.gpu.matmul.fast:
        return
    if cluster.gpu.name == "CPU":  # slow, and yet it runs
        return
    fact = f"is bf16, but {cluster.gpu.matmul.why}"
    raise JobError(Problem("train.precision", fact, "set train.precision: fp16, fp32 or auto"))


def workload(job: Job, shape: ModelShape, mesh: Mesh) -> Workload:
    """The job as the estimator sees it."""
    train, level = job.train, job.train.gradient_checkpointing
    shares = mesh.data_ranks
    micro = int(train.micro_batch) if train.micro_batch != "auto" else 1
    microbatches = max(1, -(-train.global_batch // (shares * micro)))
    micro = -(-train.global_batch // (shares * microbatches))  # as data/micro_batches.py cuts rows
    can = job.strategy.capabilities
    split = job.splits_weights(mesh.size)  # which are computed with as they are
    autocast = can.trained_weights == "autocast" and not split and train.precision != "fp32"
    order = job.strategy.layout().pipelining
    packed = {"nf4": NF4_DOUBLE_BITS, "int8": INT8_BITS}.get(job.model.quantization)
    read, pair = job.data.sequence_length, None
    if shape.kind == "encoder_decoder":
        share = shape.encoder_layers / (shape.encoder_layers + shape.layers)
        pair = Pair(job.data.longest_target, share)
    buckets = job.strategy.send_buckets()
    return Workload(
        micro_batch=micro,
        sequence=read,
        pair=pair,
        scored=1.0 if pair is None else pair.target / pair.mean(read, pair.target),
        microbatches=microbatches,
        step_rows=train.global_batch,
        widths=widths(job, microbatches, split_fp32=split),
        adapter=adapter(job, shape),
        packed_bits=packed,
        fp8=job.model.quantization == "fp8",
        checkpointing="none" if level == "auto" else level,
        kept_layers=train.keep_layers if level in ("mlp", "most") else 0,
        offloaded=train.offload_activations,
        counts_routed=microbatches > 1 and train.balances_experts > 0,
        captured=microbatches == 1 and _captured(job, mesh.size, micro * read, shape),
        host_mapped=job.maps_states_to_host(mesh.size),
        attention="eager" if _writes_scores(job, shape) else "sdpa",
        loss="pieces" if train.loss == "fused" and can.fused_loss else "plain",
        kernels="compiled" if train.kernels == "compiled" else "eager",
        counted=True,
        autocast=autocast,
        dropout=shape.dropout > 0,
        attention_dropout=shape.attention_dropout > 0,
        packed_inputs=False,
        overlap=buckets is None or buckets.overlap,
        prefetch=buckets is None or buckets.prefetch > 0,
        buckets=buckets,
        sequence_parallel=mesh.size_of("tensor") > 1,
        pipelining=order or ALTERNATING,
    )


def _writes_scores(job: Job, shape: ModelShape) -> bool:
    """Whether attention is `eager`, and stays so (`models/packed_attention.py`)."""
    replaced = shape.family in SINK_FAMILIES and job.train.precision != "fp32"
    return job.model.attention == "eager" and not replaced


def _tells_boundaries(job: Job, shape: ModelShape) -> bool:
    """Whether attention would be told where documents begin and end, in place of a mask."""
    own = "eager" if shape.family in SINK_FAMILIES else "sdpa"
    asked = job.model.attention in ("auto", own)
    return asked and shape.family not in WITHOUT_BOUNDARIES and not shape.attention_dropout


def _captured(job: Job, ranks: int, tokens: int, shape: ModelShape) -> bool:
    """Whether a run on GPUs would record its passes (`engine/cuda_graphs.py`). Asked for steps of
    one micro-batch only: with several, which are recorded too, no run has been measured."""
    train = job.train
    all_trained = isinstance(job.adapter, NoAdapter)
    return (
        ranks == 1
        and _tells_boundaries(job, shape)
        and not shape.rotates_by_length
        and not (train.balances_experts or train.router_z_loss_coef)
        and tokens <= captured_tokens(shape.parameters, all_trained=all_trained)
        and (not all_trained or job.splits_weights(ranks))
        and train.kernels == "compiled"
        and train.precision == "bf16"
        and train.recompute != "full"
        and not train.offload_activations
        and job.strategy.capabilities.captures_alone
    )


def widths(job: Job, microbatches: int, *, split_fp32: bool) -> Widths:
    """Bytes a number under each engine: docs/adr/0004-precision.md says what is held in what."""
    compute = 4 if job.train.precision == "fp32" else 2
    moments = _moments(job)
    if job.strategy.capabilities.trained_weights == "compute_precision":
        # Gradients too, and masters in fp32.
        masters = 4.0 if job.strategy.layout().masters else 0.0
        return Widths(
            frozen=compute, trained=compute, gradients=compute, optimizer=masters + moments,
            gathered=compute, reduced=compute, compute=compute,
        )  # fmt: skip
    if split_fp32:
        # One micro-batch leaves its gradients in 16 bits; several are added up in fp32.
        gradients = 2 if microbatches == 1 else 4
        return Widths(trained=2, gradients=gradients, optimizer=2 + moments, loaded=4)
    return Widths(
        frozen=compute, trained=4, gradients=4, optimizer=moments,
        gathered=compute, reduced=4, compute=compute,
    )  # fmt: skip


def _moments(job: Job) -> float:
    optimizer = job.train.optimizer
    if isinstance(optimizer, AdamW):
        return EIGHT_BIT_MOMENTS if getattr(optimizer, "bits", 32) == 8 else 8.0
    return 4.0 if optimizer.momentum else 0.0


def adapter(job: Job, shape: ModelShape) -> AdapterSize | None:
    """What is trained beside the frozen model."""
    chosen = job.adapter
    if isinstance(chosen, NoAdapter):
        return None
    if isinstance(chosen, IA3):
        modules, inputs = ia3_modules(shape, chosen.targets, chosen.feedforward)
        trained = ia3_parameters(shape, chosen.targets, chosen.feedforward)
        return AdapterSize(1, modules, trained=trained, scaled_inputs=inputs)
    assert isinstance(chosen, LoRA)
    adapts_experts = shape.experts is not None and chosen.adapts_experts
    require_plain_experts(adapts_experts, chosen.dropout, chosen.variant)
    per_token = shape.experts.per_token if shape.experts else 0
    expert_rank = chosen.rank_of_experts(per_token) if adapts_experts else 0
    trained = lora_parameters(
        shape,
        chosen.rank,
        chosen.targets,
        dora=chosen.variant == "dora",
        modules_to_save=chosen.modules_to_save,
        expert_rank=expert_rank,
    )
    dora = chosen.variant == "dora"
    return AdapterSize(chosen.rank, chosen.targets, chosen.dropout, trained, expert_rank, dora)
