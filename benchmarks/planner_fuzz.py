"""What the planner says of random jobs, and how long it takes: `python -m benchmarks.planner_fuzz`.

    python -m benchmarks.planner_fuzz --seed 1 [--jobs 10000]

Each job is given to `estimate`, and one in five to `plan`, as a file, in this process. What they
print must be JSON, or a refusal with its fix; figures must be figures. Jobs that can be had are
forecast again with one thing changed, and the memory must follow (`RELATIONS`). Exit code 1 if
anything was found.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path

from benchmarks.random_jobs import Drawn, draw_wide
from benchmarks.table import write_table
from shardtune.cli.main import parse
from shardtune.config.job import Job, LoRA, NoAdapter
from shardtune.config.rules import check
from shardtune.core.files.yaml_document import dotted, dump_document
from shardtune.core.units import GIB
from shardtune.errors import ShardtuneError
from shardtune.plan.estimate.memory_timeline import FEW_TOKENS
from shardtune.plan.estimate.transient_buffers import scale_bytes
from shardtune.plan.forecast import Forecast, forecast
from shardtune.plan.on_cluster import resolve_as_asked

JOBS = 10_000
PLAN_EVERY = 5
"""Of so many jobs one is ranked, too: that takes ten times as long."""
LIMITS = {"estimate": 0.3, "plan": 1.5}
"""Seconds of CPU time of the command at the 99th percentile."""
REFUSED = 2
"""The exit code."""
LARGEST = 2.5
"""Seconds of CPU time of `plan` for 405 B parameters on 1024 GPUs."""


# Relations: one thing is changed, and the memory must follow --------------------------------------


@dataclass(frozen=True)
class Relation:
    """A change of a job, after which it may need no more, or no less, than before."""

    name: str
    changed: Callable[[Forecast], Forecast | None]
    """The same job with one thing changed; None where that can't be had, or says nothing."""
    broken: Callable[[Forecast, Forecast], bool]
    """Of the forecast before and after."""


def longer(found: Forecast) -> Forecast | None:
    """Rows of twice the length. Where an engine sums the embedding's gradient in fp32 for few
    tokens only, more of them may take less: that is its doing."""
    data = found.job.data
    limit = found.shape.max_positions
    if limit and 2 * data.sequence_length > limit:
        return None
    if found.work.widths.loaded is not None and found.work.tokens <= FEW_TOKENS:
        return None
    data = data.model_copy(update={"sequence_length": 2 * data.sequence_length})
    return _again(found, found.job.model_copy(update={"data": data}))


def with_lora(found: Forecast) -> Forecast | None:
    """LoRA of rank 16 without dropout instead of all weights."""
    if not isinstance(found.job.adapter, NoAdapter):
        return None
    return _again(found, found.job.model_copy(update={"adapter": LoRA(rank=16)}))


def with_nf4(found: Forecast) -> Forecast | None:
    """Frozen weights in four bits instead of sixteen."""
    job = found.job
    if not isinstance(job.adapter, LoRA) or job.model.quantization != "none":
        return None
    model = job.model.model_copy(update={"quantization": "nf4"})
    return _again(found, job.model_copy(update={"model": model}))


def on_more(found: Forecast) -> Forecast | None:
    """Twice the ranks that share the rows, each with as many as before. From one rank to two the
    engine is another, which is no question of their number."""
    before, cluster = found.mesh.data_ranks, found.cluster
    if before < 2:
        return None
    larger = replace(cluster, nodes=2 * cluster.nodes)
    train = found.job.train.model_copy(update={"global_batch": 2 * found.job.train.global_batch})
    launch = found.job.launch.with_processes(larger.gpus)
    changed = _again(
        replace(found, cluster=larger),
        found.job.model_copy(update={"train": train, "launch": launch}),
    )
    return changed if changed and changed.mesh.data_ranks == 2 * before else None


def everywhere(found: Forecast) -> float:
    """Bytes of a rank's tensors on the GPU and in CPU memory. With states in CPU memory LoRA spares
    only there, and its own weights come on top on the GPU."""
    return found.memory.allocated + found.memory.host


def own_activations(found: Forecast) -> float:
    """Bytes of activations when memory is fullest. Adapters keep some of their own, and where many
    ranks share the weights these may be more than all that LoRA spares."""
    return found.memory.gpu["activations"]


def whole_scales(found: Forecast) -> float:
    """Bytes of NF4's scales that a rank has beyond its share, as they are whole on every rank."""
    return scale_bytes(found.layout, found.shape, found.mesh, found.work)


def for_communication(found: Forecast) -> float:
    """Bytes that there are only because ranks talk: buffers, and NCCL's own memory."""
    return found.memory.gpu["buffers"] + found.memory.context


