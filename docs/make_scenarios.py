"""Writes docs/scenarios.md: questions that people ask, answered by the planner.

python docs/make_scenarios.py            write the page
python docs/make_scenarios.py --check    say whether it is up to date, for a test
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardtune.config.job import Job
from shardtune.core.model.known_models import catalogue, known_model
from shardtune.core.model.row_length import longest_row
from shardtune.core.units import GIB
from shardtune.core.world import World
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO
from shardtune.parallel.deepspeed.derive_config import to_deepspeed
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.estimate.comms import RankGroup, bandwidth
from shardtune.plan.estimate.constants import chip_of
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.search import Candidate, rank
from shardtune.plan.this_machine import offer, shortage
from shardtune.training.engine_setup import make_plan

PAGE = Path(__file__).with_name("scenarios.md")
LORA = {"type": "lora", "rank": 16}


def job(name: str, **sections: Any) -> Job:
    """A job of 64 rows of 2048 tokens, compiled and with fused loss, as a scenario changes it."""
    train = {"global_batch": 64, "steps": 1000, "precision": "bf16"}
    train |= {"loss": "fused", "kernels": "compiled"}
    data = {"train": [{"path": "data.jsonl", "format": "chat"}], "sequence_length": 2048}
    document: dict[str, Any] = {
        "model": {"name": name, **sections.pop("model", {})},
        "data": data | sections.pop("data", {}),
        "train": train | {"micro_batch": 1} | sections.pop("train", {}),
        **sections,
    }
    return Job.model_validate_json(json.dumps(document))


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"type": "deepspeed", "zero_optimization": {"stage": stage, **settings}}


def ranked(what: Job, spec: str) -> list[str]:
    """The ranking of every strategy on a cluster, as a table."""
    cluster, shape = parse_cluster(spec), known_model(what.model.name)
    ranking = rank(what, shape, cluster)
    lines = [
        f"`{spec}`, {_work(what)}:",
        "",
        "| strategy | step, s | tokens/s | GPU, GiB | micro-batch | checkpointing | why |",
        "|---|--:|--:|--:|--:|---|---|",
        *map(_row, ranking.candidates),
        "",
    ]
    if ranking.best is None:
        lines += [f"Nothing fits. {offer(what, shape, cluster)}.", ""]
    return lines


def _work(what: Job) -> str:
    """Rows and length of a step, and what is trained."""
    trained = {"none": "full fine-tune", "lora": "LoRA", "ia3": "IA3"}[what.adapter.type]
    packed = "" if what.model.quantization == "none" else f" on {what.model.quantization} weights"
    length = what.data.sequence_length
    return f"{what.train.global_batch} rows of {length} tokens a step, {trained}{packed}"


def _row(each: Candidate) -> str:
    found = each.found
    if found is None:
        return f"| {each.name} | | | | | | {each.why} |"
    speed = found.speed
    took = (f"{speed.step.total:.2f}", f"{speed.tokens_per_second:,.0f}") if each.fits else ("", "")
    return (
        f"| {each.name} | {took[0]} | {took[1]} | {found.memory.required / GIB:.1f} / "
        f"{found.capacity / GIB:.1f} | {found.work.micro_batch} | "
        f"{found.checkpointing} | {each.why} |"
    )


def compared(rows: dict[str, tuple[Job, str]]) -> list[str]:
    """Single jobs side by side: memory, and where the time of a step goes."""
    parts = ("compute", "communication", "optimizer", "offload")
    works = dict.fromkeys(_step_of(what) for what, _ in rows.values())
    lines = [
        f"{' or '.join(works)}:",
        "",
        "| job | fits | GPU, GiB | " + ", s | ".join(parts) + ", s | step, s | tokens/s |",
        "|---|---|--:|" + "--:|" * (len(parts) + 2),
    ]
    for name, (what, spec) in rows.items():
        found = _forecast(what, spec)
        seconds = " | ".join(f"{getattr(found.speed.step, part):.2f}" for part in parts)
        lines.append(
            f"| {name} | {found.verdict} | {found.memory.required / GIB:.1f} / "
            f"{found.capacity / GIB:.1f} | {seconds} | {found.speed.step.total:.2f} | "
            f"{found.speed.tokens_per_second:,.0f} |"
        )
    return [*lines, ""]


def _step_of(what: Job) -> str:
    return f"{what.train.global_batch} rows of {what.data.sequence_length} tokens a step"


def deepspeed_file(what: Job, spec: str) -> list[str]:
    """The DeepSpeed configuration of a job, as our engine passes it to DeepSpeed."""
    cluster = parse_cluster(spec)
    plan = make_plan(what, cluster.gpus, 1000)
    assert isinstance(what.strategy, DeepSpeed)
    mesh, layout = what.strategy.mesh(cluster.gpus), what.strategy.layout()
    world = World(size=cluster.gpus, device="cuda:0")
    config = to_deepspeed(layout, mesh, what.strategy, plan.setup, world)
    return ["```json", json.dumps(config, indent=2), "```", ""]


def best_deepspeed(what: Job, spec: str) -> Forecast:
    """The fastest of DeepSpeed's stages that fits on a cluster, as `plan` ranks them."""
    ranking = rank(what, known_model(what.model.name), parse_cluster(spec))
    return next(
        each.found
        for each in ranking.candidates
        if each.found is not None and each.fits and isinstance(each.found.job.strategy, DeepSpeed)
    )


