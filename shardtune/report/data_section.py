"""The data of a run as HTML: figures of each set, lengths, and documents coloured by what is
trained."""

from __future__ import annotations

from shardtune.core.runs.data_summary import DataSetSummary, DataSummary, DocumentExample
from shardtune.report.bar_chart import draw_histogram
from shardtune.report.markup import Markup, element, join, table
from shardtune.report.run_story import public_text

_CHARACTERS = 3000  # of a document


def data_section(data: DataSummary) -> Markup:
    """A table, a histogram for each set, and some documents."""
    rows = [_row(each) for each in data.sets]
    headings = (
        "data set", "format", "documents", "tokens", "trained", "ends trained", "length p50 / p95",
        "truncated", "left out", "unreadable", "duplicates",
    )  # fmt: skip
    length = data.sequence_length
    packed = f"Rows of {length:,} tokens are {data.fill:.1%} full, documents are packed."
    if not data.packing:
        mean = f"{data.fill * length:,.0f} tokens on average"
        packed = f"A row is one document, of {mean} and {length:,} at most."
        if data.paired:  # the target has a limit of its own
            packed = f"A row is one source and its target, together {mean}."
    notes = [
        element("li", f"{each.name}: {public_text(note)}")
        for each in data.sets
        for note in each.notes
    ]
    lengths = [
        draw_histogram(
            f"Lengths of {each.name} ({each.side})", each.lengths, each.length_max, "tokens"
        )
        for each in data.sets
    ]
    examples = [example for each in data.sets for example in each.examples]
    shown = [_example(example, opened=not number) for number, example in enumerate(examples)]
    legend = element(
        "p", "In the documents: ", element("mark", "trained"), ", not trained, ",
        element("span", "special token", class_="special"), class_="soft",
    )  # fmt: skip
    return join(
        [
            table(headings, rows, "Data sets"),
            element("p", packed),
            *([element("ul", *notes)] if notes else []),
            element("div", *lengths, class_="charts"),
            *([legend, *shown] if shown else []),
        ]
    )


def _row(one: DataSetSummary) -> tuple[str, ...]:
    cut = f"{one.truncated:,} ({one.truncated_tokens:,} tokens)" if one.truncated else "0"
    return (
        f"{one.name} ({one.side})",
        one.format,
        f"{one.documents:,}",
        f"{one.tokens:,}",
        f"{one.labels / max(1, one.tokens):.1%}",
        f"{one.ends_trained / max(1, one.documents):.1%}",
        f"{one.length_p50:,} / {one.length_p95:,}",
        cut,
        f"{one.too_long + one.untrained:,}",
        f"{one.unreadable:,}",
        "unknown" if one.duplicates is None else f"{one.duplicates:,}",
    )


def _example(example: DocumentExample, *, opened: bool) -> Markup:
    pieces, left = [], _CHARACTERS
    for piece in example.pieces:
        text, left = piece.text[:left], left - len(piece.text)
        shown = element("span", text, class_="special") if piece.special else text
        pieces.append(element("mark", shown) if piece.trained else shown)
        if left <= 0:
            break
    more = [" ..."] if example.cut or left <= 0 else []
    title = f"{example.name}: {example.tokens:,} tokens, {example.labels:,} trained"
    text = element("pre", *pieces, *more)
    return element("details", element("summary", title), text, open="" if opened else None)
