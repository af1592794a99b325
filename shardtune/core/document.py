"""Reads a YAML document strictly, and remembers on which line each key stands.

YAML 1.1 as most loaders read it surprises people: `1e-4` is text, `no` is false, `1:30` is ninety,
a key written twice silently wins, a tag can build objects, and a few nested aliases expand to
gigabytes. This loader reads the YAML 1.2 core types (so `1e-4` is a number and `no` is a word) and
refuses the rest, with the line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardtune.errors import JobError, Problem

LARGEST_FILE = 1 << 20
LARGEST_DOCUMENT = 20_000  # nodes after aliases are expanded
DEEPEST = 40

KeyPath = tuple[str | int, ...]

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+(?:_[0-9]+)*$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_SPECIAL_FLOAT = re.compile(r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")


@dataclass(frozen=True)
class Document:
    """A parsed file: plain dicts, lists and scalars, and the line of every key path."""

    source: str
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """`file:line: dotted.key` for the path, or for the nearest parent that has a line."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return f"{self.source}:{self.lines[path[:end]]}: {dotted(path)}".removesuffix(": ")
        return f"{self.source}: {dotted(path)}".removesuffix(": ")


def dotted(path: KeyPath) -> str:
    """`('data', 'train', 0)` as `data.train.0`."""
    return ".".join(str(part) for part in path)


def read_document(path: Path) -> Document:
    """Reads a YAML file; raises JobError with the line for anything that isn't plain data."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise JobError(Problem(str(path), "no such file", "check the path")) from None
    if path.is_dir():
        raise JobError(Problem(str(path), "is a folder, not a job file", "name the YAML file"))
    if size > LARGEST_FILE:
        raise JobError(
            Problem(
                str(path),
                f"is {size:,} bytes; a job file has at most {LARGEST_FILE:,}",
                "is this the data file? Name the job file instead",
            )
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobError(
            Problem(str(path), f"is not UTF-8 text (byte {error.start})", "save it as UTF-8")
        ) from None
    return parse_document(text, str(path))


def parse_document(text: str, source: str) -> Document:
    """Parses YAML text; `source` names it in errors."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise JobError(
            Problem(source, "is nested far too deeply", "is this really a job file?")
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        raise JobError(
            Problem(place, f"not valid YAML: {error.problem}", "mend the syntax on that line")
        ) from None
    except yaml.YAMLError as error:
        raise JobError(Problem(source, f"not valid YAML: {error}", "mend the syntax")) from None
    reader = _Reader(source)
    if node is None:
        return Document(source, None, {})
    value = reader.read(node, ())
    if reader.problems:
        raise JobError(reader.problems)
    return Document(source, value, reader.lines)


def parse_scalar(text: str) -> Any:
    """Types a bare word as YAML 1.2 does; what is nothing else is text."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text)
    if _SPECIAL_FLOAT.match(text):
        return math.nan if "nan" in text.lower() else float(text.replace(".", "", 1))
    return text


class _Reader:
    """Walks the node graph, counting what it expands to."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self.seen = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self.seen += 1
        if self.seen > LARGEST_DOCUMENT or len(path) > DEEPEST:
            what = (
                f"more than {DEEPEST} levels deep"
                if len(path) > DEEPEST
                else f"more than {LARGEST_DOCUMENT:,} values once its aliases are expanded"
            )
            raise JobError(Problem(f"{self.source}:{line}", what, "write it out plainly"))
        if isinstance(node, yaml.MappingNode):
            self._refuse_tag(node, "tag:yaml.org,2002:map", path)
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            self._refuse_tag(node, "tag:yaml.org,2002:seq", path)
            return [self.read(child, (*path, i)) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        if node.style is None:
            implicit = _RESOLVER.resolve(yaml.ScalarNode, node.value, (True, True))
            self._refuse_tag(node, implicit, path)
            return parse_scalar(node.value)
        self._refuse_tag(node, "tag:yaml.org,2002:str", path)
        return node.value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(line, path, "a key must be a word", "write `name: value`")
                continue
            key = key_node.value
            if key == "<<":
                self._problem(line, path, "merge keys (<<) are not read", "write the values out")
                continue
            here = (*path, key)
            if key in found:
                self._problem(
                    line,
                    here,
                    f"written twice (first on line {self.lines[here]})",
                    "keep one of the two",
                )
                continue
            self.lines[here] = line
            found[key] = self.read(value_node, here)
        return found

    def _refuse_tag(self, node: yaml.Node, implicit: str, path: KeyPath) -> None:
        if node.tag != implicit:
            self._problem(
                node.start_mark.line + 1,
                path,
                f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is refused: "
                "a job file holds plain data",
                "remove the tag",
            )

    def _problem(self, line: int, path: KeyPath, fact: str, fix: str) -> None:
        self.problems.append(Problem(f"{self.source}:{line}: {dotted(path)}", fact, fix))


_RESOLVER: Any = yaml.SafeLoader("")  # untyped in PyYAML's stubs
