"""The fields of DeepSpeed: ZeRO, offload, loss scaling, asynchronous I/O, by its own names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shardtune.core.job_section import Section
from shardtune.core.strategy import OverlapSetting, StrategyBase


def _whole(value: object) -> object:
    """DeepSpeed's files write sizes as 5e8, which is a float that means a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Size = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Device = Literal["none", "cpu", "nvme"]


class OffloadOptimizer(Section):
    """Where the optimizer states live between steps."""

    device: Device = "none"
    """`cpu` is CPU memory, `nvme` files in a folder. The update itself is then done by the CPU."""
    nvme_path: str | None = None
    """The folder for `nvme`. Its files are removed when the run ends."""
    pin_memory: bool | None = None
    """Page-locked memory, for faster copies; null does so where there is a GPU."""
    buffer_count: Size | None = None
    """Buffers for `nvme`: at least one for each tensor that a weight's update needs (Adam: 4)."""
    pipeline_read: bool | None = None
    """Read the next tile while this one is updated (`nvme`)."""
    pipeline_write: bool | None = None
    """Write the last tile while this one is updated (`nvme`)."""
    fast_init: bool | None = None
    """Quicker first write (`nvme`)."""
    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of the states that is offloaded (stage 3)."""


class OffloadParam(Section):
    """Where the shards of the weights are stored between uses. Stage 3 only."""

    device: Device = "none"
    """`cpu` is CPU memory, `nvme` files in a folder."""
    nvme_path: str | None = None
    """The folder for `nvme`. Its files are removed when the run ends."""
    pin_memory: bool | None = None
    """Page-locked memory, for faster copies; null does so where there is a GPU."""
    buffer_count: Size | None = None
    """Buffers for `nvme`."""
    buffer_size: Size | None = None
    """Elements of a buffer for `nvme`; at least as many as the largest weight."""
    max_in_cpu: Count | None = None
    """Elements that stay in CPU memory with `nvme`."""


class ZeRO(Section):
    """What is sharded over the ranks, where it is stored, and how it is communicated."""

    stage: Annotated[int, Field(ge=0, le=3)] = 2
    """0 shards nothing, 1 the optimizer states, 2 also the gradients, 3 also the weights."""
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    """Where the optimizer states live."""
    offload_param: OffloadParam = OffloadParam()
    """Where the weights live (stage 3)."""
    zero_hpz_partition_size: Size = 1
    """ZeRO++ (hpZ): keep a second copy of the weights, sharded over this many neighbouring ranks,
    so that the backward pass gathers inside a node. 1 keeps none."""
    zero_quantized_weights: bool = False
    """ZeRO++: gather weights as 8-bit numbers. It changes the result slightly. GPU only."""
    zero_quantized_nontrainable_weights: bool | None = None
    """Keep and gather frozen weights as 8-bit numbers. GPU only."""
    zero_quantized_gradients: bool = False
    """ZeRO++: send gradients as 4-bit numbers. It changes the result slightly. GPU only."""
    round_robin_gradients: bool | None = None
    """Spread the copying of gradients to CPU memory evenly (stages 1 and 2 with offload)."""
    reduce_bucket_size: Size | None = None
    """Elements of gradients that are reduced at once."""
    allgather_bucket_size: Size | None = None
    """Elements of weights that are gathered at once (stages 1 and 2)."""
    reduce_scatter: bool | None = None
    """Reduce to the rank that needs the gradient; false sends the sum to all, twice the bytes."""
    allgather_partitions: bool | None = None
    """Collect updated weights by all-gather, not by broadcasts."""
    overlap_comm: bool | None = None
    """Send gradients while the backward pass goes on."""
    contiguous_gradients: bool | None = None
    """Copy gradients into one buffer as they come."""
    use_multi_rank_bucket_allreduce: bool | None = None
    """Reduce the buckets of several ranks together (stages 1 and 2)."""
    ignore_unused_parameters: bool | None = None
    """Allow weights that a forward pass doesn't use."""
    parameter_alignment: bool | None = None
    """Let each weight start at a multiple of 16 bytes in the flat buffers (stages 1 and 2)."""
    sub_group_size: Count | None = None
    """Elements that are updated at once (stage 3); 0 updates weight by weight."""
    memory_efficient_linear: bool | None = None
    """Linear layers that don't keep gathered weights for the backward pass (stage 3)."""
    stage3_prefetch_bucket_size: Count | None = None
    """Elements of weights that are gathered ahead of use."""
    stage3_param_persistence_threshold: Count = 0
    """Weights of at most this many elements stay whole on every rank. DeepSpeed's default is
    100,000; 0 divides every weight, as the layout declares."""
    stage3_model_persistence_threshold: Count | None = None
    """Elements that may stay whole altogether."""
    stage3_max_live_parameters: Count | None = None
    """Gathered elements that a rank may hold; beyond, it lets some go."""
    stage3_max_reuse_distance: Count | None = None
    """A weight that is needed again within so many elements is kept."""
    stage3_gather_16bit_weights_on_model_save: bool | None = None
    """DeepSpeed's own saving; shardtune always saves whole weights."""
    stage3_module_granularity_threshold: Count | None = None
    """Modules finer than this are gathered as one."""
    stage3_use_all_reduce_for_fetch_params: bool | None = None
    """Gather by all-reduce."""
    stage3_allgather_sequential: bool | None = None
    """Gather weight by weight, without a buffer for several."""


