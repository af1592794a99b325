"""Writes the tables of docs/strategies.md and docs/planner.md: `python -m docs.make_tables`.

Sizes come from the layouts, what a strategy can do from its capabilities, what combines from the
conformance table, refusals from jobs that are refused, and forecasts from the planner. A test runs
it with `--check`, which fails if a page is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from shardtune.config.auto import resolve
from shardtune.config.job import Job
from shardtune.config.model_config import shape_of
from shardtune.config.rules import check
from shardtune.core.capabilities import Can, Capabilities
from shardtune.core.files.yaml_document import dotted
from shardtune.core.footprint import ModelBytes, predict_held, predict_sent
from shardtune.core.host.machine import Machine
from shardtune.core.units import GIB
from shardtune.errors import JobError, Problem
from shardtune.parallel import STRATEGIES as KINDS
from shardtune.parallel import Strategy
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from shardtune.plan.auto_micro_batch import within_memory
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.forecast import Forecast, forecast
from shardtune.training.engine_setup import make_plan
from tests.config.test_rules import BROKEN, OWN
from tests.config.test_rules import REFUSED as BY_STRATEGY
from tests.conformance.table import ADAPTERS, ROWS, Row
from tests.jobs import make_job

BEGIN, END = "<!-- table {name} -->", "<!-- /table {name} -->"
GB = 1e9
PARAMETERS, RANKS, MICROBATCHES = 7_500_000_000, 64, 1

Sections = dict[str, dict[str, Any]]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], aligned: str = "") -> str:
    """In Markdown. `aligned` has an `r` for each column that is a number."""
    rules = ["--:" if side == "r" else "---" for side in aligned.ljust(len(headings), "l")]
    first, *others = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    return "\n".join((first, f"|{'|'.join(rules)}|", *others))


def code(value: object) -> str:
    """A part of a job as one would write it; a bar would end the cell."""
    value = json.loads(json.dumps(value))  # YAML would write what stands twice as a reference
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
    return f"`{text.removeprefix('{').removesuffix('}')}`".replace("|", "\\|")


# Memory and traffic ------------------------------------------------------------------------------

STRATEGIES: dict[str, dict[str, Any]] = {
    "`ddp`": {"type": "ddp"},
    "ZeRO-1": {"type": "deepspeed", "zero_optimization": {"stage": 1}},
    "ZeRO-2": {"type": "deepspeed", "zero_optimization": {"stage": 2}},
    "ZeRO-3": {"type": "deepspeed", "zero_optimization": {"stage": 3}},
    "ZeRO-3 + hpZ 8": {
        "type": "deepspeed",
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8},
    },
    "`fsdp`, full": {"type": "fsdp"},
    "`fsdp`, hybrid, 8 replicas": {"type": "fsdp", "sharding": "hybrid", "replicas": 8},
}


def strategy(settings: dict[str, Any]) -> Strategy:
    return TypeAdapter(Strategy).validate_json(json.dumps(settings))


def mixed_adam(parameters: int) -> ModelBytes:
    """The ZeRO paper's count: 2 bytes a weight, 2 a gradient, 12 for master and two moments."""
    return ModelBytes(
        params=2 * parameters, trained=2 * parameters, grads=2 * parameters, optim=12 * parameters
    )


def memory_and_traffic() -> str:
    whole = mixed_adam(PARAMETERS)
    rows = []
    for name, settings in STRATEGIES.items():
        chosen = strategy(settings)
        mesh = chosen.mesh(RANKS)
        # The paper's 12 bytes include the fp32 masters.
        held = predict_held(chosen.layout().without_masters(), mesh, whole)
        sizes = [held.of(state) / GB for state in ("params", "grads", "optim")]
        sent = predict_sent(chosen.layout(), mesh, whole, microbatches=MICROBATCHES)
        # An all-reduce is a reduce-scatter and an all-gather: it moves its bytes twice.
        moved = sum(size * (2 if op == "all_reduce" else 1) for op, size in sent.items())
        figures = [f"{size:.2f}" for size in sizes]
        rows.append([name, *figures, f"{sum(sizes):.1f}", f"{moved / whole.params:.2f}"])
    headings = [
        "strategy",
        "weights, GB",
        "gradients, GB",
        "optimizer states, GB",
        "total, GB",
        "sent, times the weights",
    ]
    return table(headings, rows, "lrrrrr")


