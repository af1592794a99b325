"""A case of the exam, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Priority = Literal["P0", "P1"]
Outcome = Literal["held", "not held", "not applicable"]


@dataclass(frozen=True)
class Verdict:
    """`figure` says how well, or why not."""

    outcome: Outcome
    figure: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.figure}" if self.figure else self.outcome


@dataclass
class Findings:
    """What a check saw: each fact with whether it is as it should be, and figures to show."""

    facts: list[tuple[str, bool]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def expect(self, what: str, holds: bool) -> None:
        self.facts.append((what, bool(holds)))

    def show(self, figure: str) -> None:
        self.figures.append(figure)

    def verdict(self) -> Verdict:
        wrong = [what for what, holds in self.facts if not holds]
        if wrong:
            return Verdict("not held", ", ".join(["failed: " + "; ".join(wrong), *self.figures]))
        return Verdict("held", ", ".join(self.figures))