def zero_of(found: Forecast) -> ZeRO:
    """Its `zero_optimization`."""
    strategy = found.job.strategy
    assert isinstance(strategy, DeepSpeed)
    return strategy.zero_optimization


def _forecast(what: Job, spec: str) -> Forecast:
    cluster = parse_cluster(spec)
    update = {"launch": what.launch.model_copy(update={"processes": cluster.gpus})}
    if not what.strategy.capabilities.compiled_layers:
        plain = {"kernels": "eager", "loss": "plain"}
        update["train"] = what.train.model_copy(update=plain)
    return forecast(what.model_copy(update=update), known_model(what.model.name), cluster)


def thirteen_billion() -> list[str]:
    """A 13 B model on 4xA40: ZeRO-1 or ZeRO-2?"""
    name = "meta-llama/Llama-2-13b-hf"
    rows = {
        f"{kind}, ZeRO-{stage}, micro-batch {micro}": (
            job(
                name, strategy=zero(stage),
                train={"micro_batch": micro, "gradient_checkpointing": "full"}, **more,
            ),
            "4xA40",
        )
        for kind, more in (("full", {}), ("LoRA", {"adapter": LORA}))
        for stage in (1, 2)
        for micro in (1, 2, 4)
    }  # fmt: skip
    found = {key: _forecast(*each) for key, each in rows.items()}
    full = found["full, ZeRO-1, micro-batch 1"]
    params, grads = (full.memory.gpu[key] / GIB for key in ("params", "gradients"))
    sent = [
        found[f"full, ZeRO-{stage}, micro-batch 1"].speed.step.communication for stage in (1, 2)
    ]
    best = best_deepspeed(job(name), "4xA40")
    elements = zero_of(best).reduce_bucket_size or 0
    return [
        "The question comes from a run in which ZeRO-1 filled 95 % of the memory at micro-batch "
        "1, and ZeRO-2 allowed micro-batch 2. On four GPUs ZeRO-2 keeps a quarter of the gradients "
        "instead of all of them, but reduces them in every micro-batch instead of once a step. "
        "With activation checkpointing (`full`):",
        "",
        *compared(rows),
        "Which to choose:",
        "",
        f"- *Full fine-tune*: neither. 16-bit weights ({params:.1f} GiB) and, at the peak of "
        f"ZeRO-1, gradients ({grads:.1f} GiB) are already more than the card has: it "
        f"{shortage(full)}. With the optimizer states in CPU memory it fits: "
        f"`{best.job.strategy.written()}` at micro-batch {best.work.micro_batch} needs "
        f"{best.memory.required / GIB:.1f} GiB per GPU and {best.host / GIB:.0f} GiB of CPU "
        f"memory, and takes {best.speed.step.total:.0f} s a step.",
        "- *LoRA*: gradients are small, so the stages hardly differ in memory. Take ZeRO-1 (or "
        "DDP): it communicates once a step.",
        "- *Where both fit at the same micro-batch*: ZeRO-1. With gradient accumulation ZeRO-2 "
        f"communicates more: {sent[1]:.1f} s a step instead of {sent[0]:.1f} s here, over PCIe.",
        "- *Where only ZeRO-2 fits a larger micro-batch*: ZeRO-2. That is so where unsharded "
        "gradients are about as large as the activations of a row. Built-in models with which it "
        f"is so here, fully fine-tuned on rows of 512 tokens: {_between()}.",
        "",
        "Which settings to change, in this order:",
        "",
        "1. `train.gradient_checkpointing: full`: about a third more compute (with LoRA half "
        "more), and small activations.",
        "2. `train.micro_batch` as large as fits, at the same `global_batch`: fewer "
        "micro-batches are fewer reductions under ZeRO-2.",
        "3. `reduce_bucket_size`: with DeepSpeed's default, 5e8 elements, a bucket takes 0.93 GiB "
        "in 16 bits, and with `overlap_comm` there are two. `shardtune plan` proposes "
        f"{elements:,}, and saves {4 * (5e8 - elements) / GIB:.1f} GiB.",
        "4. `offload_optimizer: {device: cpu}`, then stage 3 with `offload_param`.",
        "",
        "The DeepSpeed file of the job that fits, for `strategy: {type: deepspeed, config: "
        "ds.json}` or for DeepSpeed's own launcher:",
        "",
        *deepspeed_file(best.job, "4xA40"),
        "All strategies, for a full fine-tune of the 13 B model:",
        "",
        *ranked(job(name), "4xA40"),
    ]


