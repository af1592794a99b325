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
    """The peak learning rate."""
    schedule: ScheduleKind = "cosine"
    """The learning-rate schedule after the warmup. `one_cycle` is torch's OneCycleLR with the three
    numbers of `one_cycle`, and takes no `warmup_steps`."""
    one_cycle: OneCycle = OneCycle()
    """The shape of `schedule: one_cycle`."""
    warmup_steps: NotNegative = 0
    """Steps of linear warmup from zero."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The same as a share of the run, rounded up. Give this or `warmup_steps`."""
    schedule_start: NotNegative = 0
    """The step after which the schedule begins: warmup and decay go from there to the end. Set by
    `--resume --restart-schedule`, when a run that came to its end is extended."""
    earlier_ends: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """The epochs after which a run that was extended had come to its end before. A step that was
    short there stays so, and the next begins with the row after it. Set by `--resume`."""
    precision: Auto | Precision = "auto"
    """Precision of the computation: `bf16` or `fp16` (mixed precision, the latter with loss
    scaling), or `fp32`. `auto` takes bf16 where the device is fast in it; else fp16 on a GPU and
    fp32 on a CPU. Trained weights are kept in fp32 in any case; `model.quantization` says how
    frozen ones are stored."""
    gradient_checkpointing: Auto | Recompute = "none"
    """Activation checkpointing: what the backward pass recomputes instead of saving it. `none`
    saves the result of every matmul (where layers are compiled, cheap operations between them are
    recomputed), `mlp` drops those of the MLP's gate and up, `most` saves only attention, `full`
    only each layer's input: least memory, about a third more time. `mlp` and `most` are for `ddp`
    and `fsdp`. `auto` takes the lowest level whose forecast fits into memory, and sets
    `keep_layers` too."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Limit of GPU memory per rank, in GiB, for the forecast and all that it chooses. Null: all
    that the GPU has."""
    keep_layers: NotNegative = 0
    """The last N layers are exempt from `gradient_checkpointing: mlp` or `most`: more memory, less
    recomputation."""
    offload_activations: bool = False
    """Keep saved activations in pinned CPU memory until the backward pass. Copies overlap with the
    computation, and the GPU keeps about two layers' worth. With `gradient_checkpointing: full`
    there is little to copy; without, computing often waits for the link to the host. On a GPU,
    under `strategy: ddp`."""
    loss: Auto | Loss = "auto"
    """`fused` computes output head and cross-entropy together, in chunks: the logits of a
    micro-batch, often the largest tensor of all, never exist at once. `auto`: fused on a GPU where
    layers may be compiled."""
    kernels: Auto | Kernels = "auto"
    """`compiled` compiles and fuses each layer (torch.compile, some 20 seconds once); `eager` runs
    it as transformers writes it. `auto`: compiled on a GPU where strategy and model allow it."""
    router_aux_loss_coef: Auto | NotNegativeNumber = "auto"
    """Coefficient of the load-balancing loss of a mixture of experts, over all tokens of a step.
    `auto` takes the one of the model's config.json if that uses it (`output_router_logits: true`),
    else 0. With several micro-batches a step, each takes one more forward pass."""
    router_z_loss_coef: NotNegativeNumber = 0.0
    """Coefficient of ST-MoE's z-loss, the mean square of the router logits' logsumexp."""
    log_every: Positive = 1
    """Steps between two sync points. Each reads and logs loss, gradient norm and health of all
    steps since the last one, except the newest, so that a GPU never waits for the log. A non-finite
    gradient is reported there, too. An evaluation, a checkpoint and the end of the run begin with a
    sync point of their own, which reads every step."""
    preflight: bool = True
    """Try the largest micro-batch, an evaluation and the disk before the first step, so that what
    doesn't fit shows at once and not hours later. It changes nothing that is computed."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradient clipping: a gradient with a larger norm is scaled down to it; null never clips."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the data order, the adapters' initialisation and dropout."""
    optimizer: Optimizer = AdamW()
    """The update rule."""
    early_stop: EarlyStop | None = None
    """Early stopping: ends the run when a metric stops improving. Null runs all steps."""
    on_nan: Literal["skip", "stop"] = "skip"
    """What to do when a gradient is not finite: skip the update on every rank, or stop. The rank
    and the samples are named either way."""
    on_oom: Literal["stop", "reduce_micro_batch"] = "stop"
    """What to do when memory runs out: stop and say what to change, or restart from the newest
    checkpoint with half the micro-batch (and the same global batch). In the preflight of a new run
    our own launcher halves a micro-batch that the forecast has chosen in any case."""

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
