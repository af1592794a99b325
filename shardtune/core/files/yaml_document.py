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

from shardtune.core.files.regular_file import open_regular
from shardtune.errors import JobError, Problem, did_you_mean

MAX_YAML_BYTES = 1 << 18
LARGEST_DOCUMENT = 20_000  # values, as written and once aliases are expanded
LONGEST_INTEGER = 1000  # digits; no field takes more, and Python refuses to read many more
MAX_YAML_DEPTH = 40

KeyPath = tuple[str | int, ...]

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+(?:_[0-9]+)*$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_SPECIAL_FLOAT = re.compile(r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")


@dataclass(frozen=True)
class YamlDocument:
    """A parsed file: plain dicts, lists and scalars, and the line of every key path."""

    source: str
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)


def dotted(path: KeyPath) -> str:
    """`('data', 'train', 0)` as `data.train.0`."""
    return ".".join(str(part) for part in path)


def read_document(path: Path) -> YamlDocument:
    """Reads a YAML file; raises JobError with the line for anything that isn't plain data."""
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_YAML_BYTES + 1)  # never more: it may be anything
    except FileNotFoundError:
        raise JobError(_missing(path)) from None
    except IsADirectoryError:
        fact, fix = "is a folder, not a job file", "name the YAML file"
        if (path / "config.json").is_file():
            fact = "is a model's folder, not a job file"
            fix = f"`shardtune init {path} DATA` writes a job for it"
        raise JobError(Problem(str(path), fact, fix)) from None
    except OSError as error:
        fact, fix = f"can't be read: {error.strerror}", "correct the path or its permissions"
        raise JobError(Problem(str(path), fact, fix)) from None
    if len(raw) > MAX_YAML_BYTES:
        fact = f"has more than {MAX_YAML_BYTES:,} bytes, which no job file needs"
        fix = "is this the data file? Name the job file instead"
        raise JobError(Problem(str(path), fact, fix))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        fact = f"is not UTF-8 text (byte 0x{raw[error.start]:02x})"
        raise JobError(Problem(f"{path}:{line}", fact, "save it as UTF-8")) from None
    return parse_document(text, str(path))


def _missing(path: Path) -> Problem:
    beside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    near = did_you_mean(path.name, beside)
    fix = f"did you mean {path.with_name(near)}?" if near else "correct the path"
    return Problem(str(path), "no such file", fix)


def parse_document(text: str, source: str) -> YamlDocument:
    """Parses YAML text; `source` names it in errors."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except RecursionError:
        fact = f"is nested far more than {MAX_YAML_DEPTH} levels deep"
        raise JobError(Problem(source, fact, "is this really a job file?")) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        fact = f"not valid YAML: it holds the character U+{ord(text[error.position]):04X}"
        raise JobError(Problem(f"{source}:{line}", fact, "take it out")) from None
    except _TooLarge as error:
        raise JobError(_too_large(source, error.line)) from None
    except yaml.MarkedYAMLError as error:
        raise JobError(_broken(source, error)) from None
    if node is None:
        return YamlDocument(source, None, {})
    reader = _Reader(source)
    value = reader.read(node, ())
    if reader.problems:
        raise JobError(reader.problems)
    return YamlDocument(source, value, reader.lines)


def _broken(source: str, error: yaml.MarkedYAMLError) -> Problem:
    """Where the parser gave up, and where that began if it was on another line."""
    start, end = error.context_mark, error.problem_mark
    context = error.context or ""
    if start and end and start.line != end.line:
        context += f" from line {start.line + 1} on"
    reason = ", ".join(part for part in (context, error.problem) if part)
    mark = end or start
    place = f"{source}:{mark.line + 1}" if mark else source
    return Problem(place, f"not valid YAML: {reason}", "fix the syntax")


def parse_scalar(text: str) -> Any:
    """Types a bare word as YAML 1.2 does; what is nothing else is text."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text) and len(text) <= LONGEST_INTEGER:
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text)
    if _SPECIAL_FLOAT.match(text):
        return math.nan if "nan" in text.lower() else float(text.replace(".", "", 1))
    return text


def dump_document(value: Any) -> str:
    """The YAML text of plain data, which `parse_document` reads back as it was."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around texts that this module, other than PyYAML, takes for numbers."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


class _TooLarge(Exception):
    """There are more values than any job has."""

    def __init__(self, line: int) -> None:
        self.line = line


def _too_large(source: str, line: int) -> Problem:
    fact = f"more than {LARGEST_DOCUMENT:,} values, those that aliases repeat included"
    return Problem(f"{source}:{line}", fact, "is this really a job file?")


class _Loader(yaml.SafeLoader):
    """Gives each node the tag that is written, or None: PyYAML also infers one from the value."""

    composed = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self.composed += 1
        if self.composed > LARGEST_DOCUMENT:  # what follows would take PyYAML half a minute
            raise _TooLarge(event.start_mark.line + 1)
        node = super().compose_node(parent, index)
        if node is not None and not isinstance(event, yaml.AliasEvent):
            node.tag = event.tag
        return node


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
        if self.seen > LARGEST_DOCUMENT:
            raise JobError(_too_large(self.source, line))
        if len(path) > MAX_YAML_DEPTH:
            fact = f"more than {MAX_YAML_DEPTH} levels deep"
            raise JobError(Problem(f"{self.source}:{line}", fact, "write it out plainly"))
        if isinstance(node, yaml.MappingNode):
            self._refuse_tag(node, path)
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            self._refuse_tag(node, path)
            return [self.read(child, (*path, i)) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        text = self._text(node, path)
        return parse_scalar(text) if node.style is None else text

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(line, path, "a key must be a word", "write `name: value`")
                continue
            key = self._text(key_node, path)
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

    def _text(self, node: yaml.ScalarNode, path: KeyPath) -> str:
        self._refuse_tag(node, path)
        try:
            # JSON, which is YAML, writes a character beyond U+FFFF as two escaped halves.
            text = str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            fact = "half a surrogate pair, which no text can hold"
            self._problem(node.start_mark.line + 1, path, fact, "write the character itself")
            return ""
        if "\0" in text:
            fact = "a NUL character, which no path or name can hold"
            self._problem(node.start_mark.line + 1, path, fact, "leave it out")
        return text

    def _refuse_tag(self, node: yaml.Node, path: KeyPath) -> None:
        if node.tag is not None:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            fact = f"the tag {tag} is refused: a job file holds plain data"
            self._problem(node.start_mark.line + 1, path, fact, "remove the tag")

    def _problem(self, line: int, path: KeyPath, fact: str, fix: str) -> None:
        place = f"{self.source}:{line}: {dotted(path)}".removesuffix(": ")
        self.problems.append(Problem(place, fact, fix))
