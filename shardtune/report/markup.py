"""HTML that is escaped where it is built: text of data and models can't become markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_KEPT = "\n\t\u200c\u200d"  # joiners of letters and emoji besides what is printable
_VOID = {"meta", "br", "hr"}


class Markup(str):
    """Text that is markup already; any other text is escaped."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """`element("p", "a < b", class_="note")`. An attribute that is None is left out; `_` in its
    name stands for `-`, and one at the end keeps it apart from Python's own words."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{plain(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """One after the other; what isn't markup is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else plain(part) for part in parts))


def plain(text: str) -> str:
    """The text as HTML shows it. What a reader can't see (control characters, marks that turn the
    direction of writing, half surrogates) is shown as a replacement character."""
    if not text.isprintable():
        kept = (c if c.isprintable() or c in _KEPT else "\N{REPLACEMENT CHARACTER}" for c in text)
        text = "".join(kept)
    return escape(text, quote=True)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> Markup:
    """A table with a heading for each column and one for each row."""
    head = element("tr", *(element("th", each, scope="col") for each in headings))
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", each) for each in rest))
        for first, *rest in rows
    ]
    found = element(
        "table", element("caption", caption), element("thead", head), element("tbody", *body)
    )
    return element("div", found, class_="wide", tabindex="0", role="region", aria_label=caption)
