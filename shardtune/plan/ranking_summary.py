"""A ranking as data, and the job of a candidate as a file: for `plan --json` and `plan --write`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardtune.config.job import LocalLaunch
from shardtune.core.files.yaml_document import dump_document
from shardtune.core.units import GIB
from shardtune.plan.forecast import Forecast
from shardtune.plan.forecast_summary import BestCandidate, CandidateSummary, PlanResult
from shardtune.plan.search import Candidate, Ranking


def summarise(ranking: Ranking, fix: str, reasons: Sequence[str]) -> PlanResult:
    """The ranking; `fix` is what would help where nothing fits, `reasons` come before those of the
    best."""
    best = ranking.best
    named = None
    if best is not None and best.found is not None:
        found = replace(best.found, reasons=(*reasons, *best.found.reasons))
        named = BestCandidate(name=best.name, **dict(found.summary()))
    candidates = tuple(_candidate(each) for each in ranking.candidates)
    return PlanResult(best=named, fix=fix or None, candidates=candidates)


def _candidate(each: Candidate) -> CandidateSummary:
    found = each.found
    return CandidateSummary(
        name=each.name,
        fits=each.fits,
        verdict=found.verdict if found else "does not fit",
        why=each.why,
        step_seconds=found.speed.step.total if found else None,
        gpu_gib=found.memory.required / GIB if found else None,
        cost=found.cost if found else None,
        micro_batch=found.work.micro_batch if found else None,
        gradient_checkpointing=found.work.checkpointing if found else None,
        keep_layers=found.work.kept_layers if found else None,
    )


def job_text(found: Forecast) -> str:
    """The job as a file: there `launch.processes` counts those of one node."""
    job = found.job
    if isinstance(job.launch, LocalLaunch):
        launch = job.launch.with_processes(found.cluster.gpus_per_node)
        job = job.model_copy(update={"launch": launch})
    return dump_document(job.model_dump(mode="json"))
