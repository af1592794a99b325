"""Diagnosis: what bounds a run, from where its steps' time went, and what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtune.core.runs.diagnosis import (
    Bound,
    Diagnosis,
    ExposedCollective,
    Remedy,
    SettingFact,
    SlowCause,
)
from shardtune.core.runs.rank_profile import RankProfile
from shardtune.plan.measured_run import MeasuredRun, RunDevice, RunFacts
from shardtune.plan.speed_remedies import MeasuredTime, Speedup, speedups
from shardtune.plan.time_lost import NOTICED, Lost, TimeLost

WORTH = 0.1
"""Share of the time from which on a loss is a cause, and a run isn't healthy."""
MOST_REMEDIES = 3


def diagnose(run: RunFacts, device: RunDevice) -> Diagnosis:
    """What bounds the run, why, and what would help."""
    return _Examination(MeasuredRun(run, device)).diagnosis()


@dataclass(frozen=True)
class _Examination:
    """What a run's measurements come to."""

    found: MeasuredRun

    def diagnosis(self) -> Diagnosis:
        found, shares = self.found, self.found.shares
        bound = max(shares, key=lambda each: shares[each])
        lost = sorted(TimeLost(found).all(), key=lambda each: -each.share)
        planned = self._planned()
        remedies = [self._remedy(each) for each in lost] + planned
        causes = [(each.cause, each.share) for each in lost]
        causes += [(each.cause, each.gain) for each in planned if each.cause == "recomputation"]
        serious = sorted((each for each in causes if each[1] >= WORTH), key=lambda each: -each[1])
        named = tuple(dict.fromkeys(cause for cause, _ in serious))
        return Diagnosis(
            bound=bound,
            healthy=not named,
            verdict=self._verdict(bound, serious),
            steps=found.run.parts.steps,
            step_seconds=found.total,
            shares=shares,
            forecast=found.predicted_shares(),
            efficiency=found.efficiency(),
            causes=named,
            remedies=_best(remedies, named),
            stragglers=found.stragglers(),
            collectives=self._collectives(),
            settings=self._settings(),
            profiled=bool(found.run.profiles),
        )

    def _remedy(self, lost: Lost) -> Remedy:
        line = lost.line or self._train(lost.change)
        gain = lost.share if lost.gain is None else lost.gain
        return Remedy(
            cause=lost.cause,
            fact=lost.fact,
            change=lost.change,
            line=line if lost.line or lost.change else "",
            gain=gain,
            by="measured",
            same_result=lost.same_result,
        )

    def _planned(self) -> list[Remedy]:
        """What the planner would change, with its forecasts scaled to what was measured."""
        found, shares = self.found.device.forecast, self.found.shares
        if found is None:
            return []
        measured = MeasuredTime(
            compute=shares["compute"],
            communication=shares["communication"],
            optimizer=self.found.part["optimizer"],
        )
        return [self._planned_remedy(each) for each in speedups(found, measured)]

    def _planned_remedy(self, each: Speedup) -> Remedy:
        return Remedy(
            cause=each.cause,
            fact=each.fact,
            change=each.change,
            line=self._train(each.change),
            gain=each.gain,
            by="planner",
            same_result=each.same_result,
        )

    def _train(self, change: str) -> str:
        run = self.found.run
        return f"shardtune train {run.job_file} {change} {run.elsewhere}"

    def _collectives(self) -> tuple[ExposedCollective, ...]:
        """Measured by a profile, else as the planner shares out what was waited for."""
        waits = self.found.device.forecast.speed.waits if self.found.device.forecast else ()
        links: dict[str, str] = {each.op: each.where.replace("_", "-") for each in waits}
        if self.found.run.profiles:
            return _profiled_collectives(self.found.run.profiles, links)
        whole = sum(each.seconds for each in waits)
        share = self.found.part["communication"]
        if not whole or not share:
            return ()
        return tuple(
            ExposedCollective(
                op=f"{each.op} of {each.what}",
                share=share * each.seconds / whole,
                link=each.where.replace("_", "-"),
                measured=False,
            )
            for each in sorted(waits, key=lambda each: -each.seconds)
        )

    def _settings(self) -> tuple[SettingFact, ...]:
        if self.found.shares["communication"] < NOTICED:
            return ()
        return tuple(
            SettingFact(key=f"strategy.{each.key}", value=each.value, meaning=each.meaning)
            for each in self.found.run.job.strategy.overlap_settings()
        )

    def _verdict(self, bound: Bound, causes: Sequence[tuple[SlowCause, float]]) -> str:
        said = f"{self.found.shares[bound]:.0%} of the time is {bound}"
        if not causes:
            said = f"healthy: {said}, and nothing found would save a tenth"
        elif causes[0][0] == bound:
            said += ", which is the largest loss"
        else:
            cause, share = causes[0]
            said += f"; the largest loss is {cause.replace('_', ' ')} ({share:.0%})"
        if self.found.queued >= WORTH:
            said += f"; other processes had the processor {self.found.queued:.0%} of the time"
        return said


def _best(remedies: Sequence[Remedy], causes: Sequence[SlowCause]) -> tuple[Remedy, ...]:
    """The largest, and something to look at where no change helps against the largest cause."""
    found = sorted((each for each in remedies if each.gain >= NOTICED), key=lambda each: -each.gain)
    found = found[:MOST_REMEDIES]
    if causes and all(each.cause != causes[0] for each in found):
        looked = [each for each in remedies if each.cause == causes[0]]
        found = [*found[: MOST_REMEDIES - len(looked[:1])], *looked[:1]]
    return tuple(found)


def _profiled_collectives(
    profiles: Sequence[RankProfile], links: Mapping[str, str]
) -> tuple[ExposedCollective, ...]:
    """On average over the ranks."""
    ops = dict.fromkeys(each.op for profile in profiles for each in profile.collectives)
    found = []
    for op in ops:
        seen = [(p, each) for p in profiles for each in p.collectives if each.op == op]
        found.append(
            ExposedCollective(
                op=op,
                share=sum(each.exposed / p.seconds for p, each in seen) / len(profiles),
                count=sum(each.count / p.steps for p, each in seen) / len(profiles),
                link=links.get(op),
            )
        )
    return tuple(sorted(found, key=lambda each: -each.share))
