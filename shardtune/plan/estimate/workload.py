"""What one training step is asked to do, apart from the model, the mesh and the machines.

Our jobs become a `Workload`, and so do the published runs of other tools: the estimator is judged
on theirs and used on ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardtune.core.footprint import ExpertBytes, ModelBytes
from shardtune.core.model.adapter_size import lora_parameters, scaled, targeted
from shardtune.core.model.flops import reads_source
from shardtune.core.model.quantized_size import (
    NF4_BITS,
    fp8_bytes,
    fp8_expert_bytes,
    quantizable,
)
from shardtune.core.model.shape import ModelShape
from shardtune.core.model.weight import Weight
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.core.send_buckets import SendBuckets

Checkpointing = Literal["none", "mlp", "most", "selective", "full"]
"""`selective` keeps the attention's result and every second matrix product, `full` only what flows
between the layers. `mlp` and `most` are our own engines': `mlp` keeps attention's result and the
products that aren't wide, `most` attention's result alone."""
Attention = Literal["sdpa", "flash", "eager"]
"""`sdpa` is what torch picks (cuDNN on Hopper), `flash` FlashAttention 2; neither ever writes the
scores down. `eager` does."""
LossKind = Literal["plain", "shifted", "compiled", "chunked", "widened", "fused", "pieces"]
"""`plain` turns the logits into fp32 at once; `shifted` copies them once more to drop the last
token, as transformers did until 4.45; `compiled` leaves no copy between logits and loss; `chunked`
walks over pieces of the logits; `widened` does, too, after all have been cast to fp32, as
Lightning Fabric does with what a model returns; `fused` never has the logits (Liger); `pieces` is
our own, which has a piece of them at a time."""
KernelStyle = Literal["eager", "fused", "compiled"]
"""How the small operations run: each on its own as transformers writes them, by hand-fused kernels
(Liger, Megatron, Transformer Engine), or by torch.compile."""

SHAPES = 256
"""Models of which a cache remembers what was counted: a search asks for one again and again."""
ALTERNATING = Pipelining("1f1b")
"""What most pipelines do."""
NF4_SINGLE_BITS = 4 + 32 / 64
"""NF4 without double quantization: an fp32 scale for 64 weights."""
NF4_DOUBLE_BITS = NF4_BITS


@dataclass(frozen=True)
class Widths:
    """Bytes a number, by what it is."""

    frozen: float = 2
    """Weights that are not trained."""
    trained: float = 2
    """Weights that are trained, as they are held between steps."""
    gradients: float = 2
    optimizer: float = 12
    """All that the optimizer keeps for a trained weight: moments, and masters where it has them."""
    gathered: float = 2
    """Weights on their way to where they are computed with."""
    reduced: float = 2
    """Gradients on their way to where they are summed."""
    compute: float = 2
    """Activations."""
    loaded: float | None = None
    """Weights that are trained, while they are read; as they are held later, if None."""


MIXED = Widths()
"""16-bit weights and gradients, fp32 masters and moments: DeepSpeed, Megatron."""
SHARDED_FP32 = Widths(trained=4, gradients=4, optimizer=8, reduced=4)
"""FSDP2 with mixed precision: fp32 shares, 16-bit computation."""
PURE_BF16 = Widths(optimizer=4)
"""Everything in bf16, the moments too."""


@dataclass(frozen=True)
class AdapterSize:
    """Low-rank matrices beside frozen weights, or factors on them."""

    rank: int
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    dropout: float = 0.0
    trained: int | None = None
    """Numbers trained, where they are not those of plain LoRA (IA3, DoRA, VeRA)."""
    expert_rank: int = 0
    """Rank beside each routed expert; 0 where they stay as they are."""
    keeps_results: bool = False
    """What frozen weights and the adapter give is kept apart, for gradients of DoRA's lengths."""
    scaled_inputs: tuple[str, ...] | None = None
    """Of factors, the modules whose input they scale, while they scale what others give; None for
    low-rank matrices."""

    @lru_cache(maxsize=SHAPES)  # noqa: B019 - it is a value, and there are few
    def on(self, shape: ModelShape) -> tuple[Weight, ...]:
        """The weights that have an adapter."""
        if self.scaled_inputs is not None:
            assert self.targets != "all-linear"
            return scaled(shape, self.targets)
        return targeted(shape, self.targets, experts=self.expert_rank > 0)

    @lru_cache(maxsize=SHAPES)  # noqa: B019
    def size(self, shape: ModelShape) -> int:
        """Numbers that it trains."""
        if self.trained is not None:
            return self.trained
        return lora_parameters(shape, self.rank, self.targets, expert_rank=self.expert_rank)

    @lru_cache(maxsize=SHAPES)  # noqa: B019
    def modules(self, shape: ModelShape) -> frozenset[str]:
        """The modules whose input it reads, by the last part of their names."""
        read = (weight for weight in self.on(shape) if not self.scales_result(weight))
        return frozenset(weight.module.rpartition(".")[2] for weight in read)

    def scales_result(self, weight: Weight) -> bool:
        """Whether it is a factor on what the weight gives."""
        if self.scaled_inputs is None:
            return False
        return not f".{weight.module}".endswith(tuple(f".{name}" for name in self.scaled_inputs))


