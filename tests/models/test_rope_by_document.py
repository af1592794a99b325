"""LongRoPE: a document is rotated as it is alone, whatever shares its micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune.config.job import Job, LoRA, ModelSection, TrainSection
from shardtune.core.world import World
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.models.rope_by_document import document_lengths
from shardtune.parallel.pipeline.strategy import Pipeline
from tests.models.families import LONGROPE, write
from tests.models.family_runs import family_job, plain_outcome, run
from tests.ranks import on_ranks

SHORT = LONGROPE["original_max_position_embeddings"]
"""Tokens that the model was first trained on; documents have 5 to 20."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "phi3", "phi3", **LONGROPE)
    return tmp_path


def job_with(
    folder: Path, micro_batch: int, *, packing: bool, ranks: int = 1, family: str = "phi3"
) -> Job:
    job = family_job(folder, family, "lora", "ddp", ranks)
    train = job.train.model_copy(update={"micro_batch": micro_batch})
    data = job.data.model_copy(update={"packing": packing})
    return job.model_copy(update={"train": train, "data": data})


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_losses_are_those_of_documents_alone(folder: Path, micro_batch: int, packing: bool) -> None:
    job = job_with(folder, micro_batch, packing=packing)
    expected = plain_outcome(job)
    found = run(World(), job)
    assert found.losses == pytest.approx(expected.losses, rel=2e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)


def test_two_ranks(folder: Path) -> None:
    job = job_with(folder, 2, packing=True, ranks=2)
    found = on_ranks(2, run, job)[0]
    assert found.losses == pytest.approx(plain_outcome(job).losses, rel=2e-6)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_two_stages(folder: Path, packing: bool) -> None:
    """They pad all micro-batches of a step to the widest, and hand on hidden states alone."""
    write(folder / "llama", "llama", **LONGROPE)
    job = job_with(folder, 2, packing=packing, family="llama")
    staged = job.model_copy(update={"strategy": Pipeline(stages=2)})
    expected = plain_outcome(job)
    found = on_ranks(2, run, staged, 1)[0]
    assert found.losses == pytest.approx(expected.losses, rel=2e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)


@torch.no_grad()
def test_both_sets_are_used(folder: Path) -> None:
    """As transformers by itself, of a row that is one document."""
    from transformers import AutoModelForCausalLM

    section = ModelSection(name=str(folder / "phi3"))
    ours: Any = PretrainedModelBuilder(
        ModelFiles(section), LoRA(rank=2), TrainSection(precision="fp32")
    ).whole("cpu")
    theirs = AutoModelForCausalLM.from_pretrained(folder / "phi3", dtype=torch.float32)
    for length in (SHORT, SHORT + 1):
        ids = torch.arange(length)[None] + 3
        torch.testing.assert_close(
            ours(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=1e-5, atol=1e-5
        )
    frequencies = ours.get_base_model().model.rotary_emb
    assert not torch.equal(frequencies.long_inv_freq, frequencies.original_inv_freq)


def test_lengths_by_hand() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5]])
    lengths = torch.tensor([5, 3])  # behind them is padding
    assert document_lengths(positions).tolist() == [[3, 3, 3, 4, 4, 4, 4], [1, 6, 6, 6, 6, 6, 6]]
    found = document_lengths(positions, lengths)
    assert found[0, :5].tolist() == [3, 3, 3, 2, 2]
    assert found[1, :3].tolist() == [1, 2, 2]