# What each can do --------------------------------------------------------------------------------

STATE_NAMES = {"params": "weights", "grads": "gradients", "optim": "optimizer states"}
ABILITIES: dict[str, Callable[[Capabilities], str]] = {
    "`train.precision`": lambda can: listed(can.precisions.values),
    "`model.quantization`": lambda can: listed(can.quantizations.values),
    "`adapter.type`": lambda can: listed(can.adapters.values),
    "`adapter.variant`": lambda can: listed(can.variants.values),
    "`train.optimizer.bits`": lambda can: listed(can.optimizer_bits.values),
    "`train.gradient_checkpointing`": lambda can: listed(can.checkpointing.values),
    "`train.offload_activations`": lambda can: yes(can.activation_offload),
    "`train.kernels: compiled`": lambda can: yes(can.compiled_layers),
    "`train.loss: fused`": lambda can: yes(can.fused_loss),
    "`train.router_aux_loss_coef`": lambda can: yes(can.router_losses),
    "offloads, by its own fields": lambda can: "; ".join(
        f"{STATE_NAMES[state]}: {listed(homes)}" for state, homes in can.offload.items()
    ),
    "combines, by its own fields, with": lambda can: listed(sorted(can.combines)),
    "`estimate --dry-run`": lambda can: yes(can.dry_run),
    "needs": lambda can: ", ".join(f"`{need.command}`" for need in can.needs),
}
"""The rows of the table, and what stands in them."""


