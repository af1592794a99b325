"""Chooses the values of a first job by a look at its model and its data, and says why in comments.

What a job leaves out has a default; here stands only what follows from the two, or what people
change first.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.cli.starter_facts import (
    RunSize,
    StarterData,
    StarterModel,
    look_at_data,
    look_at_model,
)

if TYPE_CHECKING:
    from shardtune.config.job import Job
    from shardtune.core.host.machine import Machine
    from shardtune.core.model.shape import ModelShape

COMMENT_WIDTH = 96
LEAST_ROWS_TO_SHARE = 100  # rows from which on some can be spared for evaluation
HELD_OUT_ROWS = 500
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./-]+")


def starter_job(model: str, data: str, target: Path) -> str:
    """The text of a job for `target`; ModelError or DataError if the two can't be told what they
    are, JobError if they don't go together."""
    from shardtune.core.host.machine import Machine

    machine = Machine.here()
    facts = look_at_model(model)
    seen = look_at_data(facts, data)
    lines = [*_opening(facts, seen, target), *_sections(facts, seen, max(1, machine.gpus))]
    lines += _planned("\n".join(lines), str(target), facts.shape, machine)
    return "\n".join(lines) + "\n"


# The text ----------------------------------------------------------------------------------------


_UNREAD = ("image", "images", "audio", "audios", "video", "videos", "rejected")
"""Columns for another kind of training than ours; beside `rejected`, `chosen` may be the answer."""


def _opening(model: StarterModel, data: StarterData, target: Path) -> Iterator[str]:
    source = data.source
    about = "" if source.exact else "about "
    rows = f"{about}{source.rows:,} rows; {data.found.format}, found among the columns "
    yield from _comment("A first job, written by `shardtune init` for:")
    yield from _comment(f"  model: {model}")
    yield from _comment(f"  data: {rows}{', '.join(map(repr, list(source.columns)[:12]))}")
    if unread := [name for name in source.columns if name.lower() in _UNREAD]:
        named = ", ".join(map(repr, unread))
        yield from _comment(f"  not read: {named}. Texts are trained on: no media, no preferences")
    quoted = shlex.quote(str(target))
    yield from _comment(f"See what is trained with `shardtune data {quoted}`, every value with")
    yield from _comment(f"`shardtune show {quoted}`; then `shardtune train {quoted}`.")


def _sections(model: StarterModel, data: StarterData, ranks: int) -> Iterator[str]:
    """The sections of the job, but for those that the planner decides."""
    size = RunSize.of(model, data, ranks)
    yield ""
    yield f"model: {{name: {_flow(model.name)}}}"
    yield ""
    yield from _adapter(model)
    yield ""
    yield "data:"
    yield from _train_set(data, size)
    yield from _eval_share(data)
    yield from _lengths(data, size)
    yield ""
    yield "train:"
    yield from _comment(size.why, 2)
    yield f"  epochs: {size.epochs}"
    yield f"  global_batch: {size.global_batch}  # rows a step, over all ranks"
    yield f"  learning_rate: {'2.0e-4' if model.adapted else '5.0e-5'}"
    yield "  warmup_ratio: 0.03"
    if model.shape is not None:
        yield "  gradient_checkpointing: auto  # the least recomputation that fits"
    yield ""
    yield "save:"
    yield f"  directory: runs/{data.label}"
    if size.save_every:
        yield f"  every: {size.save_every}  # steps between checkpoints, and between evaluations"


def _adapter(model: StarterModel) -> Iterator[str]:
    if not model.adapted:
        yield from _comment("A model this small: all weights are trained. {type: lora} adapts it.")
        yield "adapter: {type: none}"
        return
    if model.quantized:
        yield from _comment(
            f"The files are quantized ({model.quantized}). If they can't be loaded, name the model "
            "that they were made from; `quantization: nf4` beside its name quantizes it here."
        )
    yield from _comment("LoRA on every linear layer. {type: none} trains all weights.")
    yield "adapter: {type: lora, rank: 16, alpha: 32}"


def _train_set(data: StarterData, size: RunSize) -> Iterator[str]:
    found, lengths = data.found, data.lengths
    if data.source.opened.note:
        yield from _comment(data.source.opened.note, 2)
    if lengths is not None and lengths.unread:
        sampled = lengths.unread + len(lengths.lengths)
        yield from _comment(
            f"{lengths.unread:,} of {sampled:,} sampled rows can't be read: `shardtune data` lists "
            "them; `bad_rows: skip` goes on without them.",
            2,
        )
    yield "  train:"
    yield f"    - path: {_flow(data.source.path)}"
    yield f"      format: {found.format}"
    if found.columns:
        yield f"      columns: {_flow(dict(found.columns))}"
    if size.splits:
        yield "      overflow: split  # documents longer than the sequence continue in another row"
    if size.stopless:
        yield from _comment("No sampled row ends with a stop token.", 6)
        yield "      stop: none"
    if data.chat_template:
        yield from _comment("The tokenizer has no chat template.", 2)
        yield f"  chat_template: {data.chat_template}"


