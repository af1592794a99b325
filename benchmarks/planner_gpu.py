"""Predicted beside measured on the GPU at hand: memory and step time of a dozen jobs.

    shardtune bench --out machine.yaml
    python -m benchmarks.planner_gpu machine.yaml > log
    python -m benchmarks.planner_gpu machine.yaml --compare log
    python -m benchmarks.planner_gpu machine.yaml --records docs/benchmarks/gpu.json

Every job runs on the ordinary engine, in a process of its own, on random weights of the true shape.
The forecast is made before, from the profile that `shardtune bench` has written. `--compare` sets
today's forecast beside what an earlier run measured, without a GPU; so does `--records`, beside
what `benchmarks.gpu` has measured of ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import leave_on_sigterm
from benchmarks.gpu_card import clocked
from benchmarks.gpu_cases import COMMAND, our_job
from benchmarks.gpu_report import latest, letters_of
from benchmarks.gpu_sample import case_of
from benchmarks.table import DOCS, write_table
from shardtune.config.job import Job
from shardtune.core.model.known_models import catalogue, known_model
from shardtune.core.units import GIB
from shardtune.core.world import World
from shardtune.measure.dry_run import micro_batch
from shardtune.models.builder import MetaModelBuilder
from shardtune.models.weight_files import NoFiles
from shardtune.plan.cluster import Cluster, parse_cluster
from shardtune.plan.forecast import Forecast, forecast
from shardtune.training.engine_setup import make_plan

WARM, STEPS = 3, 8
LORA = {"type": "lora", "rank": 16}
NF4 = {"quantization": "nf4"}


def job(name: str, rows: int, length: int, **sections: Any) -> dict[str, Any]:
    train = {"micro_batch": rows, "global_batch": rows, "steps": 1000, "loss": "fused"}
    train |= {"precision": "bf16"}
    return {
        "model": {"name": name, **sections.pop("model", {})},
        "data": {"train": [{"path": "-", "format": "chat"}], "sequence_length": length},
        "train": train | {"kernels": "compiled"} | sections.pop("train", {}),
        "launch": {"processes": 1},
        **sections,
    }


SMALL, MIDDLE, LARGE, HUGE = (
    f"meta-llama/Llama-{size}" for size in ("3.2-1B", "3.2-3B", "3.1-8B", "3.1-70B")
)
FULL = {"gradient_checkpointing": "full"}
PLAIN = {"loss": "plain", "kernels": "eager"}
MLP, MOST = ({"gradient_checkpointing": level} for level in ("mlp", "most"))
KEPT = MLP | {"keep_layers": 12}
AWAY = {"offload_activations": True}
PAGED = {"optimizer": {"type": "adamw", "paged": True}}
FP8 = {"quantization": "fp8"}
JOBS: dict[str, dict[str, Any]] = {
    "1 B, all weights, 8 x 2048": job(SMALL, 8, 2048),
    "1 B, all weights, paged, 8 x 2048": job(SMALL, 8, 2048, train=PAGED),
    "8 B, all weights, paged, 8 x 2048": job(LARGE, 8, 2048, train=PAGED),
    "1 B, all weights, plain, 4 x 2048": job(SMALL, 4, 2048, train=PLAIN),
    "1 B, all weights, recomputed, 2 x 16384": job(SMALL, 2, 16384, train=FULL),
    "3 B, all weights, recomputed, 8 x 2048": job(MIDDLE, 8, 2048, train=FULL),
    "3 B, LoRA, 4 x 4096": job(MIDDLE, 4, 4096, adapter=LORA),
    "8 B, LoRA, 8 x 2048": job(LARGE, 8, 2048, adapter=LORA),
    "8 B, LoRA, 2 x 8192": job(LARGE, 2, 8192, adapter=LORA),
    "8 B, LoRA, plain, 4 x 2048": job(LARGE, 4, 2048, adapter=LORA, train=PLAIN),
    "8 B, LoRA, recomputed, 8 x 2048": job(LARGE, 8, 2048, adapter=LORA, train=FULL),
    "8 B, LoRA, recomputed, 1 x 16384": job(LARGE, 1, 16384, adapter=LORA, train=FULL),
    "8 B, LoRA, recomputed, plain, 8 x 2048": job(LARGE, 8, 2048, adapter=LORA, train=FULL | PLAIN),
    "8 B, QLoRA, 8 x 2048": job(LARGE, 8, 2048, adapter=LORA, model=NF4),
    "8 B, QLoRA, recomputed, 4 x 4096": job(LARGE, 4, 4096, adapter=LORA, model=NF4, train=FULL),
    "1 B, LoRA, 16 x 1024": job(SMALL, 16, 1024, adapter=LORA),
    "3 B, QLoRA, 2 x 8192": job(MIDDLE, 2, 8192, adapter=LORA, model=NF4),
    "8 B, LoRA, 1 x 4096": job(LARGE, 1, 4096, adapter=LORA),
    "70 B, QLoRA, recomputed, 4 x 2048": job(HUGE, 4, 2048, adapter=LORA, model=NF4, train=FULL),
    "8 B, LoRA, mlp, 2 x 8192": job(LARGE, 2, 8192, adapter=LORA, train=MLP),
    "8 B, LoRA, mlp but in 12 layers, 8 x 2048": job(LARGE, 8, 2048, adapter=LORA, train=KEPT),
    "8 B, LoRA, mlp, 1 x 16384": job(LARGE, 1, 16384, adapter=LORA, train=MLP),
    "8 B, LoRA, most, offloaded, 8 x 2048": job(LARGE, 8, 2048, adapter=LORA, train=MOST | AWAY),
    "8 B, LoRA, recomputed, offloaded, 8 x 2048": job(
        LARGE, 8, 2048, adapter=LORA, train=FULL | AWAY
    ),
    "8 B, LoRA, fp8 base, 8 x 2048": job(LARGE, 8, 2048, adapter=LORA, model=FP8),
    "8 B, LoRA, fp8 base, mlp, 2 x 8192": job(LARGE, 2, 8192, adapter=LORA, model=FP8, train=MLP),
}


@dataclass(frozen=True)
class RandomWeights(NoFiles):
    """Weights of the right shapes, drawn on the GPU."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            shape = self.shapes[name]
            if len(shape) == 1:
                yield name, torch.ones(shape, dtype=torch.bfloat16, device="cuda")
            else:
                yield name, torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02