def listed(values: Sequence[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def yes(able: Can) -> str:
    return "yes" if able else "no"


def abilities() -> str:
    """The capabilities that each strategy declares, with two ranks where it asks for a number."""
    columns = {}
    for name, kind in KINDS.items():
        if kind.planned or not kind.__module__.startswith("shardtune."):
            continue
        asked = {key: 2 for key, field in kind.model_fields.items() if field.is_required()}
        columns[name] = kind.model_validate(asked).capabilities
    lines = [[row, *(show(can) for can in columns.values())] for row, show in ABILITIES.items()]
    return table(["", *(f"`{name}`" for name in columns)], lines)


# What combines -----------------------------------------------------------------------------------

NAMES = {
    "full": "full fine-tune",
    "lora": "LoRA",
    "ia3": "IA3",
    "qlora": "QLoRA",
    "fp8": "LoRA, fp8",
}
"""What a row's adapter is called in a heading."""


def combinations() -> str:
    """The rows of the conformance table, a line for each strategy."""
    by_strategy: dict[str, dict[str, Row]] = {}
    for row in ROWS:
        by_strategy.setdefault(row.strategy, {})[row.adapter] = row
    lines = []
    for name, rows in by_strategy.items():
        any_row = next(iter(rows.values()))
        cells = [cell(rows[adapter]) if adapter in rows else "" for adapter in ADAPTERS]
        lines.append([f"`{name}`", settings_of(any_row), str(any_row.ranks), *cells])
    headings = ["row", "`strategy`", "ranks", *(NAMES.get(each, each) for each in ADAPTERS)]
    return table(headings, lines, "llr")


def cell(row: Row) -> str:
    """A row's job: refused, or run by the test of that name."""
    adapter, quantization = ADAPTERS[row.adapter]
    sections: Sections = {
        "model": {"name": "tiny", "quantization": quantization},
        "adapter": adapter,
        "strategy": row.settings,
        "launch": {"processes": row.ranks},
    }
    problems = refusal(sections)
    if problems:
        return f"refused: {problems[0].fact}"
    return "GPU only" if needs_gpu(read(sections)) else f"equal: `{row.id}`"


def settings_of(row: Row) -> str:
    """The row's strategy, without the sizes that only a tiny model needs to be sharded."""
    settings = dict(row.settings)
    if "zero_optimization" in settings:
        zero = settings["zero_optimization"]
        settings["zero_optimization"] = {k: v for k, v in zero.items() if k[:7] != "stage3_"}
    return code(settings)


# What is refused ---------------------------------------------------------------------------------


def zero(stage: int, **settings: Any) -> Sections:
    return {"strategy": {"type": "deepspeed", "zero_optimization": {"stage": stage, **settings}}}


CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "swap"}
REFUSED: list[Sections] = [
    # Of the rules, those in which a model, an adapter or a strategy meets something.
    *(made for made, _ in BROKEN.values() if made.keys() & {"model", "adapter", "strategy"}),
    *(made for _, made, _ in BY_STRATEGY.values()),
    *(made for made, _ in OWN.values()),
    {
        "strategy": {"type": "fsdp", "sharding": "hybrid", "replicas": 3},
        "launch": {"processes": 4},
    },
    zero(0, offload_optimizer=CPU),
    zero(2, offload_optimizer=NVME),
    zero(2, offload_param=CPU),
    zero(2, zero_hpz_partition_size=2) | {"launch": {"processes": 2}},
    zero(3, zero_hpz_partition_size=3) | {"launch": {"processes": 4}},
    zero(2, zero_quantized_weights=True),
    zero(2, zero_quantized_gradients=True),
    zero(3, offload_param={"device": "nvme"}),
]
"""Jobs that are refused everywhere."""
NO_GPU: list[Sections] = [
    zero(3, zero_quantized_weights=True),
    zero(3, zero_quantized_nontrainable_weights=True),
    zero(3, zero_quantized_gradients=True),
]
"""Jobs that are refused on a machine without a GPU."""
FILES: list[dict[str, Any]] = [
    {"zero_optimization": {"stage": 3, "stage3_prefech_bucket_size": 5e7}},
    {"train_batch_size": 32},
    {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
    {"scheduler": {"type": "OneCycle"}},
]
"""DeepSpeed files that are refused beside a job with `global_batch: 16`."""


def read(sections: Sections) -> Job:
    """The job with these sections, resolved, with enough rows for every rank."""
    data = {"data": {"train": [{"path": "a.jsonl", "format": "completion"}]}}
    return resolve(make_job(**(data | sections)), Machine(cores=4, gpus=0)).job


def refusal(sections: Sections) -> tuple[Problem, ...]:
    """What a job is refused for before anything is started."""
    try:
        job = read(sections)
        check(job, dotted)
        make_plan(job, int(job.launch.processes), job.train.steps or 1)
    except JobError as error:
        return error.problems
    return ()


def needs_gpu(job: Job) -> list[Problem]:
    """What is wrong with a job that would not be wrong if there was a GPU."""
    if not isinstance(job.strategy, DeepSpeed):
        return []
    # In a precision that every CPU has: the page must not depend on the machine that makes it.
    anyway = job.strategy.problems_here(gpu=True, precision="fp32")
    here = job.strategy.problems_here(gpu=False, precision="fp32")
    return [each for each in here if each not in anyway]


def refusals() -> str:
    found = [(written(sections), refusal(sections)) for sections in REFUSED]
    found += [(written(sections), tuple(needs_gpu(read(sections)))) for sections in NO_GPU]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zero.json"
        for content in FILES:
            path.write_text(json.dumps(content))
            chosen = {"type": "deepspeed", "config": str(path)}
            problems = refusal({"strategy": chosen, "train": {"global_batch": 16}})
            found.append((f"`config:` {code(content)}", problems))
    lines = []
    for shown, problems in found:
        if not problems:
            raise SystemExit(f"the page says that this is refused, and it isn't: {shown}")
        problem = problems[0]
        key = problem.place.split()[-1]  # of a file only the key, not where it lies
        told = (f"`{key}`: {problem.fact}", problem.fix)
        lines.append([shown, *(text.replace("|", "\\|") for text in told)])
    return table(["job", "why it is refused", "instead"], lines)


def written(sections: Sections) -> str:
    """The sections that matter; which model it is doesn't."""
    model = {key: value for key, value in sections.get("model", {}).items() if key != "name"}
    shown = {"model": model} if model else {}
    return code(shown | {key: value for key, value in sections.items() if key != "model"})


# Forecasts ---------------------------------------------------------------------------------------


def on_an_h200(rows: int, **train: Any) -> Forecast:
    """LoRA on an 8 B Llama, as `shardtune estimate` has it with these settings of `train`."""
    job = make_job(
        model={"name": "llama-3.1-8b"},
        adapter={"type": "lora", "rank": 16},
        data={"train": [{"path": "a.jsonl", "format": "completion"}], "sequence_length": 2048},
        train={"steps": 100, "global_batch": rows, **train},
    )
    shape, cluster = shape_of(job.model), parse_cluster("1xH200")
    planner = partial(within_memory, shape=shape, cluster=cluster)
    chosen = resolve(job, Machine(cores=16, gpus=1), 1, planner=planner).job
    return forecast(chosen, shape, cluster)


def rows_at_once() -> str:
    tries = [on_an_h200(32, micro_batch=2**n) for n in range(6)]
    taken = on_an_h200(32).work.micro_batch
    names = [f"{n}{' (taken)' * (n == taken)}" for n in (each.work.micro_batch for each in tries)]
    speeds = [f"{each.speed.tokens_per_second:,.0f}" for each in tries]
    needed = [
        f"{each.memory.required / GIB:.1f}" if each.fits else "does not fit" for each in tries
    ]
    lines = [["tokens a second", *speeds], ["GiB required", *needed]]
    return table(["rows", *names], lines, "lrrrrrr")


def levels() -> str:
    lines = []
    for room in (None, 60, 44, 36, 30, 26):
        settings = {"micro_batch": 8, "gradient_checkpointing": "auto", "memory_gib": room}
        found = on_an_h200(8, **settings)
        shown = f"{room}" if room else f"null ({found.capacity / GIB:.1f})"
        kept = str(found.work.kept_layers or "")
        sizes = f"{found.memory.required / GIB:.1f}", f"{found.speed.step.total * 1e3:.0f}"
        lines.append([shown, f"`{found.work.checkpointing}`", kept, *sizes])
    headings = "`train.memory_gib`", "level", "layers exempt", "GiB required", "ms a step"
    return table(headings, lines, "rlrrr")


def waiting() -> str:
    """What activation offload costs."""
    lines = []
    for level in ("full", "most", "none"):
        settings = {"micro_batch": 8, "gradient_checkpointing": level}
        here, there = (
            on_an_h200(8, offload_activations=offload, **settings) for offload in (False, True)
        )
        figures = []
        for each in (here, there):
            figures += [
                f"{each.memory.required / GIB:.1f}",
                f"{each.speed.step.total * 1e3:.0f}",
            ]
        lines.append([f"`{level}`", *figures, f"{there.memory.host / GIB:.1f}"])
    headings = "level", "GiB", "ms a step", "offloaded: GiB", "ms a step", "GiB in CPU memory"
    return table(headings, lines, "lrrrrr")


# The pages ---------------------------------------------------------------------------------------

PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "strategies.md": {
        "memory": memory_and_traffic,
        "capabilities": abilities,
        "combinations": combinations,
        "refusals": refusals,
        "waiting": waiting,
    },
    "planner.md": {"rows": rows_at_once, "levels": levels},
}


def filled(page: Path) -> str:
    """The text of a page with its tables as they are now."""
    text = page.read_text(encoding="utf-8")
    for name, make in PAGES[page.name].items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        if begin not in text or end not in text:
            raise SystemExit(f"{page}: has no place for the table {name!r}")
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n{make()}\n{end}{tail}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are current")
    only_check = parser.parse_args().check
    pages = [Path(__file__).with_name(name) for name in PAGES]
    old = [page for page in pages if filled(page) != page.read_text(encoding="utf-8")]
    for page in old:
        if only_check:
            print(f"{page} is out of date: run python -m docs.make_tables", file=sys.stderr)
        else:
            page.write_text(filled(page), encoding="utf-8")
    return int(only_check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