def _eval_share(data: StarterData) -> Iterator[str]:
    rows = data.source.different_rows
    if rows < LEAST_ROWS_TO_SHARE:
        yield from _comment(f"Distinct rows: {rows:,}, too few to hold some of them out.", 2)
        return
    share = float(f"{min(0.1, HELD_OUT_ROWS / rows):.1g}")
    yield from _comment(f"About {_round(rows * share):,} rows are held out, drawn by content.", 2)
    yield f"  eval: {{share: {share:.10f}".rstrip("0") + "}"


def _lengths(data: StarterData, size: RunSize) -> Iterator[str]:
    import numpy as np

    found = data.lengths
    if found is None:
        yield from _comment(
            "Not measured: the tokenizer isn't available here; `shardtune data` says why.", 2
        )
    else:
        sides = {"Tokens": (found.lengths, size.sequence_length)}
        if found.targets is not None:
            targets = (found.targets, size.target_length or size.sequence_length)
            sides = {"Source tokens": sides["Tokens"], "Target tokens": targets}
        for side, (lengths, limit) in sides.items():
            half, most = np.percentile(lengths, [50, 95])
            fit = np.count_nonzero(lengths <= limit) / len(lengths)
            yield from _comment(
                f"{side} of {len(lengths):,} sampled rows: half have up to {half:,.0f}, 95 % up to "
                f"{most:,.0f}, the longest {lengths.max():,}; {fit:.1%} of them fit.",
                2,
            )
    yield f"  sequence_length: {size.sequence_length}"
    if size.target_length:
        yield f"  target_length: {size.target_length}"


# The planner's word ------------------------------------------------------------------------------


def _planned(text: str, target: str, shape: ModelShape | None, machine: Machine) -> Iterator[str]:
    """The forecast on this machine and the strategy that it suggests, as comments; as a section,
    where the default doesn't fit and another does."""
    from shardtune.cli.resolve_job import resolve_here
    from shardtune.config.job import Job
    from shardtune.config.job_file import LoadedJob
    from shardtune.core.files.yaml_document import parse_document
    from shardtune.core.units import GIB
    from shardtune.parallel import DEFAULT
    from shardtune.plan.search import rank
    from shardtune.plan.this_machine import cluster_here, forecast_here, offer, shortage

    written = Job.model_validate_json(json.dumps(parse_document(text, target).value))
    job = resolve_here(LoadedJob(written, {})).job
    found = forecast_here(job, machine)
    yield ""
    if found is None or shape is None:
        yield from _comment("There is no forecast: the planner doesn't know this model or GPU.")
        return
    cluster = cluster_here(machine, int(job.launch.processes))
    yield from _comment(
        f"Forecast on {cluster.name}: a rank takes {found.memory.required / GIB:.1f} of "
        f"{found.capacity / GIB:.1f} GiB, a step {_seconds(found.speed.step.total)}."
    )
    best = rank(_open_to_change(job), shape, cluster, installed_only=True).best
    if best is None or best.found is None:
        yield from _comment(f"It doesn't fit: {shortage(found)}.")
        yield from _comment(f"What would: {offer(found.job, shape, cluster, written=written)}")
        return
    strategy = best.found.job.strategy
    if cluster.gpus > 1 or strategy != DEFAULT:
        yield from _comment(f"Suggested strategy: {best.name} ({best.why}).")
    if not found.fits and strategy != DEFAULT:
        chosen = strategy.model_dump(mode="json", exclude_defaults=True)
        yield f"strategy: {_flow({'type': strategy.type, **chosen})}"


def _open_to_change(job: Job) -> Job:
    """The job with what a strategy may choose for itself left open."""
    free = {"micro_batch": "auto", "gradient_checkpointing": "auto"}
    return job.model_copy(update={"train": job.train.model_copy(update=free)})


# Words -------------------------------------------------------------------------------------------


def _comment(text: str, indent: int = 0) -> list[str]:
    """The text as comment lines; a line break in it can't end the comment."""
    lead = " " * indent + "# "
    inner = text[: len(text) - len(text.lstrip(" "))]
    return textwrap.wrap(
        " ".join(text.split()),
        COMMENT_WIDTH,
        initial_indent=lead + inner,
        subsequent_indent=lead + inner,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _flow(value: object) -> str:
    """YAML on one line."""
    from shardtune.core.files.yaml_document import parse_scalar

    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    plain = isinstance(value, str) and _PLAIN_WORD.fullmatch(value)
    if plain and isinstance(parse_scalar(str(value)), str):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def _seconds(number: float) -> str:
    return f"{number:,.0f} s" if number >= 10 else f"{number:.2g} s"


def _round(number: float) -> int:
    return int(float(f"{number:.2g}"))