RELATIONS = (
    Relation(
        "a sequence of twice the length needs no less memory",
        longer,
        lambda before, after: after.memory.required < before.memory.required,
    ),
    Relation(
        "LoRA needs no more memory, of GPU and CPU together, than all weights, "
        "but for its activations",
        with_lora,
        lambda before, after: (
            everywhere(after) - everywhere(before)
            > max(0.0, own_activations(after) - own_activations(before)) + 1.0
        ),
    ),
    Relation(
        "QLoRA (nf4) needs no more memory, of GPU and CPU together, than LoRA, "
        "but for scales that every rank has whole",
        with_nf4,
        lambda before, after: everywhere(after) - everywhere(before) > whole_scales(after) + 1.0,
    ),
    Relation(
        "twice the data-parallel ranks raise memory by communication buffers at most",
        on_more,
        lambda before, after: (
            after.memory.required - before.memory.required
            > max(0.0, for_communication(after) - for_communication(before)) + 1.0
        ),
    ),
)


def _again(found: Forecast, job: Job) -> Forecast | None:
    """The forecast of another job in the same place; None where it can't be had."""
    with suppress(ShardtuneError):
        check(job, dotted)
        return forecast(job, found.shape, found.cluster)
    return None


# What is found ------------------------------------------------------------------------------------


@dataclass
class Findings:
    """What random jobs showed."""

    jobs: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By command."""
    compared: Counter[str] = field(default_factory=Counter)
    """Jobs by relation."""
    highest_mfu: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"estimate": [], "plan": []})
    faults: list[str] = field(default_factory=list)

    def percentile(self, command: str, share: float) -> float:
        ordered = sorted(self.seconds[command])
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def fuzz(seed: int, jobs: int, folder: Path, *, report: Callable[[str], None] = print) -> Findings:
    """Asks the planner about so many jobs; each fault is reported as it is found."""
    found = Findings()
    for number, drawn in enumerate(islice(draw_wide(seed), jobs), 1):
        found.jobs += 1
        for fault in _faults(drawn, found, folder):
            found.faults.append(f"{fault}: {drawn}")
            report(found.faults[-1])
        if number % 500 == 0:
            report(f"{number:,} jobs, {len(found.faults)} faults")
    return found


def _faults(drawn: Drawn, found: Findings, folder: Path) -> Iterator[str]:
    file = folder / "job.yaml"
    file.write_text(dump_document(drawn.document), encoding="utf-8")
    for command in LIMITS if found.jobs % PLAN_EVERY == 0 else ("estimate",):
        said = called(command, file, drawn.cluster.name)
        found.seconds[command].append(said.seconds)
        if said.crash:
            yield f"{command}: {said.crash}"
        elif said.code == REFUSED:
            found.refused[command] += 1
            if "fix: " not in said.errors:
                yield f"{command} is refused without a fix: {said.errors[:200]}"
        else:
            result = json.loads(said.output)
            figures = list(_figures(result))
            if odd := [name for name, value in figures if not _is_sound(name, value)]:
                yield f"{command}: {', '.join(odd)}"
            rates = [value for name, value in figures if name.endswith("mfu")]
            found.highest_mfu = max([found.highest_mfu, *rates])
    asked = _asked(drawn)
    if asked is None:
        return
    for relation in RELATIONS:
        after = relation.changed(asked)
        if after is None:
            continue
        found.compared[relation.name] += 1
        if relation.broken(asked, after):
            sizes = [each.memory.required / GIB for each in (asked, after)]
            yield f"not so: {relation.name} ({sizes[0]:.3f} and then {sizes[1]:.3f} GiB)"


def _asked(drawn: Drawn) -> Forecast | None:
    """The forecast that `estimate` shows; None for what can't be had."""
    with suppress(ShardtuneError):
        job = resolve_as_asked(drawn.job, drawn.shape, drawn.cluster).job
        check(job, dotted)
        return forecast(job, drawn.shape, drawn.cluster)
    return None


@dataclass(frozen=True)
class Called:
    """A command that was called in this process."""

    code: int
    seconds: float
    """Of CPU time."""
    output: str
    errors: str
    crash: str
    """The last line of a traceback, and where it comes from."""


def called(command: str, file: Path, cluster: str) -> Called:
    """Calls a command of shardtune, as its command line would be read."""
    asked = argparse.Namespace(**_parsed(command))
    asked.job, asked.cluster = file, cluster
    output, errors, crash, code = io.StringIO(), io.StringIO(), "", REFUSED
    begun = time.process_time()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            code = asked.run(asked)
        except ShardtuneError as error:
            print(error, file=sys.stderr)
        except Exception as error:  # noqa: BLE001 - what the fuzzing is for
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            crash = f"{type(error).__name__} in {where}: {error}"
    seconds = time.process_time() - begun
    return Called(code, seconds, output.getvalue(), errors.getvalue(), crash)


