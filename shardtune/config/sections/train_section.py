"""`train`: how a run trains, and what it does when a step goes wrong."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from shardtune.config.sections.field_types import (
    Auto,
    NotNegative,
    NotNegativeNumber,
    Positive,
)
from shardtune.config.sections.optimizer_section import AdamW, Optimizer
from shardtune.config.sections.watched_metric_section import EarlyStop
from shardtune.core.job_section import Section
from shardtune.core.lr_one_cycle import OneCycle
from shardtune.core.lr_schedule import ScheduleKind
from shardtune.core.setup import Loss, Precision, Recompute

Kernels = Literal["eager", "compiled"]


class TrainSection(Section):
    """How to train."""

    steps: Positive | None = None
    """Optimizer steps. Give this or `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data. Give this or `steps`; with neither, one."""
    global_batch: Annotated[int, Field(ge=1, le=10**7)] = 16
    """Rows in one optimizer step over all ranks (packed rows where `packing` is on)."""
    micro_batch: Auto | Positive = "auto"
    """Rows in one forward pass on one rank. It changes memory and speed, never the result (but for
    the random numbers of dropout, where there is any). `auto`: on GPUs the fewest that are about as
    fast as any that fit, by the forecast; elsewhere up to 4,096 tokens."""
    learning_rate: Annotated[float, Field(gt=0, le=1e4)] = 2e-4
    """The highest rate of the schedule."""
    schedule: ScheduleKind = "cosine"
    """How the rate falls after the warmup. `one_cycle` rises and falls as torch's OneCycleLR, by
    the three numbers of `one_cycle`, and takes no `warmup_steps`."""
    one_cycle: OneCycle = OneCycle()
    """The shape of `schedule: one_cycle`."""
    warmup_steps: NotNegative = 0
    """Steps in which the rate rises from zero."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The same as a share of the run, rounded up. Give this or `warmup_steps`."""
    schedule_start: NotNegative = 0
    """The step after which the schedule begins: warmup and decay go from there to the end. Set by
    `--resume --restart-schedule`, when a run that came to its end is extended."""
    earlier_ends: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """The epochs after which a run that was extended had come to its end before. A step that was
    short there stays so, and the next begins with the row after it. Set by `--resume`."""
    precision: Auto | Precision = "auto"
    """Of the computation: `bf16` or `fp16` (mixed precision, the latter with loss scaling), or
    `fp32`. `auto` takes bf16 where the device is fast in it; else fp16 on a GPU and fp32 on a CPU.
    Weights that are trained are kept in fp32 in any case; how frozen ones are stored is
    `model.quantization`."""
    gradient_checkpointing: Auto | Recompute = "none"
    """Activation checkpointing: what the backward pass recomputes instead of keeping it. `none`
    keeps the result of every matmul (small operations between them are recomputed where layers are
    compiled), `mlp` drops the wide ones of the MLP, `most` keeps only attention, `full` nothing but
    each layer's input: least memory, about a third more time. `mlp` and `most` are for `ddp` and
    `fsdp`. `auto` takes the lowest level that fits into the memory, by the forecast, and sets
    `keep_layers` too."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """What a rank may take of its GPU, in GiB: the forecast, and what is chosen by it, keep to it.
    Null: all that the GPU has."""
    keep_layers: NotNegative = 0
    """So many of the layers, the last ones, are exempt from `gradient_checkpointing: mlp` or
    `most`: memory that is left buys time."""
    offload_activations: bool = False
    """What the forward pass saves waits for the backward pass in pinned CPU memory, copied beside
    the computation: the GPU keeps about two layers of it. With `gradient_checkpointing: full` it is
    little; without, computing often waits for the link to the host. On a GPU, under
    `strategy: ddp`."""
    loss: Auto | Loss = "auto"
    """`fused` computes output head and loss together, in pieces: the logits of a micro-batch, often
    the largest thing of all, never exist at once. `auto` does so on a GPU."""
    kernels: Auto | Kernels = "auto"
    """`compiled` fuses the small operations of each layer (torch.compile, some 20 seconds once);
    `eager` runs each as transformers writes it. `auto` compiles on a GPU."""
    router_aux_loss_coef: Auto | NotNegativeNumber = "auto"
    """Weight of the load-balancing loss of a mixture of experts, over all tokens of a step. `auto`
    takes what the model's config.json says, if it says that the loss is used
    (`output_router_logits`), else 0. With several micro-batches a step it takes a forward pass
    more."""
    router_z_loss_coef: NotNegativeNumber = 0.0
    """Weight of the mean square of the log of the routers' partition sums (ST-MoE's z-loss)."""
    log_every: Positive = 1
    """Steps between two sync points. At each, loss, gradient norm and health of all steps since the
    last are read and logged, but for the newest, so that a GPU never waits for the log. A gradient
    that is not finite is reported there, too. An evaluation, a checkpoint and the end of the run
    begin with a sync point of their own, which reads every step."""
    preflight: bool = True
    """Try the largest micro-batch, an evaluation and the disk before the first step, so that what
    doesn't fit shows at once and not hours later. It changes nothing that is computed."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Longer gradients are scaled down to this length; null never clips."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides order, initial adapters and dropout."""
    optimizer: Optimizer = AdamW()
    """The update rule."""
    early_stop: EarlyStop | None = None
    """Early stopping: ends the run when a metric gets no better. Null runs all steps."""
    on_nan: Literal["skip", "stop"] = "skip"
    """What to do when a gradient is not finite: leave the update out on every rank, or stop. The
    rank and the samples are named either way."""
    on_oom: Literal["stop", "reduce_micro_batch"] = "stop"
    """What to do when memory runs out: stop and say what to change, or go on from the last
    checkpoint with half the micro-batch, which changes nothing else. In the preflight of a new run
    one that the forecast has chosen is halved in any case, by our own launcher."""

    def warmup(self, steps: int) -> int:
        """Steps of warmup in a schedule over so many."""
        ratio = self.warmup_ratio
        return self.warmup_steps if ratio is None else math.ceil(steps * ratio)

    @property
    def compute_precision(self) -> Precision:
        """The precision of the computation, once `auto` is replaced."""
        assert self.precision != "auto"
        return self.precision

    @property
    def balances_experts(self) -> float:
        """The weight of the load-balancing loss; none where nobody could tell."""
        return 0.0 if self.router_aux_loss_coef == "auto" else self.router_aux_loss_coef

    @property
    def recompute(self) -> Recompute:
        """The level of activation checkpointing, once `auto` is replaced."""
        assert self.gradient_checkpointing != "auto"
        return self.gradient_checkpointing
