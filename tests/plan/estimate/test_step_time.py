"""Seconds of a step: what they add up to, and which way they move."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from shardtune.config.job import Job
from shardtune.core.mesh import Mesh
from shardtune.core.model.architectures import read_shape
from shardtune.core.model.known_models import KnownModel, catalogue, known_model
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.parallel.ddp.strategy import DDP
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from shardtune.parallel.fsdp.strategy import FSDP
from shardtune.plan.cluster import Cluster, parse_cluster
from shardtune.plan.estimate.constants import CHIPS, LIKE, beginning_of
from shardtune.plan.estimate.memory import estimate_memory
from shardtune.plan.estimate.step_time import SpeedEstimate, estimate_speed
from shardtune.plan.estimate.workload import PURE_BF16, SHARDED_FP32, AdapterSize, Workload
from shardtune.plan.forecast import forecast
from shardtune.plan.machine_profile import MatmulPoint, Measured

LLAMA = read_shape(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "llama",
)
WORK = Workload(2, 4096, widths=SHARDED_FP32, kernels="compiled")
LORA = replace(WORK, counted=True, adapter=AdapterSize(16))
H200 = parse_cluster("1xH200")


def fsdp(cluster: Cluster, work: Workload = WORK) -> SpeedEstimate:
    return estimate_speed(FSDP().layout(), LLAMA, FSDP().mesh(cluster.gpus), cluster, work)


def alone(work: Workload, cluster: Cluster = H200) -> SpeedEstimate:
    return estimate_speed(DDP().layout(), LLAMA, DDP().mesh(1), cluster, work)


@pytest.mark.parametrize(
    ("work", "measured"),
    [
        # One H200, 8 x 2048 tokens, rank 16 on all linears (reference gpu.md).
        (Workload(8, 2048, widths=PURE_BF16, adapter=AdapterSize(16)), 12815),
        (
            Workload(
                8, 2048, widths=PURE_BF16, adapter=AdapterSize(16), kernels="compiled", loss="fused"
            ),
            16595,
        ),
    ],
)
def test_tokens_per_second_on_an_h200(work: Workload, measured: float) -> None:
    assert alone(work).tokens_per_second == pytest.approx(measured, rel=0.1)


def test_the_parts_add_up() -> None:
    step = fsdp(parse_cluster("2x8xH100@400Gbps")).step
    parts = [getattr(step, field.name) for field in fields(step)]
    assert step.total == pytest.approx(sum(parts))
    assert min(parts) >= 0


def test_tokens_and_utilisation_follow_from_the_step() -> None:
    speed = fsdp(parse_cluster("8xH100"))
    assert speed.tokens == 8 * 2 * 4096
    assert speed.tokens_per_second_per_gpu * 8 == pytest.approx(speed.tokens / speed.step.total)
    # 6 FLOPs a weight and token, and what attention needs on top.
    least = 6 * (LLAMA.parameters - LLAMA.vocab * LLAMA.hidden) * speed.tokens
    assert 1 < speed.flops / least < 1.15
    assert 0 < speed.mfu < 0.7


def test_a_slower_network_makes_the_same_job_slower() -> None:
    rates = [fsdp(parse_cluster(f"2x8xH100@{gbps}Gbps")).tokens_per_second for gbps in (100, 800)]
    assert rates[0] < rates[1]


def test_pcie_is_slower_than_nvlink() -> None:
    fast, slow = (fsdp(parse_cluster(spec)).step for spec in ("8xA100", "8xA100:pcie"))
    assert slow.communication > fast.communication
    assert slow.compute == pytest.approx(fast.compute)


def test_full_sharding_pays_for_every_micro_batch_and_ddp_once() -> None:
    cluster = parse_cluster("2x8xA100@100Gbps")
    for strategy, factor in ((FSDP(), 4), (DDP(), 1)):
        one, four = (
            sum(each.wire for each in estimate_speed(
                strategy.layout(), LLAMA, strategy.mesh(16), cluster,
                replace(WORK, microbatches=count),
            ).sent)
            for count in (1, 4)
        )  # fmt: skip
        assert four == pytest.approx(factor * one)


def test_gathering_again_for_the_backward_pass_takes_time() -> None:
    """On a link so slow that nothing hides: gather, gather, reduce in fp32 against two of them."""
    cluster = parse_cluster("2x8xA100@10Gbps")
    once, twice = (
        estimate_speed(
            FSDP(reshard_after_forward=again).layout(), LLAMA, FSDP().mesh(16), cluster, WORK
        ).step.total
        for again in (False, True)
    )
    assert twice / once == pytest.approx(4 / 3, rel=0.05)


def test_recomputing_costs_a_forward_pass() -> None:
    none, selective, full = (
        alone(replace(WORK, checkpointing=kind)).step.compute
        for kind in ("none", "selective", "full")
    )
    assert none < selective < full
    assert 1.2 < full / none < 1.4  # a third of the three passes, less the head's share


def test_counting_experts_costs_a_forward_pass() -> None:
    """As recomputing does; where weights are gathered for it they are sent once more."""
    work = replace(WORK, microbatches=2)
    counting = replace(work, counts_routed=True)
    again = alone(replace(work, checkpointing="full"))
    assert alone(counting).step.compute == pytest.approx(again.step.compute)
    cluster = parse_cluster("2x8xH100@100Gbps")
    plain, found = fsdp(cluster, work), fsdp(cluster, counting)
    gathered = [
        sum(each.wire for each in speed.sent if each.move.op == "all_gather")
        for speed in (plain, found)
    ]
    assert gathered[1] == pytest.approx(1.5 * gathered[0])
    assert found.step.communication > plain.step.communication
    assert found.step.total < 1.5 * plain.step.total


def test_frozen_weights_need_no_gradient() -> None:
    # Two passes instead of three, less what the adapters themselves take.
    lora = replace(WORK, adapter=AdapterSize(16))
    assert 2 / 3 < alone(lora).step.compute / alone(WORK).step.compute < 0.95


def test_the_bubble_shrinks_with_micro_batches_and_interleaving() -> None:
    mesh, cluster = Mesh((("pipeline", 4), ("data", 2))), parse_cluster("8xA100")

    def bubble(work: Workload) -> float:
        step = estimate_speed(DDP().layout(), LLAMA, mesh, cluster, work).step
        return step.bubble / step.total

    few, many = (replace(WORK, microbatches=count) for count in (4, 32))
    assert bubble(many) < bubble(few)
    assert bubble(replace(few, pipelining=Pipelining("interleaved", 4))) < bubble(few)


def test_tensor_parallelism_across_nodes_is_a_bad_idea() -> None:
    cluster = parse_cluster("2x8xA100@800Gbps")
    inside, across = (
        estimate_speed(
            DDP().layout(), LLAMA, Mesh((("data", 16 // n), ("tensor", n))), cluster, WORK
        )
        for n in (8, 16)
    )
    assert across.tokens_per_second < inside.tokens_per_second


def test_offload_to_the_disk_is_slower_than_to_the_host_and_that_than_none() -> None:
    times = []
    for device in ("none", "cpu", "nvme"):
        settings = {"stage": 3, "offload_optimizer": {"device": device, "nvme_path": "disk"}}
        strategy = DeepSpeed(zero_optimization=ZeRO.model_validate(settings))
        cluster = parse_cluster("8xA100")
        speed = estimate_speed(strategy.layout(), LLAMA, strategy.mesh(8), cluster, WORK)
        times.append(speed.step.total)
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_activations_that_wait_in_main_memory_cost_what_computing_does_not_hide() -> None:
    """A layer's input is little; all that a layer saves is more than the link can take."""
    for checkpointing, costs in (("full", False), ("none", True)):
        work = replace(WORK, checkpointing=checkpointing)  # type: ignore[arg-type]
        step = alone(replace(work, offloaded=True)).step
        assert (step.offload > 0) == costs
        assert step.total - step.offload == pytest.approx(alone(work).step.total)