@cache
def _parsed(command: str) -> dict[str, object]:
    """To read a command line takes longer than most forecasts do."""
    return vars(parse([command, "job.yaml", "--cluster", "1xH200", "--json"]))


def _figures(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON document, with its key."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _figures(each, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for each in value:
            yield from _figures(each, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _is_sound(name: str, value: float) -> bool:
    """A number is finite and not negative, and no utilisation is above all of it."""
    if name.endswith("mfu"):
        return 0 < value <= 1
    return math.isfinite(value) and value >= 0


# The page -----------------------------------------------------------------------------------------


def largest(folder: Path) -> float:
    """CPU seconds of `plan` for 405 B parameters on 1024 GPUs: the median of three."""
    file = folder / "largest.yaml"
    document = {
        "model": {"name": "llama-3.1-405b"},
        "data": {"train": [{"path": "a.jsonl", "format": "chat"}], "sequence_length": 8192},
        "train": {"global_batch": 1024, "steps": 100},
    }
    file.write_text(dump_document(document), encoding="utf-8")
    cluster = "128x8xH100-80GB@3200Gbps"
    return sorted(called("plan", file, cluster).seconds for _ in range(3))[1]


def too_slow(found: Findings, largest: float) -> list[str]:
    """Commands that take longer than they may."""
    slow = [
        f"{command} takes {found.percentile(command, 0.99):.2f} s at p99, over {limit} s"
        for command, limit in LIMITS.items()
        if found.percentile(command, 0.99) > limit
    ]
    if largest > LARGEST:
        slow.append(f"plan for 405 B on 1024 GPUs takes {largest:.2f} s, over {LARGEST} s")
    return slow


def write_page(found: Findings, seed: int, seconds: float) -> None:
    rows = []
    for command, seconds_each in found.seconds.items():
        refused = f"{found.refused[command]:,} refused, with a reason and a fix"
        rows.append([f"jobs given to `{command}`", f"{len(seconds_each):,}, {refused}", ""])
    rows.append(["highest MFU of all forecasts", f"{found.highest_mfu:.3f}", "1"])
    rows += [[f"{name}: jobs compared", f"{count:,}", ""] for name, count in found.compared.items()]
    for command, limit in LIMITS.items():
        shares = (("median", 0.5), ("99th percentile", 0.99))
        rows += [
            [
                f"`{command}`, {words} of CPU time",
                f"{found.percentile(command, share):.3f} s",
                f"{limit} s" if share == 0.99 else "",
            ]
            for words, share in shares
        ]
    rows.append(["`plan` for 405 B on 1024 GPUs", f"{seconds:.2f} s", f"{LARGEST} s"])
    rows.append(["faults", str(len(found.faults)), "0"])
    write_table(
        "planner_fuzz",
        "Random jobs for the planner",
        ["", "found", "at most"],
        rows,
        NOTE,
        command=f"planner_fuzz --seed {seed}" + (f" --jobs {found.jobs}" * (found.jobs != JOBS)),
    )


NOTE = """\
Every model of the catalogue of models and every GPU of the catalogue of GPUs, on 1 to 16 nodes,
with strategies, adapters, quantization, optimizers, lengths, batches and levels of activation
checkpointing at random. A fault is a traceback, a refusal without a fix, a figure that is negative
or none, a utilisation above 1, or a relation that doesn't hold. Communication buffers are what the
forecast calls `buffers` (gathered weights, gradients on their way) and NCCL's own memory for up to
8 neighbours; from one rank to two the engine is another, which isn't compared,
nor are sequences of a full fine-tune on one GPU with up to 3,072 tokens, for which alone its engine
sums the embedding's gradient in fp32. Where a model is divided over many ranks a share of its
weights is small beside activations: LoRA may keep more of these than its states spare (peft's
adapters read fp32 copies; a grouped product of experts and its adapter are kept apart), and NF4's
scales, which every rank has whole, may outweigh what the packed share spares. Times are CPU
seconds of the whole command, from the file of the job to the JSON, in a process that has its
modules loaded."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"how many (default: {JOBS:,})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        largest(folder)  # loads the modules
        found = fuzz(options.seed, options.jobs, folder)
        seconds = largest(folder)
    write_page(found, options.seed, seconds)
    slow = too_slow(found, seconds)
    counted = f"{found.jobs:,} jobs, {len(found.faults)} faults"
    print(counted, *slow, sep="\n")
    return int(bool(found.faults or slow))


if __name__ == "__main__":
    sys.exit(main())