def builder(what: Job) -> MetaModelBuilder:
    from transformers import AutoConfig

    known = next(model for model in catalogue() if model.name == what.model.name)
    config = AutoConfig.for_model(**known.config)
    empty = MetaModelBuilder.of(config, what.model, what.adapter, what.train)
    names = empty.frame.names
    assert isinstance(names.files, NoFiles)
    drawn = replace(names, files=RandomWeights(names.files.shapes))
    return replace(empty, frame=replace(empty.frame, names=drawn))


def measure(what: Job) -> dict[str, float]:
    """In a process of its own: seconds of a step, and the peaks of allocated and reserved."""
    torch.manual_seed(0)
    world = World(device="cuda:0")
    torch.cuda.set_device(0)
    plan = make_plan(what, 1, 1000)
    rows, length = int(what.train.micro_batch), what.data.sequence_length
    batch = micro_batch(rows, length, packed=False)
    batch.input_ids.random_(0, 100_000)
    batch.targets[:, :-1] = batch.input_ids[:, 1:]
    with plan.strategy.build(builder(what), plan.setup, world) as engine:
        for _ in range(WARM):
            engine.step([batch])
        torch.cuda.reset_peak_memory_stats()
        times, losses = clocked(lambda _: engine.step([batch]), range(STEPS), "cuda")
        free, total = torch.cuda.mem_get_info()
    return {
        "seconds": median(times),
        "allocated": torch.cuda.max_memory_allocated() / GIB,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
        "used": (total - free) / GIB,
        "loss": losses[-1],
    }


def row(name: str, found: Forecast, measured: dict[str, float]) -> list[str]:
    """What else the card has given away isn't known of every run; then it is what torch had."""
    allocated, used = found.memory.allocated / GIB, found.memory.peak / GIB
    seconds = found.speed.step.total
    if "used" not in measured:
        measured, used = measured | {"used": measured["reserved"]}, found.memory.reserved / GIB
    return [
        name,
        f"{allocated:.2f}",
        f"{measured['allocated']:.2f}",
        f"{allocated / measured['allocated'] - 1:+.1%}",
        f"{used:.2f}",
        f"{measured['used']:.2f}",
        f"{used / measured['used'] - 1:+.1%}",
        f"{seconds * 1e3:.0f}",
        f"{measured['seconds'] * 1e3:.0f}",
        f"{seconds / measured['seconds'] - 1:+.1%}",
    ]


