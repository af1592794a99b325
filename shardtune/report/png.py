"""An SVG as PNG, by resvg. It draws words with the machine's fonts, and leaves them out, without a
word, where it finds none of the family that is asked for."""

from __future__ import annotations

import importlib.util
from functools import cache

ZOOM = 2.0
"""Pixels for each unit of the SVG, as screens have them today."""
SANS_SERIF_FONTS = (
    "DejaVu Sans", "Liberation Sans", "Noto Sans", "Ubuntu", "Cantarell", "Roboto", "Open Sans",
    "Arial", "Helvetica", "FreeSans",
)  # fmt: skip
"""What distributions have as their sans-serif font."""


def missing_for_png() -> tuple[str, str] | None:
    """Why no PNG can be written on this machine, and what to do about it."""
    if importlib.util.find_spec("resvg_py") is None:
        fact = "resvg-py, which makes a PNG of the SVG, is not installed"
        return fact, "pip install 'shardtune[png]'"
    if _family() is None:
        fact = f"a PNG would have no words: no font was found ({', '.join(SANS_SERIF_FONTS)})"
        return fact, "apt-get install fonts-dejavu-core"
    return None


def render_png(svg: str) -> bytes:
    """The picture, its words in a font that this machine has."""
    return _render(svg, _family())


@cache
def _family() -> str | None:
    """The first family in which a letter leaves a trace."""
    paper = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    letter = paper.format('<text x="2" y="16" font-family="sans-serif">M</text>')
    empty = paper.format("")
    return next(
        (each for each in SANS_SERIF_FONTS if _render(letter, each) != _render(empty, each)), None
    )


def _render(svg: str, family: str | None) -> bytes:
    import resvg_py

    return resvg_py.svg_to_bytes(svg_string=svg, zoom=ZOOM, sans_serif_family=family)
