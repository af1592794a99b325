"""The model card (README.md) of a result, written from the run: what a model hub shows of it.

A result leaves the machine. Nothing in it names a folder of it: data sets have their names and
digests, and a base model that was read from a folder has the folder's last name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.config.job import Job
from shardtune.core.files.yaml_document import dump_document
from shardtune.core.model.kind import ModelKind
from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.core.runs.run_report import BeforeAfter, TrainingReport

CARD_FILE = "README.md"
_LOADING = "## How to load it"
_BY_FOLDER = (
    "With peft and bitsandbytes installed this puts the adapter on the weights that lie beside it, "
    "from a local folder. Of a hub id download the folder first: by the id transformers would "
    "take the base model that adapter_config.json names."
)
_PIPELINES: Mapping[ModelKind, str] = {
    "decoder": "text-generation",
    "encoder_decoder": "text2text-generation",
}


@dataclass(frozen=True)
class BaseFacts:
    """What was trained, as others can know it."""

    name: str
    """A hub id, a built-in name, or the last name of a folder."""
    on_hub: bool
    licence: str | None = None
    """None where it isn't known."""


@dataclass(frozen=True)
class DataFacts:
    """One data set of a run."""

    use: str
    """`train` or `eval`."""
    name: str
    format: str
    documents: int
    tokens: int
    labels: int
    digest: str


@dataclass(frozen=True)
class CardFacts:
    """All that a card says of a run."""

    job: Job
    base: BaseFacts
    data: Sequence[DataFacts]
    training: TrainingReport
    evaluation: Mapping[str, BeforeAfter]
    versions: Mapping[str, str]
    kind: ModelKind
    loader: str
    """The class of transformers that loads the model."""
    best_step: int | None = None
    """The step whose weights these are, where it isn't the last."""


def render_card(facts: CardFacts) -> str:
    """The card, with the front matter that the hub reads."""
    adapted = facts.job.adapter.type != "none"
    front: dict[str, object] = {"library_name": "peft" if adapted else "transformers"}
    if facts.base.on_hub:
        front["base_model"] = facts.base.name
    if facts.base.licence is not None:
        front["license"] = facts.base.licence.lower()
    front["pipeline_tag"] = _PIPELINES[facts.kind]
    best = facts.best_step is not None
    tags = ["shardtune", facts.job.adapter.type if adapted else "full-fine-tune"]
    front["tags"] = tags
    kind = f"A {facts.job.trains} adapter for" if adapted else "A full fine-tune of"
    return "\n".join(
        [
            "---",
            dump_document(front).rstrip(),
            "---",
            "",
            f"# {kind} {facts.base.name}",
            "",
            f"Trained for {facts.training.step} steps on {facts.training.tokens:,} tokens with "
            f"shardtune {facts.versions.get('shardtune', '')}.".replace(" .", "."),
            *([f"The weights are those after step {facts.best_step}, the best."] * best),
            "",
            *_losses(facts),
            *_data(facts.data),
            *_settings(facts.job),
            *_versions(facts.versions),
            _LOADING,
            "",
            *_load(facts.loader, facts.base.name if adapted else None),
            "",
        ]
    )


def card_of_merged(card: str, loader: str) -> str:
    """The card of an adapter's run, for the model that it was merged into."""
    head, _, _ = card.partition(_LOADING)
    head = head.replace("library_name: peft", "library_name: transformers", 1)
    head = head.replace("adapter for", "adapter, merged into", 1)
    return "\n".join([head.rstrip(), "", _LOADING, "", *_load(loader, None), ""])


def card_beside_base(card: str, loader: str, weights: str) -> str:
    """The card of an adapter's run, for a folder that holds the adapter and, in these `weights`,
    its model."""
    head, _, _ = card.partition(_LOADING)
    head = head.replace("adapter for", f"adapter beside the {weights} weights of", 1)
    return "\n".join([head.rstrip(), "", _LOADING, "", *_load(loader, None), "", _BY_FOLDER, ""])


def hide_path(folder: Path, path: str, name: str) -> None:
    """Writes `name` wherever the files in `folder` have `path` as a value."""
    for file in folder.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        if json.dumps(path) in text:
            file.write_text(text.replace(json.dumps(path), json.dumps(name)), encoding="utf-8")


def _losses(facts: CardFacts) -> list[str]:
    lines = ["## Loss", "", "| data set | before | after | perplexity after |", "|---|---|---|---|"]
    for name, each in facts.evaluation.items():
        before = each.before.loss if each.before else None
        after: EvalFigures = each.after
        row = (name, _number(before), _number(after.loss), _number(after.perplexity))
        lines.append(f"| {' | '.join(row)} |")
    training = facts.training
    first, last = _number(training.first_loss), _number(training.last_loss)
    return [*lines, f"| (training: first and last step) | {first} | {last} | |", ""]


def _data(data: Sequence[DataFacts]) -> list[str]:
    rows = [
        f"| {each.name} | {each.use} | {each.format} | {each.documents:,} | {each.tokens:,} | "
        f"{each.labels:,} | `{each.digest[:16]}` |"
        for each in data
    ]
    head = "| data set | used to | format | documents | tokens | of them trained | digest |"
    return ["## Data", "", head, "|---|---|---|---|---|---|---|", *rows, ""]


def _settings(job: Job) -> list[str]:
    """What decides the result, and no place of a machine."""
    said = {
        "adapter": job.adapter.model_dump(mode="json"),
        "model": {"quantization": job.model.quantization},
        "data": {"sequence_length": job.data.sequence_length, "packing": job.data.packing},
        "train": job.train.model_dump(
            mode="json",
            include={
                "steps", "epochs", "global_batch", "learning_rate", "schedule", "warmup_steps",
                "warmup_ratio", "precision", "max_grad_norm", "seed", "optimizer",
            },
            exclude_none=True,
        ),
    }  # fmt: skip
    return ["## Settings", "", "```yaml", dump_document(said).rstrip(), "```", ""]


def _versions(versions: Mapping[str, str]) -> list[str]:
    return ["## Versions", "", *(f"- {name} {each}" for name, each in versions.items()), ""]


def _load(loader: str, base: str | None) -> list[str]:
    if base is None:
        call = f'{loader}.from_pretrained("path or id of this model", dtype="auto")'
        code = [f"from transformers import {loader}", "", f"model = {call}"]
    else:
        code = [
            "from peft import PeftModel",
            f"from transformers import {loader}",
            "",
            f'base = {loader}.from_pretrained("{base}", dtype="auto")',
            'model = PeftModel.from_pretrained(base, "path or id of this adapter")',
        ]
    return ["```python", *code, "```"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
