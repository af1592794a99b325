"""Time lost: causes for which a run takes longer than it would have to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardtune.config.job import Job
from shardtune.core.runs.diagnosis import SlowCause
from shardtune.plan.auto_micro_batch import ABOUT_AS_FAST, has_room, powers
from shardtune.plan.forecast import Forecast
from shardtune.plan.measured_run import MeasuredRun
from shardtune.plan.search import tried

NOTICED = 0.02
"""Share of the time from which on a loss is worth a word."""
RARELY = 0.02
"""Share of the time that saving, evaluating and logging should take."""


@dataclass(frozen=True)
class Lost:
    """A share of the time that is lost, and what would save it."""

    cause: SlowCause
    share: float
    fact: str
    change: str = ""
    line: str = ""
    """A command, where it is none that trains with `change`."""
    gain: float | None = None
    """None: all of the share."""
    same_result: bool = True


@dataclass(frozen=True)
class TimeLost:
    """Looks for what is lost, cause by cause."""

    found: MeasuredRun

    @property
    def job(self) -> Job:
        return self.found.run.job

    def all(self) -> Iterator[Lost]:
        """Each loss that is worth a word."""
        yield from self._lost_to_data()
        yield from self._lost_to_others()
        yield from self._lost_to_host()
        yield from self._lost_to_padding()
        yield from self._lost_between_steps()

    def _lost_to_data(self) -> Iterator[Lost]:
        share = self.found.part["data"]
        if share < NOTICED:
            return
        loading = sum(rank.loading for rank in self.found.run.parts.ranks)
        on_cpu = sum(rank.loading_work for rank in self.found.run.parts.ranks)
        busy = on_cpu / loading if loading else 0.0
        if busy < 0.5:
            fact = (
                f"ranks wait {share:.0%} of the time for data; the loader itself waits "
                f"{1 - busy:.0%} of its time for the disk"
            )
            line = f"XDG_CACHE_HOME=/a/local/disk shardtune train {self.found.run.job_file}"
            yield Lost("slow_storage", share, fact, line=f"{line} {self.found.run.elsewhere}")
            return
        fact = (
            f"ranks wait {share:.0%} of the time for data; the loader computes {busy:.0%} of its "
            "time: it can't prepare steps as fast as they are trained"
        )
        threads = int(self.job.launch.threads)
        if threads > 1:  # one may be left to the loader
            change = f"launch.threads={threads - 1}"
            yield Lost("slow_loader", share, fact, change, gain=share / 2)
            return
        line = f"shardtune doctor {self.found.run.job_file}"
        yield Lost("slow_loader", share, fact, line=line, gain=0.0)

    def _lost_to_others(self) -> Iterator[Lost]:
        """Communication is waiting for a slow rank, for one with longer rows, or for the link."""
        sending = self.found.shares["communication"]
        for slow in self.found.stragglers()[:1]:
            lost = min(slow.lost, sending)
            sending -= lost
            fact = f"rank {slow.rank} takes {slow.times:.2f} times as long as others for its rows"
            line = f"shardtune doctor {self.found.run.job_file}"
            yield Lost("straggler", lost, fact, line=line)
        uneven = self.found.run.parts.imbalance
        if uneven > 1.05 and sending > NOTICED:
            lost = min(sending, 1 - 1 / uneven)
            sending -= lost
            fact = f"the rank with the longest rows has {uneven:.2f} times the mean of all"
            change = "" if self.job.data.packs else "data.packing=true"
            yield Lost("imbalance", lost, fact, change)
        if sending > NOTICED:
            fact = f"ranks wait {sending:.0%} of the time for what others send"
            predicted = self.found.predicted_shares()
            if predicted and sending > 3 * predicted.get("communication", 0.0):
                fact += (
                    f" ({predicted.get('communication', 0.0):.0%} were forecast: the link is slower"
                    " than was assumed)"
                )
            line = "shardtune bench"
            yield Lost("communication", sending, fact, line=line, gain=0.0)

    def _lost_to_host(self) -> Iterator[Lost]:
        share = self.found.shares["host"]
        if share < NOTICED:
            return
        rows, micro = self._rows, int(self.job.train.micro_batch)
        count = math.ceil(rows / micro)
        many = f"{count} micro-batches of {micro} row{'s' * (micro > 1)} a step"
        if count > 1:
            fact = f"the host launches small operations {share:.0%} of the time, for {many}"
            yield self._larger_micro_batch(share, fact)
            return
        fact = f"operations are so small that launching them takes {share:.0%} of the time"
        if self.found.device.is_gpu and self.job.train.kernels != "compiled":
            yield Lost("host", share, fact, "train.kernels=compiled", gain=share / 2)
            return
        yield self._more_rows(share, fact)

    @property
    def _rows(self) -> int:
        """Of a rank in a step."""
        return math.ceil(self.job.train.global_batch / self.found.data_ranks)

    def _larger_micro_batch(self, share: float, fact: str) -> Lost:
        """The largest that fits of all rows of a step, half of them, a quarter and so on."""
        rows, micro = self._rows, int(self.job.train.micro_batch)
        count = math.ceil(rows / micro)
        for parts in powers(count - 1):
            larger = math.ceil(rows / parts)
            if self._fits(micro_batch=larger):
                change, gain = f"train.micro_batch={larger}", share * (1 - parts / count)
                return Lost("small_micro_batch", share, fact, change, gain=gain)
        return Lost("small_micro_batch", share, f"{fact}; {self._why_not}", gain=0.0)

    def _more_rows(self, share: float, fact: str) -> Lost:
        """Four times the rows, or twice, where four times don't fit."""
        train = self.job.train
        for times in (4, 2):
            rows, micro = times * train.global_batch, times * int(train.micro_batch)
            if self._fits(global_batch=rows, micro_batch=micro):
                change = f"train.global_batch={rows} train.micro_batch={micro}"
                gain = share * (1 - 1 / times)
                return Lost("host", share, fact, change, gain=gain, same_result=False)
        return Lost("host", share, f"{fact}; {self._why_not}", gain=0.0)

    def _fits(self, **values: int) -> bool:
        """Whether the planner says that the job fits with these values of `train`, and takes no
        longer for a token: a pipeline needs several micro-batches."""
        planned = self.found.device.forecast
        if planned is None:
            return False
        train = planned.job.train.model_copy(update=values)
        new = tried(planned.job.model_copy(update={"train": train}), planned.shape, planned.cluster)
        if not isinstance(new, Forecast) or not has_room(new):
            return False
        before, after = planned.speed, new.speed
        per_token = before.step.total / before.tokens
        return after.step.total / after.tokens <= (1 + ABOUT_AS_FAST) * per_token

    @property
    def _why_not(self) -> str:
        if self.found.device.forecast is None:
            return "`--cluster` names its devices, which tells whether more rows at once fit"
        return "by the planner, more rows at once don't fit or don't help"

    def _lost_to_padding(self) -> Iterator[Lost]:
        whole = self.found.positions * self.found.data_ranks
        padding = 1 - self.found.run.tokens / whole if whole else 0.0
        share = padding * self.found.part["compute"]
        if share > NOTICED and not self.job.data.packs:
            fact = f"{padding:.0%} of what is computed is padding"
            yield Lost("padding", share, fact, "data.packing=true")

    def _lost_between_steps(self) -> Iterator[Lost]:
        """Nothing is told of what happens at the end only: it can't be any rarer."""
        save, job = self.found.part["save"], self.job
        if save > RARELY and self._can_be_rarer(job.save.every):
            fact = f"ranks hold still for checkpoints {save:.0%} of the time"
            change = f"save.every={self._rarer(job.save.every, save)}"
            if not job.save.background:
                change = "save.background=true"
            yield Lost("save", save, fact, change, gain=save - RARELY)
        yield from self._lost_to_evaluation()
        logged = self.found.part["logging"]
        if logged > RARELY:
            fact = f"{logged:.0%} of the time goes into metrics and traces"
            change = "save.trace=false" if job.save.trace else "train.log_every=20"
            yield Lost("logging", logged, fact, change, gain=logged - RARELY)

    def _lost_to_evaluation(self) -> Iterator[Lost]:
        """Held-out sets and tasks have intervals of their own."""
        whole, section = self.found.part["evaluation"], self.job.evaluate
        took = self.found.run.task_seconds
        asked = min(whole, sum(took.values()) / self.found.total)
        judged = whole - asked
        if judged > RARELY and self._can_be_rarer(int(section.every)):
            fact = f"{judged:.0%} of the time is spent on held-out sets"
            change = f"evaluate.every={self._rarer(int(section.every), judged)}"
            yield Lost("evaluation", judged, fact, change, gain=judged - RARELY)
        change = " ".join(
            f"evaluate.tasks.{number}.every={self._rarer(int(entry.every), asked)}"
            for number, entry in enumerate(section.tasks)
            if self._can_be_rarer(int(entry.every))
        )
        if asked > RARELY and change:
            names = ", ".join(name for name, seconds in took.items() if seconds)
            fact = f"{asked:.0%} of the time is spent on tasks ({names})"
            yield Lost("evaluation", asked, fact, change, gain=asked - RARELY)

    def _can_be_rarer(self, every: int) -> bool:
        steps = self.found.run.steps
        return every > 0 and (steps is None or every < steps)

    def _rarer(self, every: int, share: float) -> int:
        """How seldom something would have to happen to take a small share of the time; at the end
        of a run that is too short for that."""
        now = share / max(1e-9, 1 - share)
        wanted = max(2, math.ceil(max(1, every) * now / (RARELY / (1 - RARELY))))
        return min(wanted, self.found.run.steps or wanted)