def test_a_measured_ceiling_counts_instead_of_the_data_sheet() -> None:
    slow = MatmulPoint(m=8192, n=8192, k=8192, tflops=400)
    measured = replace(H200, measured=Measured(matmul=(slow,)))
    assert alone(WORK, measured).step.compute > 1.5 * alone(WORK).step.compute


def test_products_in_fp32_run_at_the_rate_of_fp32() -> None:
    """Full fp32, not TF32: 37.4 of an A40's 149.7 TFLOP/s in bf16."""
    a40 = parse_cluster("1xA40")
    in_fp32 = replace(WORK, widths=replace(WORK.widths, compute=4))
    assert 3 < alone(in_fp32, a40).step.compute / alone(WORK, a40).step.compute < 4.5
    assert alone(in_fp32, a40).peak == 37.4e12
    assert alone(in_fp32, a40).mfu < 1


def test_a_measured_fp32_rate_is_for_fp32_alone() -> None:
    point = MatmulPoint(m=8192, n=8192, k=8192, dtype="fp32", tflops=20)
    in_fp32 = replace(WORK, widths=replace(WORK.widths, compute=4))
    measured = replace(H200, measured=Measured(matmul=(point,)))
    assert alone(in_fp32, measured).step.compute > 2 * alone(in_fp32).step.compute


