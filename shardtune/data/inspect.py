"""What the model will see: the numbers of each data set, and documents with their trained part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import RenderableType
    from rich.text import Text

    from shardtune.data.dataset import PreparedData, PreparedSet

BLOCKS = " ▁▂▃▄▅▆▇█"
BARS = 16  # of a histogram of lengths
ABREAST = 4  # data sets beside each other in a table
OPEN, CLOSE = "‹", "›"  # around what is trained, so that it shows without colour too
# A text may hold anything, also what a terminal takes for commands: show control characters.
VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), "\ufffd")

TRAINED, SPECIAL, PLAIN = "bold green", "magenta", "dim"


def view(prepared: PreparedData, tokenizer: Any, examples: int) -> RenderableType:
    """A table of all data sets, and the first `examples` documents of each."""
    from rich.console import Group
    from rich.text import Text

    sets = [("train", one) for one in prepared.train] + [("eval", one) for one in prepared.eval]
    parts: list[RenderableType] = [
        _table(sets[start : start + ABREAST]) for start in range(0, len(sets), ABREAST)
    ]
    parts += [Text(f"{one.name}: {note}") for _, one in sets for note in one.report.notes]
    if examples:
        parts.append(_legend())
    for role, one in sets:
        for number in range(min(examples, len(one.rows))):
            parts.append(_title(role, one, number))
            parts.append(document_text(one, number, tokenizer))
    return Group(*parts)


def document_text(prepared: PreparedSet, number: int, tokenizer: Any) -> Text:
    """A document's text: trained stretches between ‹ and ›, special tokens in another colour."""
    from rich.text import Text

    row = prepared.rows[number]
    special = special_tokens(tokenizer)
    shown = Text()
    for piece, trained in trained_pieces(row["input_ids"], row["trained"], tokenizer):
        style = TRAINED if trained else PLAIN
        if prepared.paired:
            shown.append("\ntarget: " if trained else "source: ")
        shown.append(OPEN if trained else "", style)
        for part in special.split(piece) if special else [piece]:
            is_special = special is not None and special.fullmatch(part) is not None
            shown.append(part, f"{style} {SPECIAL}" if is_special else style)
        shown.append(CLOSE if trained else "", style)
    return shown


def histogram(values: NDArray[np.int32], bars: int = BARS) -> str:
    """How values are spread from 0 to the largest, as a row of blocks."""
    if not len(values):
        return ""
    counts, _ = np.histogram(values, bins=bars, range=(0, max(int(values.max()), 1)))
    # A bar that isn't empty shows, however small it is beside the others.
    heights = np.ceil(counts / counts.max() * (len(BLOCKS) - 1)).astype(int)
    return "".join(BLOCKS[height] for height in heights)


def _table(sets: list[tuple[str, PreparedSet]]) -> RenderableType:
    from rich.table import Table

    table = Table(title="Data", title_justify="left")
    table.add_column("")
    for role, one in sets:
        table.add_column(f"{one.name} ({role})", justify="right", overflow="fold")
    facts = [_facts(one) for _, one in sets]
    for name in facts[0]:
        table.add_row(name, *(fact[name] for fact in facts))
    return table


def _facts(prepared: PreparedSet) -> dict[str, str]:
    """The rows of the table."""
    report, lengths = prepared.report, prepared.lengths
    middle, high = np.percentile(lengths, [50, 95])
    return {
        "file": report.path,
        "format": report.format,
        "weight": f"{prepared.weight:g}",
        "rows": f"{report.rows_read:,}",
        "documents": f"{report.documents:,}",
        "a document is": report.unit,
        "tokens": f"{report.tokens:,}",
        "trained": f"{report.labels / report.tokens:.1%}",
        "ends trained": f"{report.stops_trained / report.documents:.1%}",
        "length p50": f"{middle:,.0f}",
        "length p95": f"{high:,.0f}",
        "length max": f"{lengths.max():,}",
        **_sides(prepared),
        "lengths, 0 to max": histogram(lengths),
        "truncated rows": _with_tokens(report.truncated, report.truncated_tokens),
        "split rows": f"{report.split:,}",
        "dropped: too long": f"{report.dropped:,}",
        "dropped: untrained": f"{report.untrained:,}",
        "bad rows": f"{report.bad:,}",
    }


def _sides(prepared: PreparedSet) -> dict[str, str]:
    """The lengths of each side, where a document is a source and a target."""
    if not prepared.paired:
        return {}
    targets = prepared.labels
    sides = {"source": prepared.lengths - targets, "target": targets}
    return {
        f"{side} p95, max": f"{np.percentile(lengths, 95):,.0f}, {lengths.max():,}"
        for side, lengths in sides.items()
    }


def _with_tokens(rows: int, tokens: int) -> str:
    return f"{rows:,} ({tokens:,} tokens)" if rows else "0"


def _legend() -> Text:
    from rich.text import Text

    return Text.assemble(
        "\nIn the documents: ",
        (f"{OPEN}trained{CLOSE}", TRAINED),
        ", ",
        ("not trained", PLAIN),
        ", ",
        ("special token", SPECIAL),
    )


def _title(role: str, prepared: PreparedSet, number: int) -> RenderableType:
    from rich.rule import Rule
    from rich.text import Text

    length, labels = int(prepared.lengths[number]), int(prepared.labels[number])
    title = f"{prepared.name}:{number} ({role}): {length:,} tokens, {labels:,} trained"
    return Rule(Text(title), align="left", characters="─")


def trained_pieces(
    ids: list[int], trained: list[bool], tokenizer: Any
) -> Iterator[tuple[str, bool]]:
    """Stretches of the text that are trained, or not, as a whole.

    Each is what its tokens add to the text before them: decoded by itself it could lose a blank at
    its start, or show half of a character.
    """
    text, end = "", 0
    for is_trained, group in groupby(trained):
        end += len(list(group))
        longer = tokenizer.decode(
            ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        yield longer[len(text) :].translate(VISIBLE), is_trained
        text = longer


def special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds special tokens in a text, and keeps them when it is split there."""
    tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, tokens))})") if tokens else None
