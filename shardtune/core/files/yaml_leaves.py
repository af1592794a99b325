"""The values of a YAML document by their dotted paths, read fast.

For job files that a run has written, of which a list shows hundreds: 20 times as fast as
`yaml_document`, without its checks and lines. Event by event, so that no nesting can exhaust the
stack: composing such a document would end the process.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from shardtune.core.files.yaml_document import (
    LARGEST_DOCUMENT,
    MAX_YAML_BYTES,
    MAX_YAML_DEPTH,
    parse_scalar,
)

Scalar = str | int | float | bool | None

_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # without libyaml it is only slower


@dataclass
class _Level:
    """A mapping or a list that is being read."""

    path: str
    is_list: bool
    key: str | None = None
    count: int = 0

    def place(self) -> str:
        """The path of the value that comes next."""
        name = str(self.count) if self.is_list else self.key or ""
        self.count, self.key = self.count + 1, None
        return f"{self.path}.{name}" if self.path else name


def yaml_leaves(text: str) -> dict[str, Scalar]:
    """Each scalar by its path (`data.train.0.path`); an empty list or mapping is None. ValueError
    if it is no YAML, is no mapping, or is larger than a job can be."""
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"has more than {MAX_YAML_BYTES:,} letters")
    found: dict[str, Scalar] = {}
    levels: list[_Level] = []
    try:
        for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
            if number > 4 * LARGEST_DOCUMENT:
                raise ValueError("has too many values")
            _take(event, levels, found)
    except yaml.YAMLError as error:
        raise ValueError(f"is not valid YAML: {error}") from None
    return found


def _take(event: yaml.Event, levels: list[_Level], found: dict[str, Scalar]) -> None:
    if isinstance(event, yaml.ScalarEvent):
        here = levels[-1] if levels else None
        if here is None:
            raise ValueError("is no mapping")
        if not here.is_list and here.key is None:
            here.key = str(event.value)
        else:
            plain = event.style in (None, "")
            found[here.place()] = parse_scalar(event.value) if plain else str(event.value)
    elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
        is_list = isinstance(event, yaml.SequenceStartEvent)
        if not levels and is_list:
            raise ValueError("is no mapping")
        if levels and not levels[-1].is_list and levels[-1].key is None:
            raise ValueError("has a key that is no word")
        if len(levels) > MAX_YAML_DEPTH:
            raise ValueError(f"has more than {MAX_YAML_DEPTH} levels")
        levels.append(_Level(levels[-1].place() if levels else "", is_list))
    elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
        ended = levels.pop()
        if ended.count == 0 and ended.path:
            found[ended.path] = None
    elif isinstance(event, yaml.AliasEvent):
        raise ValueError("has an alias, which we never write")
