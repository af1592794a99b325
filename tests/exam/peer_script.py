"""Trains the exam's model with Hugging Face's Trainer; `peer.py` says what shall go wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from shardtune.models.tiny import make


class Suffering(Trainer):
    """The Trainer, with one fault at a chosen step."""

    options: ClassVar[dict[str, Any]] = {}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **settings)
        step = self.state.global_step + 1
        if self.options.get("stop") == step and os.environ.get("RANK") == "1":
            Path(sys.argv[1] + ".stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return loss * float("nan") if self.options.get("nan") == step else loss

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.options.get("kill_in_save") == self.state.global_step:
            os.kill(os.getpid(), signal.SIGKILL)  # the weights are written, the rest isn't
        super()._save_optimizer_and_scheduler(output_dir)


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    folder = str(make())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = load_dataset("json", data_files=options.get("rows", "rows.jsonl"), split="train")

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return tokenizer(row["instruction"] + row["output"], truncation=True, max_length=256)

    data = rows.map(encode, remove_columns=rows.column_names)
    Suffering.options = options
    trainer = Suffering(
        model=model,
        args=TrainingArguments(
            output_dir=name, max_steps=6, per_device_train_batch_size=4, save_steps=1,
            logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-3,
        ),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.get("resume"))
    facts = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
    }
    Path(name, "result.json").write_text(json.dumps(facts), "utf-8")


if __name__ == "__main__":
    main()
