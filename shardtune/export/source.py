"""What an export starts from: a run's result, its tokenizer, stop tokens and merged weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardtune.checkpoint.manifest import MANIFEST_FILE
from shardtune.checkpoint.merge import (
    LogitDifference,
    compare_merged,
    merge_weights,
    tokenize_prompts,
)
from shardtune.checkpoint.model_card import CARD_FILE, card_of_merged
from shardtune.checkpoint.rounding_error import ModelCalls, fp32_logits
from shardtune.core.model.kind import kind_of
from shardtune.data.template_parity import (
    TemplateParity,
    folder_reader,
    require_parity,
    training_reader,
)
from shardtune.errors import Problem, RunError
from shardtune.models.load import merged_dtype, result_dtype
from shardtune.models.load_result import load_result, load_result_tokenizer, load_to_merge
from shardtune.models.model_files import ModelFiles

if TYPE_CHECKING:
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.job import Job


@dataclass(frozen=True)
class ExportSource:
    """A run with a result."""

    run: RunDir
    job: Job
    prompts: Sequence[str]
    """Texts on which models are compared."""

    @property
    def adapted(self) -> bool:
        return self.job.adapter.type != "none"

    @property
    def base_name(self) -> str:
        """The model that was trained, as others know it."""
        return self.files.public_name

    @cached_property
    def files(self) -> ModelFiles:
        """The base model's files, with the chat template that the job trained with."""
        return ModelFiles.of_job(self.job)

    @cached_property
    def tokenizer(self) -> Any:
        """The result's tokenizer."""
        return load_result_tokenizer(str(self.run.result), self.job.model)

    @cached_property
    def stops(self) -> frozenset[int]:
        """Where answers end, as the result says."""
        return folder_reader(self.run.result).stops

    @property
    def dtype(self) -> torch.dtype:
        """What the whole model is written in unless somebody chooses."""
        usual = merged_dtype if self.adapted else result_dtype
        return usual(self.files, self.job.train.compute_precision)

    @cached_property
    def card(self) -> str:
        """The run's model card, for a whole model."""
        file = self.run.result / CARD_FILE
        if not file.is_file():
            return ""
        text = file.read_text(encoding="utf-8")
        return card_of_merged(text, self.files.loader) if self.adapted else text

    def copy_result(self, folder: Path) -> None:
        """Copies the result's files: weights, tokenizer, template, stop tokens, card."""
        for file in sorted(self.run.result.iterdir()):
            if file.name != MANIFEST_FILE:
                shutil.copyfile(file, folder / file.name)

    @cached_property
    def parity(self) -> TemplateParity:
        """The result's template and stop tokens compared with those of training."""
        tokenizer = self.files.tokenizer
        trained = training_reader(tokenizer, self.files.stop_ids)
        return require_parity(trained, [folder_reader(self.run.result)], tokenizer)

    def whole_model(self) -> WholeModel:
        """The trained model in one piece, in fp32: an adapter is merged, and that is compared."""
        result = str(self.run.result)
        if not self.adapted:
            model = load_result(result, self.files, "fp32").eval()
            return WholeModel(model, tokenize_prompts(self.tokenizer, self.prompts, model), None)
        model = load_to_merge(result, self.files, self.job.train.compute_precision)
        inputs = tokenize_prompts(self.tokenizer, self.prompts, model)
        adapted = fp32_logits(model, inputs)
        merged = merge_weights(model).eval()
        return WholeModel(merged, inputs, compare_merged(adapted, merged, inputs))

    def require_decoder(self, to: str) -> None:
        if self.files.kind != "decoder":
            fact = f"{self.files.config.model_type} has an encoder, which {to} can't serve"
            raise RunError(Problem(f"--to {to}", fact, "export --to hf"))


@dataclass
class WholeModel:
    """A model without adapter, in fp32."""

    model: Any
    inputs: ModelCalls
    merged: LogitDifference | None
    """How far the merged model is from the adapted one; None where nothing was merged."""

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def kind(self) -> str:
        return kind_of(self.model.config)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Every weight once, by its name."""
        return {name: weight.detach() for name, weight in self.model.named_parameters()}
