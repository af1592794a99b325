"""Drawings as one file: an SVG picture that stands alone, the same as PNG, or an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.errors import JobError, Problem
from shardtune.report.html_page import html_page
from shardtune.report.line_chart import SERIES_COLOURS, Drawing, figure
from shardtune.report.markup import Markup, element
from shardtune.report.png import missing_for_png, render_png

PLOT_OPTION = "--plot"
PLOT_KINDS = (".svg", ".png", ".html")
PAPER_COLOURS = (
    "#2563c9", "#b5480f", "#1a7f5a", "#8a3fbf", "#a8841a", "#b0326e", "#3a7d94", "#6b7280",
    "#a3a9b3",
)  # fmt: skip
"""Of the page's style sheet, on white."""
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#5b626d}.title{font-size:13px;fill:#1c1f24}"
    ".x,.none{text-anchor:middle}.x.name,.y{text-anchor:end}.grid{stroke:#d9dde3;stroke-width:.6}"
    ".axis{stroke:#5b626d}.line{fill:none;stroke:currentColor;stroke-width:1.8}"
    ".dashed{stroke-dasharray:7 4}.band{fill:currentColor;opacity:.16}"
    ".value{paint-order:stroke;stroke:#fff;stroke-width:3px}.bar,.dot{fill:currentColor}"
    ".level{stroke:#1c1f24;stroke-dasharray:5 4}"
)
PANEL_GAP, PANEL_HEADING, TEXT_LINE = 24, 24, 16
PICTURE_WIDTH = 800


@dataclass(frozen=True)
class Picture:
    """Drawings one below the other; a notebook shows it where a cell ends with one."""

    title: str
    drawings: Sequence[Drawing]
    notes: Sequence[str] = ()

    def _repr_svg_(self) -> str:
        return _picture(self.title, self.drawings, self.notes)


def require_plot(path: Path) -> None:
    """Refuses a kind of picture that can't be written here, before anything is computed."""
    instead = f"write {path.with_suffix('.svg').name}, which every browser and editor opens"
    if path.suffix.lower() not in PLOT_KINDS:
        kind = path.suffix or "no suffix"
        fact = f"{path.name}: pictures are written as SVG, PNG or HTML, not as {kind}"
        raise JobError(Problem(PLOT_OPTION, fact, instead))
    if path.suffix.lower() == ".png" and (missing := missing_for_png()):
        raise JobError(
            Problem(PLOT_OPTION, f"{path.name}: {missing[0]}", f"{missing[1]}, or {instead}")
        )


def write_plot(path: Path, title: str, drawings: Sequence[Drawing], notes: Sequence[str]) -> None:
    """The drawings one below the other, with `notes` as lines of text at the end."""
    require_plot(path)
    page = _page if path.suffix.lower() == ".html" else _picture
    text = page(title, drawings, notes)
    try:
        path.write_bytes(render_png(text) if path.suffix.lower() == ".png" else text.encode())
    except OSError as error:
        fact = f"{path} can't be written: {error.strerror}"
        raise JobError(
            Problem(PLOT_OPTION, fact, "name a file in a folder that is there")
        ) from None


def _page(title: str, drawings: Sequence[Drawing], notes: Sequence[str]) -> str:
    figures = [
        figure(each.title, each.words, each.shapes, each.size, _html_keys(each))
        for each in drawings
    ]
    return html_page(title, element("h1", title), *figures, *(element("p", note) for note in notes))


def _html_keys(drawing: Drawing) -> Markup:
    keys = [
        element(
            "li",
            element("span", class_=f"key c{key.colour % SERIES_COLOURS}{' dashed' * key.dashed}"),
            key.name,
        )
        for key in drawing.keys
    ]
    return element("ul", *keys, class_="legend")


def _picture(title: str, drawings: Sequence[Drawing], notes: Sequence[str]) -> str:
    colours = "".join(f".c{number}{{color:{value}}}" for number, value in enumerate(PAPER_COLOURS))
    parts, top = [element("text", title, x=10, y=22, class_="title")], 22.0 + PANEL_GAP
    for drawing in drawings:
        width, height = drawing.size
        parts.append(element("text", drawing.title, x=10, y=top, class_="title"))
        keys, lines = _svg_keys(drawing, top + TEXT_LINE)
        parts += keys
        top += TEXT_LINE * (lines - 1)
        inner = element(
            "svg", element("title", drawing.title), element("desc", drawing.words),
            *drawing.shapes, x=10, y=top + PANEL_HEADING + 4, width=width, height=height,
            viewBox=f"0 0 {width} {height}",
        )  # fmt: skip
        parts.append(inner)
        top += PANEL_HEADING + height + PANEL_GAP
    for note in notes:
        for line in _wrapped(note, PICTURE_WIDTH // 6):
            parts.append(element("text", line, x=10, y=top))
            top += TEXT_LINE
    style = element("style", Markup(STYLE + colours))
    paper = element("rect", width="100%", height="100%", fill="#fff")
    root = element(
        "svg", element("title", title), style, paper, *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {PICTURE_WIDTH} {top:.0f}",
        width=PICTURE_WIDTH,
    )  # fmt: skip
    return f"{root}\n"


def _svg_keys(drawing: Drawing, top: float) -> tuple[list[Markup], int]:
    """The legend, and how many lines it takes."""
    found: list[Markup] = []
    left, lines = 10.0, 1
    for key in drawing.keys:
        width = 16 + 6.5 * len(key.name) + 14
        if left > 10 and left + width > PICTURE_WIDTH:
            left, lines, top = 10.0, lines + 1, top + TEXT_LINE
        colour = f"c{key.colour % SERIES_COLOURS}"
        if key.dashed:
            shape = element("path", d=f"M{left:.0f} {top - 4}h12", class_=f"line dashed {colour}")
        else:
            shape = element(
                "rect", x=f"{left:.0f}", y=top - 8, width=12, height=8, class_=f"bar {colour}"
            )
        found += [shape, element("text", key.name, x=f"{left + 16:.0f}", y=top)]
        left += width
    return found, lines


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1].strip() else f"{lines[-1]}{word}"
    return lines
