"""Before and after, side by side: a table for people, and a JSON document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from shardtune.evaluation.confidence import Interval
from shardtune.evaluation.run_task import TIMEOUT, Comparison, TaskResult


def draw_comparisons(comparisons: Sequence[Comparison]) -> Table:
    """Each figure with its 95 % interval; a change that may be luck is not called one."""
    table = Table("task", "metric", "rows", box=None, pad_edge=False)
    both = any(each.before for each in comparisons)
    for column in ("before", "after", "change", "") if both else ("score",):
        table.add_column(column, justify="right")
    for each in comparisons:
        row = [each.after.task, each.after.metric, str(len(each.after.rows))]
        if each.before is not None and each.difference is not None:
            row += [percent(each.before.interval), percent(each.after.interval)]
            row += [points(each.difference), verdict(each.difference)]
        elif both:
            row += ["", percent(each.after.interval), "", ""]
        else:
            row += [percent(each.after.interval)]
        table.add_row(*row)
    table.caption, table.caption_justify = "\n".join(_late(comparisons)) or None, "left"
    return table


def _late(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """The answers whose code or search was broken off."""
    for each in comparisons:
        for side, result in (("before", each.before), ("after", each.after)):
            rows = [row for row in result.rows if row.detail.startswith(TIMEOUT)] if result else []
            if rows:
                numbers = ", ".join(str(row.row) for row in rows[:5])
                more = ", ..." if len(rows) > 5 else ""
                when = f" {side}" if each.before else ""
                yield (
                    f"{each.after.task}{when}: {len(rows)} answer{'s' * (len(rows) > 1)} scored 0, "
                    f"as scoring took too long (row {numbers}{more})"
                )


def percent(found: Interval) -> str:
    return f"{found.mean:.1%} [{found.low:.1%}, {found.high:.1%}]"


def points(found: Interval) -> str:
    """A difference in percentage points."""
    low, high = 100 * found.low, 100 * found.high
    return f"{100 * found.mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def verdict(difference: Interval) -> str:
    """What the interval allows to say."""
    if difference.low > 0:
        return "better"
    if difference.high < 0:
        return "worse"
    return "may be chance"


def as_document(comparison: Comparison) -> dict[str, Any]:
    """Everything that was asked, said and scored."""
    difference = comparison.difference
    return {
        "task": comparison.after.task,
        "metric": comparison.after.metric,
        "before": _side(comparison.before),
        "after": _side(comparison.after),
        "difference": asdict(difference) if difference else None,
    }


def _side(result: TaskResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        **asdict(result.interval),
        "seconds": round(result.seconds, 3),
        "answers": [asdict(row) for row in result.rows],
    }