HEADINGS = [
    "job",
    *("allocated, predicted", "measured", "error"),
    *("in use, predicted", "measured", "error"),
    *("step ms, predicted", "measured", "error"),
]


def foretold(name: str, cluster: Cluster) -> Forecast:
    what = Job.model_validate_json(json.dumps(JOBS[name]))
    return forecast(what, known_model(what.model.name), cluster)


def compare(log: Path, cluster: Cluster) -> None:
    """Today's forecast beside what was measured then."""
    print(" | ".join(HEADINGS))
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name, measured, _ = json.loads(line)
            print(" | ".join(row(name, foretold(name, cluster), measured)))


def beside(file: Path, cluster: Cluster) -> list[list[str]]:
    """Forecasts of our jobs of `benchmarks.gpu`, and what they came to. Which documents share a row
    no forecast knows: packed ones are left out."""
    rows, records = [], json.loads(file.read_text(encoding="utf-8"))
    letters = letters_of(records)
    for record in latest(records):
        case, method = case_of(record["case"]), record["method"]
        ours = method in case.ours and method != COMMAND  # which is its engine once more
        if not ours or case.packed or "error" in record:
            continue
        what = Job.model_validate_json(json.dumps(our_job(case, method)))
        found = forecast(what, known_model(case.model), cluster)
        name = case.name + method.removeprefix("shardtune")
        name += f", machine {letters[record['machine']]}" if len(letters) > 1 else ""
        measured = {key: record[f"{key}_gib"] for key in ("allocated", "reserved")}
        rows.append(row(name, found, measured | {"seconds": record["seconds"]}))
    return rows


def measure_all(cluster: Cluster, chosen: list[str]) -> list[list[str]]:
    """Forecast first, then measured, one job after the other."""
    rows = []
    for name, document in JOBS.items():
        if chosen and not any(word in name for word in chosen):
            continue
        found = foretold(name, cluster)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.planner_gpu", "--one", json.dumps(document)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["?"])[-1]
            print(f"{name}: failed: {last}", flush=True)
            rows.append([name, f"{found.memory.allocated / GIB:.2f}", f"failed: {last[:80]}"])
            continue
        measured = json.loads(done.stdout.strip().splitlines()[-1])
        rows.append(row(name, found, measured))
        print(json.dumps([name, measured, found.summary().model_dump()]), flush=True)
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return [each + [""] * (len(HEADINGS) - len(each)) for each in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", nargs="?", help="profile of this machine, by `shardtune bench`")
    parser.add_argument("jobs", nargs="*", help="words of the jobs to run; all if there are none")
    parser.add_argument("--compare", type=Path, metavar="LOG", help="what an earlier run printed")
    parser.add_argument("--records", type=Path, metavar="JSON", help="of benchmarks.gpu")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER", help="(docs)")
    parser.add_argument("--note", default="", help="a paragraph to put below the table")
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Job.model_validate_json(options.one))))
        return 0
    if options.machine is None:
        parser.error("name the profile that `shardtune bench --out` has written")
    cluster = parse_cluster(options.machine)
    if options.compare:
        compare(options.compare, cluster)
        return 0
    command = machine = ""
    used = "all that the card had given away after the run: what the allocator reserved, and CUDA's"
    if options.records:
        used = "what the allocator had reserved"
        command = f"planner_gpu {Path(options.machine).name} --records {options.records}"
        machine = "from a profile by `shardtune bench`, beside [what was measured](gpu.md)"
    write_table(
        "planner_gpu",
        "Predicted and measured on a GPU",
        HEADINGS,
        beside(options.records, cluster) if options.records else measure_all(cluster, options.jobs),
        "Memory in GiB. *Allocated* is what torch's allocator handed out at the peak of a step; "
        f"*in use* is {used}. Random weights of the true shape, every token trained, bf16; median "
        "of some steps, from mark to mark on the card. LoRA of rank 16 on all linear layers."
        + (f"\n\n{options.note}" if options.note else ""),
        command=command,
        machine=machine,
        folder=options.out,
    )
    return 0


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
