"""A run's result: written with its model card, read back, and compared with what was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.checkpoint.export import check_result, save_result
from shardtune.checkpoint.model_card import BaseFacts, CardFacts, DataFacts, render_card
from shardtune.checkpoint.overwrite import set_aside_unless_ours
from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.job import Job
from shardtune.core.engine import Engine
from shardtune.core.runs.run_report import BeforeAfter, TrainingReport
from shardtune.core.step import MicroBatch
from shardtune.data.dataset import PreparedData
from shardtune.launch.process_group import JoinedWorld
from shardtune.models.catalogue import BUILT_IN
from shardtune.models.load import COMPUTE_DTYPES, held_precision, result_dtype
from shardtune.models.load_result import load_result
from shardtune.models.model_files import ModelFiles
from shardtune.models.quantization.gptq import E4M3
from shardtune.report.live import RunView
from shardtune.training.environment import describe_environment
from shardtune.training.evaluation import Evaluator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RunResult:
    """What a run leaves to those who use its model."""

    job: Job
    world: JoinedWorld
    model: ModelFiles
    engine: Engine
    evaluator: Evaluator
    files: RunDir
    view: RunView
    data: Mapping[str, str]
    """The digest of each data set."""
    sets: PreparedData | None = None

    def gather(self) -> dict[str, Tensor]:
        """All trained weights in the main rank's memory, beside its device; others only take
        part."""
        found: dict[str, Tensor] = {}
        for name, weight in self.engine.trained_weights():
            if self.world.is_main:
                found[name] = weight.cpu()
        return found

    def card(
        self,
        training: TrainingReport,
        evaluation: Mapping[str, BeforeAfter],
        best_step: int | None,
    ) -> str:
        """The model card. Of the machine it says only the versions."""
        name = self.job.model.name
        built_in = BUILT_IN.get(name)
        on_hub = built_in is None and not Path(self.model.path).is_dir()
        base = BaseFacts(self.model.public_name, on_hub, built_in.licence if built_in else None)
        sides = (("train", self.sets.train), ("eval", self.sets.eval)) if self.sets else ()
        data = [
            DataFacts(
                side,
                each.name,
                each.report.format,
                each.report.documents,
                each.report.tokens,
                each.report.labels,
                each.digest,
            )
            for side, sets in sides
            for each in sets
        ]
        made = describe_environment(self.world, "", self.data)
        versions = {"shardtune": made.shardtune, "Python": made.python, **made.packages}
        facts = CardFacts(
            self.job,
            base,
            data,
            training,
            evaluation,
            versions,
            self.model.kind,
            self.model.loader,
            best_step,
        )
        return render_card(facts)

    def write(
        self, trained: Mapping[str, Tensor], logits: Tensor, probe: MicroBatch, card: str
    ) -> float:
        """Writes the result and reads it back; returns how far the logits of `probe` are from those
        of the model in memory."""
        job, target, evaluator = self.job, self.files.result, self.evaluator
        if (aside := set_aside_unless_ours(target)) is not None:
            self.view.say(f"{target} holds what no run of ours wrote: set aside as {aside.name}")
        written = save_result(
            self.engine.module(),
            trained,
            evaluator.tokenizer,
            evaluator.stops,
            target,
            dtype=result_dtype(self.model, job.train.compute_precision),
            base=self.model,
            card=card,
        )
        reloaded = load_result(str(target), self.model, held_precision(job.adapter, job.train))
        in_8_bits = job.model.quantization == "fp8"
        computed = E4M3 if in_8_bits else COMPUTE_DTYPES[job.train.compute_precision]
        return check_result(reloaded, trained, logits, probe, written=written, computed=computed)