def _between() -> str:
    """Models of which 4xA40 fit one row with ZeRO-1 and two with ZeRO-2."""
    found = []
    for model in catalogue():
        if (longest_row(model.shape) or 512) < 512:
            continue
        one, two, other = (
            _forecast(
                job(
                    model.name,
                    strategy=zero(stage),
                    train={"micro_batch": micro},
                    data={"sequence_length": 512},
                ),
                "4xA40",
            )
            for stage, micro in ((1, 1), (1, 2), (2, 2))
        )
        if one.fits and other.fits and not two.fits:
            filled = one.memory.peak / one.capacity
            found.append(f"{model.name} (ZeRO-1 at micro-batch 1 fills {filled:.0%})")
    return ", ".join(found) or "none"


def links() -> list[str]:
    """7 B, full fine-tune: 2xA100 with NVLink or 8xRTX3090 on PCIe?"""
    what = job("meta-llama/Llama-2-7b-hf")
    specs = {"A100": "2xA100-80GB:nvlink", "3090": "8xRTX3090:pcie"}
    best = {name: best_deepspeed(what, spec) for name, spec in specs.items()}
    a100, small = best["A100"], best["3090"]
    faster = small.speed.step.total / a100.speed.step.total
    stages = {
        f"{name}, ZeRO-{stage}{' with offload' * bool(more)}": (
            job(
                "meta-llama/Llama-2-7b-hf", strategy=zero(stage, **more),
                train={"gradient_checkpointing": "full", "micro_batch": 4},
            ),
            spec,
        )
        for name, spec in specs.items()
        for stage, more in ((2, {}), (2, OFFLOADED), (3, {}), (3, OFFLOADED))
    }  # fmt: skip
    return [
        f"The two A100s: a step is {faster:.1f} times as fast, with a quarter of the GPUs. "
        "DeepSpeed's stages with activation checkpointing and micro-batch 4:",
        "",
        *compared(stages),
        f"*2xA100 with NVLink*: {_stage(a100)}, micro-batch {a100.work.micro_batch}.",
        "",
        "- Stage: the fastest of those that leave 3 % of the memory free. Each higher stage "
        "communicates more.",
        "- Offload: none. It would add the transfers, and an update on the CPU, to each step.",
        f"- Buckets: {_bucket(a100, specs['A100'])}",
        "- `overlap_comm: true`: communication overlaps with the backward pass; "
        f"{a100.speed.step.communication:.2f} s of {a100.speed.step.total:.1f} are exposed.",
        "",
        *deepspeed_file(a100.job, specs["A100"]),
        f"*8xRTX3090 on PCIe*: {_stage(small)}, micro-batch {small.work.micro_batch}.",
        "",
        "- Stage: ZeRO-2 without offload doesn't fit in 24 GB, because each card holds all "
        "weights; so optimizer states are offloaded, or weights sharded, or both.",
        f"- Offload: it needs {small.host / GIB:.0f} GiB of CPU memory, and the eight ranks share "
        "the CPU's cores for the update. `pin_memory` makes the copies faster.",
        f"- Buckets: {_bucket(small, specs['3090'])}",
        "- `overlap_comm: true`: these cards communicate through the host; "
        f"{small.speed.step.communication:.1f} s of {small.speed.step.total:.1f} are exposed.",
        "- As few micro-batches as fit: gathers and reductions are repeated in each.",
        "",
        *deepspeed_file(small.job, specs["3090"]),
        "Every strategy on both:",
        "",
        *ranked(what, specs["A100"]),
        *ranked(what, specs["3090"]),
    ]  # fmt: skip


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def _stage(found: Forecast) -> str:
    strategy = found.job.strategy
    assert isinstance(strategy, DeepSpeed)
    zero = strategy.zero_optimization
    parts = [
        name
        for name, place in (("optimizer", zero.offload_optimizer), ("weights", zero.offload_param))
        if place.device != "none"
    ]
    return f"ZeRO-{zero.stage}" + f", {' and '.join(parts)} in CPU memory" * bool(parts)


