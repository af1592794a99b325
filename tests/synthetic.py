"""Small data sets and jobs for tests of what comes after preparation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from shardtune.config.job import Adapter, Job, ModelSection, TrainSection
from shardtune.core.step import IGNORED, MicroBatch
from shardtune.data.dataset import PreparedSet, SourceReport
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles

Tokens = tuple[list[int], list[bool]]
"""The ids of a document, and which of them are trained."""


def prepared(name: str, documents: Sequence[Tokens]) -> PreparedSet:
    """A data set as preparation hands it on."""
    rows = Dataset.from_dict(
        {"input_ids": [ids for ids, _ in documents], "trained": [flags for _, flags in documents]}
    )
    lengths = np.array([len(ids) for ids, _ in documents], dtype=np.int32)
    labels = np.array([sum(flags) for _, flags in documents], dtype=np.int32)
    report = SourceReport(
        name=name, path=f"{name}.jsonl", format="pretokenized", rows_read=len(documents),
        documents=len(documents), tokens=int(lengths.sum()), labels=int(labels.sum()), truncated=0,
        truncated_tokens=0, split=0, dropped=0, untrained=0, bad=0, stops_trained=len(documents),
    )  # fmt: skip
    return PreparedSet(name, 1.0, rows, lengths, labels, report)


def numbered(count: int, length: int = 8) -> list[Tokens]:
    """Documents of which each token tells the number of its document."""
    return [([n + 1] * length, [False] * 2 + [True] * (length - 2)) for n in range(count)]


def make_job(directory: str, **sections: dict[str, Any]) -> Job:
    """A resolved job of the tiny model; `sections` change or add values."""
    job: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny"},
        "adapter": {"type": "none"},
        "data": {"train": [{"path": "d.jsonl", "format": "pretokenized", "name": "d"}]},
        "train": {"micro_batch": 2, "global_batch": 4, "precision": "fp32"},
        "evaluate": {"every": 0, "samples": 0},
        "launch": {"processes": 1, "threads": 1},
        "save": {"directory": directory},
    }
    for name, values in sections.items():
        job[name] = job.get(name, {}) | values
    return Job.model_validate_json(json.dumps(job))


def load_model(
    section: ModelSection, adapter: Adapter, train: TrainSection, *, device: str = "cpu"
) -> torch.nn.Module:
    """The whole model with its adapter, as an engine would ask for it."""
    return PretrainedModelBuilder(ModelFiles(section), adapter, train).whole(device)


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that are trained, by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def batch(seed: int, rows: int = 2, length: int = 16) -> MicroBatch:
    """Random bytes, every position of which is trained but the last."""
    ids = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))
    targets = torch.roll(ids, -1, dims=1)
    targets[:, -1] = IGNORED
    positions = torch.arange(length).expand(rows, length)
    names = tuple(f"s:{seed}.{row}" for row in range(rows))
    return MicroBatch(ids, positions, targets, names, rows * length, rows * (length - 1))
