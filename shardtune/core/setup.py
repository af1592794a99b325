"""What an engine has to know about a run besides the model and the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardtune.core.lr_schedule import Schedule

Precision = Literal["fp32", "bf16", "fp16"]
"""Of the computation."""
Quantization = Literal["none", "nf4", "int8", "fp8"]
"""How the frozen weights of linear layers are stored."""
Bits = Literal[32, 8]
SCALE_BLOCK = 256
"""Numbers of an 8-bit moment that share a scale."""
CAPTURED_TOKENS = 8192
"""Tokens of a micro-batch up to which its passes become a CUDA graph under adapters, whatever the
model. Full fine-tuning has none for more."""
CAPTURED_WORK = 10**13
"""Tokens times weights up to which small models get one for longer micro-batches under adapters,
and at most which any model gets one for in full fine-tuning, where it keeps a place for all
gradients. With more of them a GPU is busy for longer than the host takes to launch its kernels, so
nothing is gained. An H200 takes 0.11 s for that many (3 B at 27,141 tokens/s)."""
LARGEST_SUMMED_RANK = 32
"""Of LoRA beside SwiGLU: up to it one kernel sums up the gradients of its matrices as well, in
parts of 64 columns; for more it leaves them to GEMMs, which are faster there."""
Loss = Literal["plain", "fused"]
Recompute = Literal["none", "mlp", "most", "full"]
"""What a layer computes twice: small operations only, also the wide products of its MLP, all but
attention, or all. Each takes less memory and more time than the one before."""


def captured_tokens(weights: int, *, all_trained: bool) -> int:
    """Tokens of a micro-batch up to which its passes become a CUDA graph."""
    most = CAPTURED_WORK // weights
    return min(CAPTURED_TOKENS, most) if all_trained else max(CAPTURED_TOKENS, most)


@dataclass(frozen=True)
class OptimizerSetup:
    """The update rule. Fields that a rule doesn't use keep their defaults."""

    type: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    bits: Bits = 32
    """Of each moment; 8 adds an fp32 scale for each block of them."""
    host_mapped: bool = False
    """Optimizer states lie in pinned CPU memory, which the GPU reads and writes in place."""

    def moment_bytes(self, weights: Iterable[int]) -> int:
        """What the moments of weights of so many elements take, undivided."""
        moments = 2 if self.type == "adamw" else int(self.momentum > 0)
        if self.bits == 32:
            return moments * 4 * sum(weights)
        return moments * sum(size + 4 * -(-size // SCALE_BLOCK) for size in weights)


@dataclass(frozen=True)
class EngineSetup:
    """One optimizer step, described: precision, update, schedule, clipping, randomness."""

    precision: Precision
    optimizer: OptimizerSetup
    schedule: Schedule
    max_grad_norm: float | None
    seed: int
    micro_batch: int = 1
    """Rows of one forward pass."""
    accumulation: int = 1
    """Micro-batches of a step on each rank; the last step of a run may have fewer."""
    loss: Loss = "plain"
    """`fused` never has all logits of a micro-batch at once."""
    offload_activations: bool = False
    """What the forward pass saves waits for the backward pass in CPU memory."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture's routers."""
    router_z_loss_coef: float = 0.0
    """Weight of their z-loss."""
    split_fp32: bool = False
    """Whether fp32 weights are split: the model has the upper halves, the optimizer the lower."""