def test_slices_of_small_layers_are_no_faster_than_their_hosts() -> None:
    """Published iteration times: a GPT of hidden size 1,024 takes no less time in eight slices."""
    few = replace(WORK, micro_batch=1, sequence=256, kernels="fused")
    cluster = parse_cluster("8xA100")

    def seconds(degree: int) -> float:
        mesh = Mesh((("data", 1), ("tensor", degree)))
        return estimate_speed(DDP().layout(), LLAMA, mesh, cluster, few).step.compute

    assert seconds(8) > 0.8 * seconds(2)


def test_every_gpu_of_the_catalogue_has_constants() -> None:
    from shardtune.plan.cluster import known_gpus

    assert {LIKE[name] for name in LIKE} <= set(CHIPS)
    for name in known_gpus():
        assert beginning_of(name) in CHIPS
    assert beginning_of("A100-40GB") == "A100"
    assert beginning_of("A10G") == "A40"
    assert beginning_of("H200-141GB") == "H200"


@pytest.mark.parametrize(
    ("name", "attention", "captured"),
    [
        ("meta-llama/Llama-3.2-1B", "auto", True),
        ("meta-llama/Llama-3.2-1B", "sdpa", True),
        ("meta-llama/Llama-3.2-1B", "eager", False),
        ("google/gemma-2-2b", "auto", False),
        ("tiiuae/falcon-7b", "auto", False),
        ("microsoft/phi-4", "auto", True),
        ("microsoft/Phi-4-mini-instruct", "auto", False),  # LongRoPE goes by documents
    ],
)
def test_short_steps_wait_for_the_host_where_they_cannot_be_recorded(
    name: str, attention: str, *, captured: bool
) -> None:
    job = Job.model_validate(
        {
            "model": {"name": name, "attention": attention},
            "data": {"train": ({"path": "-", "format": "chat"},), "sequence_length": 1024},
            "adapter": {"type": "lora", "rank": 16},
            "train": {"micro_batch": 1, "global_batch": 1, "steps": 10, "kernels": "compiled"}
            | {"precision": "bf16", "gradient_checkpointing": "none"},
            "launch": {"processes": 1},
        }
    )
    assert forecast(job, known_model(name), H200).work.captured == captured


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", catalogue(), ids=lambda model: model.name)
def test_every_model_of_the_catalogue_can_be_estimated(model: KnownModel) -> None:
    shape, cluster = known_model(model.name), parse_cluster("8xH100")
    for adapter in (None, AdapterSize(8)):
        work = replace(WORK, adapter=adapter)
        speed = estimate_speed(FSDP().layout(), shape, FSDP().mesh(8), cluster, work)
        memory = estimate_memory(FSDP().layout(), shape, FSDP().mesh(8), work)
        assert 0 < speed.mfu < 1
        assert memory.allocated > shape.parameters / 8


def test_the_stage_with_the_head_has_fewer_layers_and_is_no_slower_for_it() -> None:
    """The head of Qwen3-0.6B costs as much as ten of its 28 layers."""
    shape, work = known_model("qwen3-0.6b"), replace(WORK, counted=True, microbatches=16)
    cluster = parse_cluster("4xA100-80GB")

    def computing(ranks: int) -> float:
        mesh = Mesh((("pipeline", ranks), ("data", 1)))
        return estimate_speed(DDP().layout(), shape, mesh, cluster, work).step.compute

    assert computing(1) / 4 < computing(4) < 1.2 * computing(1) / 4


def test_cards_without_8_bit_products_gain_none() -> None:
    work = replace(LORA, fp8=True)
    for card, faster in (("MI250X", False), ("MI300X", True), ("A100-80GB", False), ("L4", True)):
        plain, found = (alone(each, parse_cluster(f"1x{card}")) for each in (LORA, work))
        assert (found.step.compute < plain.step.compute) == faster, card
        assert (found.peak > plain.peak) == faster, card