def _bucket(found: Forecast, spec: str) -> str:
    """How long a bucket takes beside the latency of a message."""
    cluster = parse_cluster(spec)
    elements = zero_of(found).reduce_bucket_size or 0
    group = RankGroup(cluster.gpus, cluster.gpus, 1)
    seconds = 2 * elements / bandwidth(group, cluster, chip_of(cluster.gpu.name))
    start = cluster.intra_node.latency * (cluster.gpus - 1)
    return (
        f"{elements / 1e6:.0f} million elements take {seconds * 1e3:.2g} ms over this link, "
        f"against {start * 1e6:.0f} µs of latency. Larger buckets would only take memory."
    )


def three_times_slower() -> list[str]:
    """A ZeRO-3 run on 4 GPUs is three times slower than expected. Why?"""
    name = "meta-llama/Llama-2-13b-hf"

    def with_micro(micro: int, stage: int = 3, **more: Any) -> Job:
        return job(
            name,
            strategy=zero(stage, **more),
            train={"micro_batch": micro, "gradient_checkpointing": "full"},
            data={"sequence_length": 512},
        )

    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    rows = {
        "as expected: NVLink, micro-batch 16": (with_micro(16), "4xA100-80GB"),
        "micro-batch 1": (with_micro(1), "4xA100-80GB"),
        "PCIe": (with_micro(16), "4xA100-80GB:pcie"),
        "PCIe, micro-batch 1": (with_micro(1), "4xA100-80GB:pcie"),
        "all in CPU memory": (with_micro(16, **both), "4xA100-80GB"),
        "two nodes of 2, 25 Gbit/s": (with_micro(16), "2x2xA100-80GB@25Gbps"),
        "PCIe, ZeRO-2, optimizer in CPU memory": (
            with_micro(16, 2, **OFFLOADED),
            "4xA100-80GB:pcie",
        ),
    }
    found = {key: _forecast(*each) for key, each in rows.items()}
    expected = found["as expected: NVLink, micro-batch 16"].speed.step.total
    slow = found["PCIe, micro-batch 1"]
    gathered = sum(move.gib for move in slow.traffic().moves if move.what == "params")
    times = "; ".join(
        f"{key}: {each.speed.step.total / expected:.1f}" for key, each in list(found.items())[1:]
    )
    return [
        "ZeRO-3 gathers all weights twice in every micro-batch. So the traffic of a step grows "
        "with the number of micro-batches, not of tokens: gradient accumulation is nearly free "
        "under DDP and expensive here, most of all over PCIe. The same 64 rows, with what usually "
        "goes wrong:",
        "",
        *compared(rows),
        f"Step times relative to the first row: {times}. At micro-batch 1 each GPU receives "
        f"{gathered:,.0f} GiB of weights in a step.",
        "",
        "How to find the cause, in this order:",
        "",
        "1. *What is the forecast?* `shardtune estimate job.yaml --cluster 4xA100-80GB` prints "
        "the parts of a step and the traffic by link. A run prints its forecast when it starts, "
        "and compares it with what it measures.",
        "2. *Is the machine what you think?* `shardtune doctor job.yaml` checks GPUs, driver and "
        "shared memory, and on several nodes compares the speed of each link with the traffic of "
        "the job. `nvidia-smi topo -m` shows whether GPUs are connected by NVLink (`NV#`) or "
        "through the host (`SYS`, `PHB`).",
        "3. *How fast are its links and matmuls?* `shardtune bench --out here.yaml`, then "
        "`shardtune estimate job.yaml --cluster here.yaml`: if this forecast is as slow as the "
        "run, the machine is the cause, otherwise the run.",
        "4. *Where does the run lose time?* [`shardtune diagnose RUN`](diagnose.md) finds the "
        "bottleneck, compares it with the forecast, and prints remedies to paste; `train "
        "--profile 5` names the collectives. With `strategy.wall_clock_breakdown: true` DeepSpeed "
        "logs `fwd`, `bwd`, `bwd_allreduce` and `step` in milliseconds: long `fwd` and `bwd` "
        "point to gathers, a long `step` to offload, a long `bwd_allreduce` to reductions.",
        "",
        "What to change:",
        "",
        "| finding | change |",
        "|---|---|",
        "| many micro-batches of few rows | a larger `train.micro_batch`, with "
        "`gradient_checkpointing: full` to make room |",
        "| gathers aren't hidden (the forecast's communication is as large) | ZeRO-2 if unsharded "
        "weights fit; else `overlap_comm`, a larger `stage3_prefetch_bucket_size`, or a larger "
        "`stage3_max_live_parameters`, which keeps weights that are needed again soon |",
        "| the network between nodes | `zero_hpz_partition_size` as large as a node (ZeRO++), or "
        "FSDP with `sharding: hybrid`: gathers stay inside a node |",
        "| offload (`step` is long, the CPU busy) | offload the optimizer states only, or nothing; "
        "more cores per rank; pinned memory |",
        "| many small weights | `stage3_param_persistence_threshold: 100000`: small ones aren't "
        "sharded |",
        "| ranks wait for data | the [data cache](data.md) on a local disk; one CPU thread fewer "
        "per rank (`launch.threads`) |",
        "",
    ]


