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
from shardtune.core.units import GIB
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.search import Candidate, rank
from shardtune.plan.this_machine import offer, shortage

PAGE = Path(__file__).with_name("scenarios.md")
LORA = {"type": "lora", "rank": 16}


def job(name: str, **sections: Any) -> Job:
    """A job of 64 rows of 2048 tokens on the fast path, with what a scenario changes in it."""
    train = {"global_batch": 64, "steps": 1000, "loss": "fused", "kernels": "compiled"}
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
        f"`{spec}`:",
        "",
        "| strategy | step, s | tokens/s | GPU, GiB | micro-batch | checkpointing | why |",
        "|---|--:|--:|--:|--:|---|---|",
        *map(_row, ranking.candidates),
        "",
    ]
    if ranking.best is None:
        lines += [f"Nothing fits. {offer(what, shape, cluster)}.", ""]
    return lines


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
    lines = [
        "| job | fits | GPU, GiB | " + ", s | ".join(parts) + ", s | step, s | tokens/s |",
        "|---|---|--:|" + "--:|" * (len(parts) + 2),
    ]
    for name, (what, spec) in rows.items():
        found = _forecast(what, spec)
        seconds = " | ".join(f"{getattr(found.speed.step, part):.2f}" for part in parts)
        lines.append(
            f"| {name} | {'yes' if found.fits else 'no'} | {found.memory.required / GIB:.1f} / "
            f"{found.capacity / GIB:.1f} | {seconds} | {found.speed.step.total:.2f} | "
            f"{found.speed.tokens_per_second:,.0f} |"
        )
    return [*lines, ""]


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
    full = _forecast(job(name, strategy=zero(1)), "4xA40")
    params, grads = (full.memory.gpu[key] / GIB for key in ("params", "gradients"))
    rows = {
        f"{kind}, ZeRO-{stage}, micro-batch {micro}": (
            job(name, strategy=zero(stage), train={"micro_batch": micro}, **more), "4xA40",
        )
        for kind, more in (("full", {}), ("LoRA", {"adapter": LORA}))
        for stage in (1, 2)
        for micro in (1, 2)
    }  # fmt: skip
    return [
        "The question comes from a run in which ZeRO-1 filled 95 % of the memory at batch 1, and "
        "ZeRO-2 allowed batch 2. The difference between the two stages is that ZeRO-2 keeps a "
        "quarter of the gradients instead of all of them.",
        "",
        *compared(rows),
        f"In a full fine-tune, 16-bit weights ({params:.1f} GiB) and, in the peak of ZeRO-1, "
        f"gradients ({grads:.1f} GiB) alone are more than the card has: {shortage(full)}. With an "
        "adapter gradients are next to nothing, so the stages don't differ; what decides whether "
        "a second row fits is activations. ZeRO-2 makes room for a second row where whole "
        "gradients are about as large as a row's activations. Of the catalogue's models, "
        f"fine-tuned in full on rows of 512 tokens, that holds for: {_between()}.",
        "",
        "What the planner says for a full fine-tune of the 13 B model:",
        "",
        *ranked(job(name), "4xA40"),
    ]


def _between() -> str:
    """Models that on 4xA40 leave room for one row with ZeRO-1 and for two with ZeRO-2."""
    found = []
    for model in catalogue():
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
    return [*ranked(what, "2xA100-80GB:nvlink"), *ranked(what, "8xRTX3090:pcie")]


def three_times_slower() -> list[str]:
    """A ZeRO-3 run on 4 GPUs is three times slower than expected. Why?"""
    name = "meta-llama/Llama-2-13b-hf"

    def with_micro(micro: int) -> Job:
        return job(
            name,
            strategy=zero(3),
            train={"micro_batch": micro, "gradient_checkpointing": "full"},
            data={"sequence_length": 512},
        )

    rows = {
        "NVLink, micro-batch 16": (with_micro(16), "4xA100-80GB"),
        "NVLink, micro-batch 1": (with_micro(1), "4xA100-80GB"),
        "PCIe, micro-batch 16": (with_micro(16), "4xA100-80GB:pcie"),
        "PCIe, micro-batch 1": (with_micro(1), "4xA100-80GB:pcie"),
    }
    slow, fast = (
        _forecast(*rows[key]) for key in ("PCIe, micro-batch 1", "NVLink, micro-batch 16")
    )
    gathered = sum(move.gib for move in slow.traffic().moves if move.what == "params")
    return [
        "ZeRO-3 gathers all weights twice in every micro-batch. What a step sends grows with the "
        "number of micro-batches, not with the number of tokens: gradient accumulation, which is "
        "free elsewhere, costs everything here, and most over PCIe.",
        "",
        *compared(rows),
        f"At micro-batch 1 over PCIe each GPU gets {gathered:,.0f} GiB of weights in a step, and "
        f"the step takes {slow.speed.step.total / fast.speed.step.total:.1f} times as long as with "
        "NVLink and 16 rows at once. The fix is a larger micro-batch (activation checkpointing "
        "makes room for it), then ZeRO-2 if it fits, then hybrid sharding.",
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

The answers below were written by `python docs/make_scenarios.py`. Unless said otherwise: 64 rows of
2048 tokens a step, full fine-tune, bf16, AdamW, fused loss and compiled layers. They are forecasts;
how far these are off is in [benchmarks/planner_accuracy.md](benchmarks/planner_accuracy.md).
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