@dataclass(frozen=True)
class Pair:
    """What a model with an encoder makes of a row: it reads `Workload.sequence` tokens."""

    target: int
    """Tokens that the decoder writes."""
    encoder_share: float
    """The encoder's share of all layers."""

    def mean(self, encoder: float, decoder: float) -> float:
        """Of something that layers of the encoder and of the decoder have, in an average layer."""
        return self.encoder_share * encoder + (1 - self.encoder_share) * decoder


@dataclass(frozen=True)
class Workload:
    """One optimizer step of a run."""

    micro_batch: int
    """Rows of one forward pass on one rank."""
    sequence: int
    """Tokens of a row; of a model with an encoder those that it reads."""
    microbatches: int = 1
    """Forward passes of a step on each rank."""
    step_rows: int | None = None
    """Rows of a step on all ranks, where they may be fewer than would fill all micro-batches."""
    widths: Widths = MIXED
    adapter: AdapterSize | None = None
    packed_bits: float | None = None
    """Bits of a quantized weight; None where none are quantized."""
    fp8: bool = False
    """Matrix products of the layers in 8 bits; of our own engines, those with frozen weights."""
    fp8_by_row: bool = False
    """Weights that are trained are scaled row by row for it, anew for each product."""
    checkpointing: Checkpointing = "none"
    kept_layers: int = 0
    """Layers, the last ones, that keep what `mlp` or `most` would compute again."""
    by_module: bool = False
    """Norms, attention and MLP are each checkpointed on their own where all is recomputed."""
    offloaded_checkpoints: bool = False
    """What flows between the layers waits in CPU memory for the backward pass."""
    offloaded: bool = False
    """What our own engine's layers save waits in CPU memory, copied beside the computation."""
    counts_routed: bool = False
    """Each micro-batch has a forward pass before the first gradient, which counts the experts that
    its tokens choose: the load-balancing loss is one over all of them."""
    captured: bool = False
    """Whether its passes are CUDA graphs, which the host launches at once."""
    host_mapped: bool = False
    """The GPU updates what the optimizer keeps in CPU memory."""
    attention: Attention = "sdpa"
    loss: LossKind = "plain"
    scored: float = 1.0
    """Share of the tokens that the head is computed for: only labels, where the engine can."""
    returns_logits: bool = False
    """The logits live on beside the loss until the step is over, as in Hugging Face's Trainer."""
    kernels: KernelStyle = "eager"
    counted: bool = False
    """One of our own engines: each tensor that it makes is counted, where for other tools a fitted
    constant stands in for what isn't known of them."""
    autocast: bool = False
    """Weights that are trained are held in fp32 and cast to 16 bits for each product, by
    torch.autocast. The casts are kept for the backward pass, and so are the inputs' where there are
    any: of fp32 norms and embeddings, and of what peft hands to an adapter in fp32."""
    packed_inputs: bool = True
    """Quantized linears keep their input for the backward pass, as those of bitsandbytes do."""
    divides_scales: bool = False
    """Scales of quantized weights are divided with them, as torchao's are; bitsandbytes' and our
    own are no parameters, and whole on every rank."""
    fp32_stream: bool = False
    """What flows between the layers is in fp32, though computed with in 16 bits: peft turns the
    embedding, the norms and the head of a quantized model to fp32. Logits are then made in it."""
    stacked_qkv: bool = False
    """Queries, keys and values come from one product with one adapter, as litgpt's do: values are a
    part of the product and keep all of it, and what the adapter gives is kept as it is put into its
    place. Attention's result is copied before the output projection, as heads are joined after the
    rotation."""
    dropout: bool = False
    """Whether the model drops numbers of the residual stream in training."""
    attention_dropout: bool = False
    """Whether it drops scores, which only attention that writes them down keeps masks of."""
    overlap: bool = True
    """Gathers and reductions run while the GPU computes."""
    prefetch: bool = True
    """The next layer's weights are asked for before this layer is done."""
    foreach: bool = False
    """The optimizer updates all weights in one go and holds a temporary of their size."""
    in_backward: bool = False
    """The optimizer updates each weight as its gradient comes; gradients are never held at once."""
    ends_apart: bool = False
    """Embedding and output head are gathered when they are needed, not with the whole model."""
    buckets: SendBuckets | None = None
    sequence_parallel: bool = False
    """Tensor parallelism divides the norms' share of the activations too."""
    async_tensor: bool = False
    """Tensor parallelism sends piece by piece while it multiplies."""
    pipelining: Pipelining = ALTERNATING
    """The order in which stages work, where there are any."""
    variable_lengths: bool = False
    """Rows are of different lengths, `sequence` is the longest: the allocator keeps more."""

    pair: Pair | None = None
    """Of a model with an encoder."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, as a layer sees them on average."""
        if self.pair is None:
            return self.micro_batch * self.sequence
        return round(self.micro_batch * self.pair.mean(self.sequence, self.pair.target))

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, read and written."""
        return self.sequence + (self.pair.target if self.pair else 0)

    @property
    def target(self) -> int | None:
        """Tokens that a decoder behind an encoder writes."""
        return self.pair.target if self.pair else None

    @property
    def scores(self) -> float:
        """Query-key pairs of a row, in an average layer."""
        if self.pair is None:
            return float(self.sequence**2)
        read, written = self.sequence, self.pair.target
        return self.pair.mean(read**2, written**2 + read * written)

    def tokens_of(self, weight: Weight) -> int:
        """Tokens of a micro-batch that a weight is multiplied with."""
        written = self.sequence if self.pair is None else self.pair.target
        return self.micro_batch * (self.sequence if reads_source(weight) else written)

    @property
    def wide_stream(self) -> bool:
        """Whether what flows between the layers is in fp32: it begins in the embedding."""
        return self.autocast and self.adapter is None

    @property
    def stream(self) -> float:
        """Bytes of a number that flows between the layers."""
        return 4 if self.wide_stream or self.fp32_stream else self.widths.compute

    @property
    def by_row(self) -> bool:
        """Whether frozen weights are in 8 bits as our own engine has them."""
        return self.fp8 and self.counted

    @property
    def restores_weights(self) -> bool:
        """Whether weights, or those of experts, are stored in fewer bits and restored for each
        product."""
        return self.packed_bits is not None or self.by_row

    @property
    def drops_apart(self) -> bool:
        """Whether dropout before an adapter is an operation of its own, as peft writes it."""
        fused = self.counted and self.kernels == "compiled"
        return self.adapter is not None and self.adapter.dropout > 0 and not fused

    @property
    def keeps_products(self) -> bool:
        """Whether a layer of our own keeps results of products and of attention, and nothing that
        lies between them: compiled, or where some of the products are to be repeated."""
        return self.counted and (
            self.kernels == "compiled" or self.checkpointing in ("mlp", "most")
        )

    def trained(self, shape: ModelShape) -> int:
        """Numbers that the optimizer changes."""
        return shape.parameters if self.adapter is None else self.adapter.size(shape)

    def trained_in_experts(self, shape: ModelShape) -> int:
        """Of these, what belongs to routed experts."""
        if self.adapter is None:
            return shape.count(lambda weight: weight.routed and weight.parameter)
        adapted = (weight for weight in self.adapter.on(shape) if weight.routed)
        return self.adapter.expert_rank * sum(each.lora_rows * each.times for each in adapted)

    def adapts(self, shape: ModelShape) -> frozenset[str]:
        """The modules whose input an adapter reads, by the last part of their names."""
        return frozenset() if self.adapter is None else self.adapter.modules(shape)


def whole_bytes(shape: ModelShape, work: Workload) -> ModelBytes:
    """What the model and its training take, undivided; masters counted with the optimizer."""
    trained, widths = work.trained(shape), work.widths
    if work.adapter is None:
        params = shape.parameters * widths.trained
    else:
        packed = 0 if work.packed_bits is None else quantizable(shape)
        bits = work.packed_bits or 0.0
        frozen = (shape.parameters - packed) * widths.frozen + packed * bits / 8
        if work.by_row:
            frozen += fp8_bytes(shape) - quantizable(shape) * widths.frozen
        params = frozen + trained * widths.trained
    return ModelBytes(
        params=round(params),
        trained=round(trained * widths.trained),
        grads=round(trained * widths.gradients),
        optim=round(trained * widths.optimizer),
        experts=_expert_bytes(shape, work, held=widths.trained, reduced=widths.gradients),
    )


def sent_bytes(shape: ModelShape, work: Workload) -> ModelBytes:
    """The same in the widths in which weights and gradients travel."""
    trained, widths = work.trained(shape), work.widths
    whole = whole_bytes(shape, work)
    if work.adapter is None:
        params = shape.parameters * widths.gathered
    else:
        params = whole.params - trained * (widths.trained - min(widths.trained, widths.gathered))
    return ModelBytes(
        params=round(params),
        trained=round(trained * widths.gathered),
        grads=round(trained * widths.reduced),
        optim=whole.optim,
        experts=_expert_bytes(shape, work, held=widths.gathered, reduced=widths.reduced),
    )


def _expert_bytes(shape: ModelShape, work: Workload, *, held: float, reduced: float) -> ExpertBytes:
    """What routed experts take of it; trained weights and gradients in these widths."""
    trained = work.trained_in_experts(shape)
    params = trained * held
    if work.adapter is not None:
        routed = [weight for weight in shape.weights if weight.routed and weight.parameter]
        matrices = sum(weight.total for weight in routed if weight.kind == "matrix")
        biases = sum(weight.total for weight in routed) - matrices
        packed = work.widths.frozen if work.packed_bits is None else work.packed_bits / 8
        stored = fp8_expert_bytes(shape) if work.by_row else matrices * packed
        params += stored + biases * work.widths.frozen
    return ExpertBytes(
        params=round(params),
        trained=round(trained * held),
        grads=round(trained * reduced),
        optim=round(trained * work.widths.optimizer),
    )
