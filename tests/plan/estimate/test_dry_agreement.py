"""The closed forms against the dry run: the same step, counted tensor by tensor on fake tensors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from shardtune.config.job import Job
from shardtune.config.model_config import config_of, shape_of
from shardtune.core.model.activation_memory import loss_chunk_rows
from shardtune.kernels import linear_cross_entropy
from shardtune.measure.dry_run import dry_run
from shardtune.models.builder import MetaModelBuilder
from shardtune.models.load import config_from
from shardtune.parallel.ddp import single_gpu
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.estimate import memory_timeline as moments
from shardtune.plan.forecast import forecast
from shardtune.training.engine_setup import make_plan

QWEN, SMALL, LARGE = "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"
QK_NORMS, RELU = "Qwen/Qwen3-1.7B", "facebook/opt-1.3b"
LORA = {"adapter": {"type": "lora", "rank": 16}}
DORA = {"adapter": {"type": "lora", "rank": 16, "variant": "dora"}}
IA3 = {"adapter": {"type": "ia3"}}
FSDP = {"strategy": {"type": "fsdp"}}
NF4 = {"quantization": "nf4"}
EAGER = {"attention": "eager"}


def job(
    name: str,
    rows: int,
    length: int,
    *,
    ranks: int = 1,
    copies: int = 0,
    loss: str = "plain",
    recompute: str = "none",
    steps: int = 1,
    precision: str = "bf16",
    paged: bool = False,
    **sections: Any,
) -> Job:
    document = {
        "model": {"name": name, **sections.pop("model", {})},
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": length},
        "train": {
            "micro_batch": rows,
            "global_batch": rows * (copies or ranks) * steps,
            "steps": 10,
            "loss": loss,
            "kernels": "eager",
            "gradient_checkpointing": recompute,
            "precision": precision,
            "optimizer": {"type": "adamw", "paged": paged},
        },
        "launch": {"processes": ranks},
        **sections,
    }
    return Job.model_validate_json(json.dumps(document))


QUICK = {
    "all, few tokens, fp32": job(SMALL, 1, 512, precision="fp32"),
}
LONG = {
    "all, fsdp on 4": job(SMALL, 2, 2048, ranks=4, **FSDP),
    "lora, fused": job(QWEN, 8, 1024, loss="fused", **LORA),
    "all, paged": job(QWEN, 4, 1024, loss="fused", paged=True),
    "all, plain": job(QWEN, 4, 1024),
    "all, fused": job(SMALL, 4, 2048, loss="fused"),
    "all, recomputed, plain": job(SMALL, 2, 4096, recompute="full"),
    "all, few tokens, fused": job(SMALL, 1, 512, loss="fused", recompute="full"),
    "lora, mlp, fused": job(QWEN, 8, 1024, loss="fused", recompute="mlp", **LORA),
    "all, ddp on 4": job(QWEN, 2, 2048, ranks=4),
    "all, fsdp hybrid on 4": job(
        SMALL, 2, 2048, ranks=4, strategy={"type": "fsdp", "sharding": "hybrid", "replicas": 2}
    ),
    "all, tensor on 2": job(
        SMALL, 2, 2048, ranks=2, copies=1, strategy={"type": "tensor", "degree": 2}
    ),
    "lora, tensor on 4": job(
        LARGE, 1, 2048, ranks=4, copies=1, strategy={"type": "tensor", "degree": 4}, **LORA
    ),
    "all, fsdp and tensor on 4": job(
        SMALL, 2, 2048, ranks=4, copies=2, strategy={"type": "fsdp", "tensor": 2}
    ),
    "lora, recomputed, fused, ddp on 2": job(
        QWEN, 4, 1024, ranks=2, loss="fused", recompute="full", **LORA
    ),
    "all, recomputed, fused": job(SMALL, 2, 8192, loss="fused", recompute="full"),
    "all, mlp, fused": job(SMALL, 4, 2048, loss="fused", recompute="mlp"),
    "all, most, fused": job(SMALL, 4, 2048, loss="fused", recompute="most"),
    "lora, most, fused": job(LARGE, 8, 2048, loss="fused", recompute="most", **LORA),
    "all, norms of queries and keys": job(QK_NORMS, 2, 2048),
    "all, two micro-batches": job(SMALL, 2, 2048, steps=2),
    "all, few tokens, two micro-batches": job(SMALL, 1, 512, loss="fused", steps=2),
    "lora, plain": job(LARGE, 4, 2048, **LORA),
    "lora, fp32": job(SMALL, 4, 1024, loss="fused", precision="fp32", **LORA),
    "all, many tokens, fp32": job(SMALL, 4, 1024, loss="fused", precision="fp32"),
    "ia3, fused": job(SMALL, 4, 1024, loss="fused", **IA3),
    "ia3, fp32": job(SMALL, 4, 1024, loss="fused", precision="fp32", **IA3),
    "ia3, norms of queries and keys": job(QK_NORMS, 4, 1024, loss="fused", **IA3),
    "ia3, keys alone": job(
        SMALL,
        4,
        1024,
        loss="fused",
        adapter={"type": "ia3", "targets": ["k_proj"], "feedforward": []},
    ),
    "dora, fused": job(QWEN, 4, 1024, loss="fused", **DORA),
    "lora, fused, norms of queries and keys": job(QK_NORMS, 4, 2048, loss="fused", **LORA),
    "lora, recomputed, fused": job(LARGE, 8, 2048, loss="fused", recompute="full", **LORA),
    "lora, scores written down": job(SMALL, 1, 4096, loss="fused", model=EAGER, **LORA),
    "lora, scores written down, recomputed": job(
        SMALL, 1, 4096, loss="fused", recompute="full", model=EAGER, **LORA
    ),
    "qlora, fused": job(LARGE, 2, 2048, loss="fused", model=NF4, **LORA),
    "qlora, recomputed, plain": job(LARGE, 4, 2048, recompute="full", model=NF4, **LORA),
    "all, recomputed, fused, fsdp on 8": job(
        LARGE, 2, 2048, ranks=8, loss="fused", recompute="full", **FSDP
    ),
    "all, plain, fsdp on 8": job(LARGE, 1, 2048, ranks=8, **FSDP),
    "lora, a ReLU and dropout, fsdp on 4": job(RELU, 4, 512, ranks=4, **LORA, **FSDP),
    "lora, fused, fsdp on 4": job(LARGE, 2, 2048, ranks=4, loss="fused", **LORA, **FSDP),
    "qlora, recomputed, fused, fsdp on 4": job(
        LARGE, 2, 2048, ranks=4, loss="fused", recompute="full", model=NF4, **LORA, **FSDP
    ),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)]
)
def test_the_dry_run_and_the_closed_form_agree(name: str) -> None:
    """Within 3 %; most are within half a percent."""
    what = (QUICK | LONG)[name]
    if what.model.quantization != "none":
        pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    ranks = int(what.launch.processes)
    closed = forecast(what, shape_of(what.model), parse_cluster(f"{ranks}xH200-141GB"))
    seen = dry_run(
        MetaModelBuilder.of(
            config_from(config_of(what.model)), what.model, what.adapter, what.train
        ),
        what.strategy,
        make_plan(what, ranks, 10).setup,
        ranks=ranks,
        rows=closed.work.micro_batch,
        length=closed.work.sequence,
        microbatches=closed.work.microbatches,
        vocabulary=closed.shape.vocab,
    )
    counted = seen.peak
    if closed.work.dropout and not torch.cuda.is_available():
        # A CPU keeps masks in 16 bits, a GPU in eight: two of the residual stream in each layer.
        counted -= 2 * closed.work.tokens * closed.shape.hidden * closed.shape.layers
    assert closed.memory.allocated == pytest.approx(counted, rel=0.03)


def test_the_closed_form_has_the_pieces_of_the_loss() -> None:
    assert moments.FEW_TOKENS == single_gpu.ROUNDED_GRADIENT_TOKENS
    shape = shape_of(job(SMALL, 1, 8).model)
    first = next(linear_cross_entropy._chunks(1 << 20, shape.vocab))
    assert loss_chunk_rows(shape.vocab) == first.stop
