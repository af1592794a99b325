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
    """A job of 64 rows of 2048 tokens on the fast path, with what a scenario changes in it."""
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
    trained = {"none": "all weights", "lora": "LoRA", "ia3": "IA3"}[what.adapter.type]
    packed = "" if what.model.quantization == "none" else f" on {what.model.quantization}"
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
    """The DeepSpeed configuration of a job, as our engine hands it over."""
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


def with_zero(found: Forecast, **settings: Any) -> Job:
    """Its job with further keys of `zero_optimization`."""
    strategy = found.job.strategy
    assert isinstance(strategy, DeepSpeed)
    section = strategy.zero_optimization.model_copy(update=settings)
    changed = strategy.model_copy(update={"zero_optimization": section})
    return found.job.model_copy(update={"strategy": changed})


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
    return [
        "The question comes from a run in which ZeRO-1 filled 95 % of the memory at batch 1, and "
        "ZeRO-2 allowed batch 2. The difference between the two stages is that ZeRO-2 keeps a "
        "quarter of the gradients instead of all of them, and reduces them in every micro-batch "
        "instead of once a step. With activation checkpointing (`full`):",
        "",
        *compared(rows),
        "Which to choose:",
        "",
        f"- *All weights*: neither. 16-bit weights ({params:.1f} GiB) and, in the peak of ZeRO-1, "
        f"gradients ({grads:.1f} GiB) alone are more than the card has: {shortage(full)}. What "
        f"fits is offload: `{best.job.strategy.written()}` at micro-batch {best.work.micro_batch} "
        f"needs {best.memory.required / GIB:.1f} GiB and {best.speed.step.total:.0f} s a step, "
        f"and a node needs {best.host / GIB:.0f} GiB of CPU memory.",
        "- *LoRA*: gradients are next to nothing, so the stages don't differ in memory. Take "
        "ZeRO-1 (or DDP): it sends once a step.",
        "- *Where both fit at the same micro-batch, ZeRO-1*. With micro-batches to accumulate "
        f"ZeRO-2 sends more: {sent[1]:.1f} s a step beside {sent[0]:.1f} s here, over PCIe.",
        "- *ZeRO-2 where it makes room for a larger micro-batch*, which is where whole gradients "
        "are about as large as a row's activations. Of the catalogue's models, fine-tuned in full "
        f"on rows of 512 tokens, that holds for: {_between()}.",
        "",
        "Which parameters to adjust, in this order:",
        "",
        "1. `train.gradient_checkpointing: full` before anything else: it costs about a third more "
        "computing and makes activations small.",
        "2. `train.micro_batch` as large as fits, with `global_batch` as it is: fewer "
        "micro-batches are fewer reductions under ZeRO-2.",
        "3. `reduce_bucket_size`: a bucket of 5e8 elements is 0.93 GiB in 16 bits, and with "
        "`overlap_comm` there are two. 5e7 gives 1.7 GiB back.",
        "4. `offload_optimizer: {device: cpu}`, then stage 3 with `offload_param`.",
        "",
        "The DeepSpeed file of what fits, to be used as it is (`strategy: {type: deepspeed, "
        "config: ds.json}`) or with DeepSpeed's own launcher:",
        "",
        *deepspeed_file(with_zero(best, reduce_bucket_size=50_000_000, overlap_comm=True), "4xA40"),
        "What the planner says for a full fine-tune of the 13 B model:",
        "",
        *ranked(job(name), "4xA40"),
    ]


def _between() -> str:
    """Models that on 4xA40 leave room for one row with ZeRO-1 and for two with ZeRO-2."""
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
        f"The two A100s: a step is {faster:.1f} times as fast, with a quarter of the GPUs. Memory "
        "decides the stage, the link decides the rest. DeepSpeed's stages with activation "
        "checkpointing and micro-batches of 4:",
        "",
        *compared(stages),
        f"*2xA100 with NVLink*: {_stage(a100)}, micro-batch {a100.work.micro_batch}.",
        "",
        "- Stage: the lowest that fits. Each stage more sends more, and with two ranks stage 3 "
        "halves weights that fit whole.",
        "- Offload: none. It would put the update and the bus into each step.",
        f"- Buckets: {_bucket('2xA100-80GB:nvlink', 500_000_000)} Large ones are fine where there "
        "is memory for two of them.",
        "- `overlap_comm: true`: communication hides behind the backward pass, "
        f"{a100.speed.step.communication:.2f} s of {a100.speed.step.total:.1f} remain.",
        "",
        *deepspeed_file(
            with_zero(a100, overlap_comm=True, reduce_bucket_size=500_000_000), specs["A100"]
        ),
        f"*8xRTX3090 on PCIe*: {_stage(small)}, micro-batch {small.work.micro_batch}.",
        "",
        "- Stage: ZeRO-2 without offload doesn't fit in 24 GB, since each card holds all weights "
        "and two buckets; so states are offloaded or weights are divided.",
        f"- Offload: a node needs {small.host / GIB:.0f} GiB of CPU memory for it. Eight ranks "
        "share the processor, so pin memory and leave cores to the update.",
        f"- Buckets: {_bucket('8xRTX3090:pcie', 50_000_000)} So small ones cost nothing, and give "
        "1.7 GiB back.",
        "- `overlap_comm: true` still: these cards send over the host, and what isn't hidden is "
        f"{small.speed.step.communication:.1f} s of {small.speed.step.total:.1f}.",
        "- As few micro-batches as fit: gathers and reductions come with each of them.",
        "",
        *deepspeed_file(
            with_zero(
                small, overlap_comm=True, reduce_bucket_size=50_000_000,
                stage3_prefetch_bucket_size=50_000_000,
            ),
            specs["3090"],
        ),
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