class LossScale(Section):
    """How the loss is scaled so that fp16 gradients don't vanish."""

    loss_scale: Annotated[float, Field(ge=0)] | None = None
    """0 adapts it as the run goes; another number stays."""
    initial_scale_power: Count | None = None
    """It starts at 2 to this power."""
    loss_scale_window: Size | None = None
    """Steps without overflow after which it is doubled."""
    hysteresis: Size | None = None
    """Overflows before it is halved."""
    consecutive_hysteresis: bool | None = None
    """Count those anew after each good step."""
    min_loss_scale: Annotated[float, Field(ge=0)] | None = None
    """It never falls below."""
    auto_cast: bool | None = None
    """Cast the model's inputs; token ids need none."""


class AsyncIO(Section):
    """How `nvme` reads and writes."""

    block_size: Size | None = None
    """Bytes of one request."""
    queue_depth: Size | None = None
    """Requests under way at a time."""
    thread_count: Size | None = None
    """Threads that one request is cut up for; DeepSpeed's older name."""
    intra_op_parallelism: Size | None = None
    """Threads that one request is cut up for."""
    single_submit: bool | None = None
    """Submit requests one by one instead of together."""
    overlap_events: bool | None = None
    """Submit new requests while old ones are waited for."""
    use_gds: bool | None = None
    """Copy between disk and GPU directly (NVIDIA GPUDirect Storage)."""


class DeepSpeedFields(StrategyBase):
    """All that a job may say of DeepSpeed."""

    type: Literal["deepspeed"] = "deepspeed"
    config: str | None = None
    """A DeepSpeed JSON file. Its `auto` values are taken from the job."""
    zero_optimization: ZeRO = ZeRO()
    """ZeRO's stage, offload and communication."""
    fp16: LossScale = LossScale()
    """Loss scaling; `train.precision: fp16` switches it on."""
    aio: AsyncIO = AsyncIO()
    """Reading and writing for `nvme`."""
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = None
    """What gradients are sent in; null sends them as they are."""
    prescale_gradients: bool | None = None
    """Divide gradients before they are summed, not after."""
    gradient_predivide_factor: Annotated[float, Field(gt=0)] | None = None
    """Part of that division to do before."""
    wall_clock_breakdown: bool = False
    """Print the time of forward, backward and update."""

    def overlap_settings(self) -> tuple[OverlapSetting, ...]:
        """Buckets, overlap, and for stage 3 prefetch and persistence."""
        zero = self.zero_optimization
        names = ["overlap_comm", "reduce_bucket_size"]
        names += ["allgather_bucket_size"] if zero.stage < 3 else _STAGE_3
        return tuple(
            OverlapSetting(
                f"zero_optimization.{name}",
                "DeepSpeed's default" if (value := getattr(zero, name)) is None else str(value),
                _OVERLAP[name],
            )
            for name in names
        )


_STAGE_3 = [
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
]  # fmt: skip
_OVERLAP = {
    "overlap_comm": "true reduces gradients while the backward pass goes on",
    "reduce_bucket_size": "elements reduced at once: larger means fewer messages, more memory",
    "allgather_bucket_size": "elements gathered at once after the update",
    "stage3_prefetch_bucket_size": "elements gathered ahead of use: larger hides more",
    "stage3_param_persistence_threshold": "smaller weights stay whole and aren't gathered",
    "stage3_max_live_parameters": "gathered elements held at once: more saves a second gather",
}
