"""What dividing a model takes from what whole copies of it can do.

Strategies compose these as they compose their axis rules: FSDP over slices can do what FSDP can,
less what slices can't. `name` is the strategy's, for the sentences that a person reads.
"""

from __future__ import annotations

from dataclasses import replace

from shardtune.core.capabilities import Capabilities, Refusal, Support

WHOLE_COPIES = Capabilities(
    precisions=Support(("fp32", "bf16", "fp16")),
    quantizations=Support(("none", "nf4", "int8", "fp8")),
    variants=Support(("plain", "dora", "rslora", "pissa")),
    checkpointing=Support(("none", "mlp", "most", "full")),
    activation_offload=True,
    compiled_layers=True,
    fused_loss=True,
    router_losses=True,
    captures_alone=True,
    split_weights=True,
    micro_batch_by_memory=True,
)
"""Each rank has the whole model in PyTorch's own tensors: all that there is."""


def divided(found: Capabilities, name: str) -> Capabilities:
    """The same where an engine divides what a rank would hold, be it layer by layer."""
    fp8 = f"fp8 needs every linear layer whole, with row-wise scales; {name} doesn't support it"
    return replace(
        not_whole(found, name), quantizations=found.quantizations.without({"fp8": Refusal(fp8)})
    )


def not_whole(found: Capabilities, name: str) -> Capabilities:
    """The same where ranks have no whole copies, though each matrix that they have is whole."""
    waiting = (
        "activation offload needs the whole model on each rank; "
        f"{name} saves gathered weights or communication buffers too"
    )
    return replace(
        found,
        activation_offload=Refusal(waiting),
        captures_alone=False,
        split_weights=False,
    )


def layers_as_written(found: Capabilities, name: str) -> Capabilities:
    """The same where an engine needs layers as transformers writes them, because it hooks into
    them: it can't be given compiled ones, nor choose what they compute again."""
    closed = f"{name} hooks into the modules inside each layer, which compiled layers bypass"
    between = {
        level: Refusal(
            f"{level} recomputes part of a layer, and {name} hooks into the modules inside of it"
        )
        for level in ("mlp", "most")
    }
    return replace(
        found,
        checkpointing=found.checkpointing.without(between),
        compiled_layers=Refusal(closed),
    )


def sliced(found: Capabilities, name: str, degree: int) -> Capabilities:
    """The same where each layer is sliced over `degree` ranks (tensor parallelism)."""
    fp16 = "fp16 needs a loss scale shared by all tensor-parallel ranks, which isn't implemented"
    across = f"packs weights in blocks that cross the borders of tensor({degree})'s shards"
    dora = (
        "dora needs the norms of whole weight rows in every forward pass; under "
        f"tensor({degree}) a rank has shards of them"
    )
    routers = f"router losses are read from whole layers; tensor({degree}) shards them"
    return replace(
        _in_parts(found, name),
        precisions=found.precisions.without({"fp16": Refusal(fp16)}),
        quantizations=found.quantizations.without(
            {kind: Refusal(f"{kind} {across}") for kind in ("nf4", "int8")}
        ),
        variants=found.variants.without({"dora": Refusal(dora)}),
        router_losses=Refusal(routers),
    )


def routed(found: Capabilities, name: str) -> Capabilities:
    """The same where ranks have experts of their own (expert parallelism)."""
    fp16 = "fp16 needs a loss scale shared by all expert-parallel ranks, which isn't implemented"
    packed = "int8 leaves experts, most of the model, in 16 bits"
    waits = "a dry run has one rank, which would wait for the tokens of the others"
    return replace(
        layers_as_written(found, name),
        precisions=found.precisions.without({"fp16": Refusal(fp16)}),
        quantizations=found.quantizations.without({"int8": Refusal(packed)}),
        models=found.models.without(
            {"encoder_decoder": Refusal(f"{name} divides experts, and this model has none")}
        ),
        router_losses=Refusal(f"router losses have not been verified under {name}"),
        micro_batch_by_memory=False,
        dry_run=Refusal(waits),
    )


def staged(found: Capabilities, name: str) -> Capabilities:
    """The same where the layers lie on different ranks (pipeline parallelism)."""
    fp16 = "fp16 needs a loss scale shared by all stages, which isn't implemented"
    return replace(
        _in_parts(found, name),
        precisions=found.precisions.without({"fp16": Refusal(fp16)}),
        router_losses=Refusal(
            f"{name} starts backward passes before it has counted where all tokens of a step go"
        ),
        dry_run=Refusal("a dry run has one rank, whose stage would wait for the others"),
    )


def _in_parts(found: Capabilities, name: str) -> Capabilities:
    """Ranks that hold parts of one model share its rows, and leave the logits to it."""
    whole = layers_as_written(found, name)
    both = (
        f"{name} splits a chain of layers; here each decoder layer also reads the encoder's output"
    )
    return replace(
        whole,
        models=found.models.without({"encoder_decoder": Refusal(both)}),
        fused_loss=False,
        micro_batch_by_memory=False,
        gathers_from_all_nodes=False,
    )