def _bucket(spec: str, elements: int) -> str:
    """How long a bucket takes beside the start-up time of a message."""
    cluster = parse_cluster(spec)
    chip = chip_of(cluster.gpu.name)
    group = RankGroup(cluster.gpus, cluster.gpus, 1)
    seconds = 2 * elements / bandwidth(group, cluster, chip)
    start = cluster.intra_node.latency * (cluster.gpus - 1)
    return (
        f"{elements / 1e6:.0f} million elements take {seconds * 1e3:.0f} ms over this link, and a "
        f"message {start * 1e6:.0f} us to start."
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
    times = ", ".join(
        f"{key}: {each.speed.step.total / expected:.1f} x" for key, each in found.items()
    )
    return [
        "ZeRO-3 gathers all weights twice in every micro-batch. What a step sends grows with the "
        "number of micro-batches, not with the number of tokens: gradient accumulation, which is "
        "free elsewhere, costs everything here, and most over PCIe. The same 64 rows, with what "
        "usually goes wrong:",
        "",
        *compared(rows),
        f"Beside what is expected that is {times}. At micro-batch 1 over PCIe each GPU gets "
        f"{gathered:,.0f} GiB of weights in a step.",
        "",
        "How to find the cause, in this order:",
        "",
        "1. *What did you expect?* `shardtune estimate job.yaml --cluster 4xA100-80GB` says how "
        "the step divides into parts, and what goes over which link. A run prints the same "
        "forecast when it starts, and measures beside it.",
        "2. *Is the machine what you think?* `shardtune doctor job.yaml` checks GPUs, driver, "
        "shared memory, and between nodes the speed of each link beside what the job sends. "
        "`nvidia-smi topo -m` shows whether GPUs have NVLink (`NV#`) or go over the host (`SYS`, "
        "`PHB`).",
        "3. *How fast are its links and matmuls?* `shardtune bench --out here.yaml`, then "
        "`shardtune estimate job.yaml --cluster here.yaml`: if this forecast is as slow as the "
        "run, the machine is the cause; if it is fast, the run is.",
        "4. *Where does the run lose it?* `shardtune diagnose RUN` says what bounds it "
        "([how](diagnose.md)), beside the forecast, with remedies to paste; `train --profile 5` "
        "names the collectives. With `strategy.wall_clock_breakdown: true` DeepSpeed itself logs "
        "`fwd`, `bwd`, `bwd_allreduce` and `step` in milliseconds: `fwd` and `bwd` both long are "
        "gathers, `step` long is offload, `bwd_allreduce` long is the reduction.",
        "",
        "What to change, by what is found:",
        "",
        "| found | change |",
        "|---|---|",
        "| many micro-batches of few rows | a larger `train.micro_batch`, with "
        "`gradient_checkpointing: full` to make room |",
        "| gathers wait (`communication` of the forecast is as large) | ZeRO-2 where weights fit "
        "whole; else `overlap_comm`, a larger `stage3_prefetch_bucket_size`, "
        "`stage3_max_live_parameters` so that weights needed again soon stay |",
        "| nodes wait for each other | `zero_hpz_partition_size` as large as a node (ZeRO++), or "
        "FSDP with `sharding: hybrid`: gathers stay inside a node |",
        "| offload (`step` is long, the processor busy) | offload the optimizer only, or nothing; "
        "more cores per rank; pinned memory |",
        "| many small weights | `stage3_param_persistence_threshold: 100000`: small ones stay "
        "whole |",
        "| GPUs idle while data is read | `shardtune diagnose` calls it data: more "
        "`data.workers` |",
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

The answers below were written by `python docs/make_scenarios.py`. Each table says its rows and its
length; all are bf16 with AdamW, with fused loss and compiled layers where an engine has them. They
are forecasts; how far these are off is on
[this page](benchmarks/planner_accuracy.md).
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