def falcon() -> list[str]:
    """Falcon-180B on 8xA100-80GB?"""
    name = "tiiuae/falcon-180B"
    return [
        "Full fine-tune:", "",
        *ranked(job(name), "8xA100-80GB"),
        "LoRA on 16-bit weights:", "",
        *ranked(job(name, adapter=LORA), "8xA100-80GB"),
        "LoRA on 4-bit weights:", "",
        *ranked(job(name, adapter=LORA, model={"quantization": "nf4"}), "8xA100-80GB"),
    ]  # fmt: skip


def seventy_billion() -> list[str]:
    """Llama-2-70B on two cards of 24 GB, with QLoRA?"""
    what = job(
        "meta-llama/Llama-2-70b-hf",
        adapter=LORA,
        model={"quantization": "nf4"},
        data={"sequence_length": 1024},
        train={"global_batch": 8},
    )
    return ranked(what, "2xRTX4090")


def two_nodes() -> list[str]:
    """40 B on two nodes: what does the network do?"""
    lines = []
    for speed in (100, 400, 3200):
        lines += ranked(
            job("tiiuae/falcon-40b", train={"global_batch": 256}), f"2x8xA100-80GB@{speed}Gbps"
        )
    return lines


SCENARIOS: tuple[Callable[[], list[str]], ...] = (
    thirteen_billion,
    links,
    three_times_slower,
    falcon,
    seventy_billion,
    two_nodes,
)
HEAD = """\
# Questions, answered by the planner

Ask what a model would do on a cluster that you don't have:

```sh
shardtune plan recipes/fsdp_full.yaml --cluster 4xA40 model.name=llama-2-13b
```

The answers below are forecasts, written by `python docs/make_scenarios.py`; [how accurate they
are](benchmarks/planner_accuracy.md). All jobs are in bf16 with AdamW, with fused loss and compiled
layers where the strategy supports them. Communication is exposed communication: what no compute
hides. *Tight*: the expected memory fits, the upper end of its error band doesn't.
"""


def page() -> str:
    parts = [HEAD]
    for scenario in SCENARIOS:
        question = (scenario.__doc__ or "").strip()
        parts += [f"## {question}", "", *scenario()]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    text = page()
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
