"""Complaints about rows, grouped: what is wrong alike is told once, with a count and examples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardtune.data.records import BadRow

NAMED_ROWS = 3  # rows of a group that are named
GROUPS_KEPT = 1000  # further kinds of complaints are counted together

_VARYING = re.compile(r"\d+|0x[0-9a-f]+")
_OTHER = "other reasons"


@dataclass
class Complaint:
    """Rows that can't be used for one reason."""

    count: int = 0
    examples: list[BadRow] = field(default_factory=list)
    """The first of them."""
    same: bool = True
    """Whether the reason is the same to the letter, numbers included."""

    def add(self, other: Complaint) -> None:
        if self.examples and other.examples:
            self.same &= other.same and self.reason == other.reason
        self.count += other.count
        self.examples += other.examples[: NAMED_ROWS - len(self.examples)]

    @property
    def reason(self) -> str:
        return self.examples[0].reason

    @property
    def culprit(self) -> str:
        return self.examples[0].culprit


@dataclass
class Complaints:
    """All complaints about a data set, by a key that leaves out their numbers."""

    groups: dict[str, Complaint] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Complaint]:
        return iter(self.groups.values())

    def refuse(self, row: BadRow) -> None:
        self._group(_key(row)).add(Complaint(1, [row]))

    def add(self, others: Complaints) -> None:
        for key, complaint in others.groups.items():
            self._group(key).add(complaint)

    def _group(self, key: str) -> Complaint:
        if key not in self.groups and len(self.groups) >= GROUPS_KEPT:
            key = _OTHER
        return self.groups.setdefault(key, Complaint())

    @staticmethod
    def of(groups: Mapping[str, Mapping[str, Any]]) -> Complaints:
        """From what `dataclasses.asdict` made of the groups."""
        return Complaints(
            {
                key: Complaint(
                    group["count"], [BadRow(**row) for row in group["examples"]], group["same"]
                )
                for key, group in groups.items()
            }
        )


def _key(row: BadRow) -> str:
    return f"{row.culprit}:{_VARYING.sub('#', row.reason)}"
