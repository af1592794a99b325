"""The same job through Hugging Face's own Trainer and PEFT gives the same loss curve.

The Trainer is handed our order of samples and our adapters' first values (they are drawn by name,
which PEFT doesn't do), and nothing else of ours: its own loss, its own accumulation, its own
schedule, clipping and optimizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from shardtune.config.job import Job
from shardtune.core.world import World
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.catalogue import resolve as model_folder
from shardtune.models.model_files import ModelFiles
from shardtune.train import train
from shardtune.training.inputs import Inputs, open_inputs, open_loader

STEPS, BATCH = 20, 8


def job(directory: Path, data: Path) -> Job:
    return Job.model_validate_json(
        json.dumps(
            {
                "model": {"name": "tiny"},
                "adapter": {"type": "lora", "rank": 8, "alpha": 16},
                "data": {
                    "train": [{"path": str(data), "format": "instruction", "name": "d"}],
                    "packing": False,
                    "sequence_length": 512,
                },
                "train": {
                    "steps": STEPS,
                    "global_batch": BATCH,
                    "micro_batch": 2,
                    "learning_rate": 0.01,
                    "warmup_steps": 5,
                    "precision": "fp32",
                    "seed": 5,
                    # LoRA's B starts at zero, where Adam divides by almost nothing: with a tiny
                    # eps the first steps would show rounding, not mathematics.
                    "optimizer": {"type": "adamw", "eps": 1e-4, "weight_decay": 0.01},
                },
                "evaluate": {"every": 0, "samples": 0},
                "launch": {"processes": 1, "threads": 1},
                "save": {"directory": str(directory)},
            }
        )
    )


def their_losses(job: Job, inputs: Inputs, folder: Path) -> list[float]:
    data = open_loader(job, inputs, World())  # type: ignore[arg-type]
    rows = inputs.data.train[0].rows
    samples = [int(name.split(":")[1]) for step in range(STEPS) for name in data.samples(step)]
    assert len(samples) == STEPS * BATCH
    dataset = [rows[index] for index in samples]

    def collate(chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in chosen)
        columns: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for row in chosen:
            ids, flags = list(row["input_ids"]), row["trained"]
            labels = [t if flag else -100 for t, flag in zip(ids, flags, strict=True)]
            rest = longest - len(ids)
            columns["input_ids"].append(ids + [0] * rest)
            columns["attention_mask"].append([1] * len(ids) + [0] * rest)
            columns["labels"].append(labels + [-100] * rest)
        return {name: torch.tensor(column) for name, column in columns.items()}

    model = AutoModelForCausalLM.from_pretrained(model_folder("tiny"), dtype=torch.float32)
    adapted = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    start = PretrainedModelBuilder(ModelFiles(job.model), job.adapter, job.train).whole("cpu")
    adapted.load_state_dict(start.state_dict())
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=BATCH // 4,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-4,
        weight_decay=0.01,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=adapted, args=arguments, train_dataset=dataset, data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.process
@pytest.mark.filterwarnings("default")  # theirs, not ours
def test_the_loss_curves_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # DeepSpeed wants it, another test may have started it, and their Trainer looks for ranks then.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    rows = Path(__file__).parents[2] / "data" / "code.jsonl"
    ours_job = job(tmp_path / "run", rows)
    train(ours_job)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ours = [json.loads(line)["loss"] for line in metrics]
    theirs = their_losses(ours_job, open_inputs(ours_job, quiet=True), tmp_path / "theirs")
    assert len(ours) == len(theirs) == STEPS
    assert ours[-1] < 0.95 * ours[0], "something must be learnt for the comparison to mean anything"
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
