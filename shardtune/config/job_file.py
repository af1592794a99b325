"""From a YAML file and `key=value` overrides to a Job, with every mistake named at its line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardtune.config.foreign_keys import (
    NEEDLESS_KEYS,
    OTHERS_KEYS,
    OTHERS_PATHS,
    OTHERS_VALUES,
)
from shardtune.config.job import Job
from shardtune.config.job_keys import all_keys, sections_at, type_of, types_at, words_at
from shardtune.config.ludwig import translated
from shardtune.config.override_effects import apply_override_effects
from shardtune.config.published_words import understand
from shardtune.core.files.yaml_document import KeyPath, dotted, parse_document, read_document
from shardtune.errors import JobError, Problem, did_you_mean, either

COMMAND_LINE = "command line"
OTHERS_AT_ONCE = 3  # keys of another tool from which a file counts as that tool's
EARLIER = f"{COMMAND_LINE}, earlier"
"""Of what was said for one `type`, before another word said another."""


@dataclass(frozen=True)
class LoadedJob:
    """A job, and where each of its values was written: `job.yaml:7` or `command line`."""

    job: Job
    origins: Mapping[KeyPath, str]
    understood: Mapping[KeyPath, str] = field(default_factory=dict)
    """Values that were written in the words of other tools, or that an override has made void:
    which, and where."""

    def origin(self, path: KeyPath) -> str:
        """Where a value was written; `default` if nowhere."""
        return self.origins.get(path, "default")

    def place(self, path: KeyPath) -> str:
        """Where to look for a value in order to change it."""
        return _place(path, self.origins)


def load_job(path: Path, overrides: Sequence[str] = ()) -> LoadedJob:
    """Reads, overrides and validates; raises JobError with every problem found."""
    document = read_document(path)
    value = document.value
    if not isinstance(value, dict):
        what = "is empty" if value is None else "is not a mapping of sections"
        fix = "a job has at least `model:` and `data:`; see `shardtune schema`"
        raise JobError(Problem(str(path), what, fix))
    origins = {key: f"{path}:{line}" for key, line in document.lines.items()}
    _override(value, origins, overrides)
    understood = understand(value, origins, COMMAND_LINE)
    understood |= apply_override_effects(value, origins, COMMAND_LINE)
    try:
        job = Job.model_validate_json(json.dumps(value))
    except ValidationError as error:
        problems = _translate(error, value, origins)
        raise JobError([*_another_tools(path, value), *problems]) from None
    return LoadedJob(*translated(job, origins), understood)


def leaves(value: Any, path: KeyPath = ()) -> Iterable[tuple[KeyPath, Any]]:
    """Every value of a dumped job with its path; a list of plain values counts as one value."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for index, child in enumerate(value):
            yield from leaves(child, (*path, index))
    else:
        yield path, value


def _place(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """The place of the path, or of the nearest section around it that was written."""
    nearest = next(path[:end] for end in range(len(path), -1, -1) if path[:end] in origins)
    return f"{origins[nearest]}: {dotted(path)}".removesuffix(": ")


# Overrides --------------------------------------------------------------------------------------


def _override(value: Any, origins: dict[KeyPath, str], overrides: Sequence[str]) -> None:
    """Sets each `dotted.key=value` in `value`; what stands behind the sign is read as YAML."""
    problems: list[Problem] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not all(key.split(".")):
            fact = f"{text!r} is not key=value"
            problems.append(Problem(COMMAND_LINE, fact, "write train.steps=10"))
            continue
        try:
            new = parse_document(raw, key)
            _of_another_type(value, origins, key, new.value)
            path = _set(value, key, new.value)
        except JobError as error:
            place = f"{COMMAND_LINE}: {key}"
            problems += [Problem(place, each.fact, each.fix) for each in error.problems]
            continue
        for old in [old for old in origins if old[: len(path)] == path]:
            del origins[old]
        for end in range(1, len(path)):
            origins.setdefault(path[:end], COMMAND_LINE)
        origins |= {(*path, *inner): COMMAND_LINE for inner in (*new.lines, ())}
    if problems:
        raise JobError(problems)


def _of_another_type(value: Any, origins: dict[KeyPath, str], key: str, new: Any) -> None:
    """Where one word gives a `type` and a later one another, what came between them is of the first
    alone: so a fix can be pasted behind any command."""
    path: KeyPath = tuple(key.split("."))
    if path[-1] != "type" or origins.get(path) != COMMAND_LINE or _at(value, path) == new:
        return
    for old, origin in origins.items():
        if old[:-1] == path[:-1] and origin == COMMAND_LINE:
            origins[old] = EARLIER


def _set(root: Any, key: str, new: Any) -> KeyPath:
    """Puts `new` at the dotted key, into sections that are made on the way; returns its path."""
    path: KeyPath = ()
    here = root
    *parents, last = key.split(".")
    for name in parents:
        part = _part(here, name, path)
        if not isinstance(here, list) and not isinstance(here.get(part), (dict, list)):
            here[part] = {}
        here = here[part]
        path = (*path, part)
    part = _part(here, last, path)
    here[part] = new
    return (*path, part)


def _part(here: Any, name: str, path: KeyPath) -> str | int:
    """What `name` is called in a section or a list; raises JobError if it can't be there."""
    if isinstance(here, dict):
        if name.isdigit():
            fact, fix = f"{dotted(path)} is no list in this job", f"set {dotted(path)} as a whole"
            raise JobError(Problem("", fact, fix))
        return name
    if not isinstance(here, list):
        fact = f"{dotted(path)} is {_show(here)}, not a section"
        raise JobError(Problem("", fact, f"set {dotted(path)} as a whole"))
    places = [str(place) for place in range(len(here))]
    if name in places:
        return places.index(name)
    fix = f"set {dotted(path)} as a whole"
    if here:
        fix = f"use a number from 0 to {len(here) - 1}, or {fix}"
    fact = f"{dotted(path)} is a list of {len(here)}; {name!r} is not one of them"
    raise JobError(Problem("", fact, fix))


# From pydantic's errors to ours -----------------------------------------------------------------


def _translate(error: ValidationError, value: Any, origins: Mapping[KeyPath, str]) -> list[Problem]:
    """One problem per key. A key of several allowed types gives several errors; they are joined."""
    by_path: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        by_path.setdefault(_real_path(item, value), []).append(item)
    problems = []
    for path, items in by_path.items():
        if any(other[: len(path)] == path and other != path for other in by_path):
            continue  # a list whose items are wrong is also called too short, or no word
        fact, fix = _describe(path, items, value)
        problems.append(Problem(_place(path, origins), fact, fix))
    return problems


def _real_path(item: Any, value: Any) -> KeyPath:
    """The error's path without the names that pydantic adds for members of a union."""
    path: list[str | int] = []
    here = value
    for part in item["loc"]:
        if (isinstance(here, dict) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        ):
            path.append(part)
            here = here[part]
    if item["type"] == "missing" and isinstance(item["loc"][-1], str):
        path.append(item["loc"][-1])
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path.append("type")
    return tuple(path)


_SOURCES = ("data", "train"), ("data", "eval")
_DIVIDES: dict[KeyPath, str] = {
    ("strategy", "degree"): "how many ranks divide each layer",
    ("strategy", "stages"): "over how many ranks the layers are divided",
}

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a section of its own (`key: value` lines)",
    "missing": "a longer list",  # elsewhere than in a list it is told in another way
    "model_type": "a section of its own (`key: value` lines)",
    "model_attributes_type": "a section of its own (`key: value` lines)",
    "string_too_short": "text that isn't empty",
}


def _alternatives(item: Any) -> list[str]:
    """What a value may be by one of its key's types: the words of a choice, or a description."""
    if item["type"] == "literal_error":
        return str(item["ctx"]["expected"]).replace(" or ", ", ").split(", ")
    return [_wanted(item)]


def _wanted(item: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "greater_than":
        return f"more than {context['gt']}"
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    if kind == "less_than_equal":
        return f"at most {context['le']:,}"
    if kind == "less_than":
        return f"less than {context['lt']}"
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']}"
    if kind == "string_pattern_mismatch":
        return "a short name of letters, digits, '.', '_' and '-'"
    return _WANTED.get(kind, str(item["msg"]))


def _describe(path: KeyPath, items: list[Any], value: Any) -> tuple[str, str]:
    first = items[0]["type"]
    key = str(path[-1]) if path else ""
    if first == "extra_forbidden":
        return _unknown_key(path, value)
    if first == "missing" and isinstance(items[0]["loc"][-1], str):
        if path in _DIVIDES:
            return "is missing", _division_fix(path, value)
        if path == ("model",) and (name := _model_elsewhere(value)):
            return "is missing", f"add `model: {{name: {name}}}`"
        if choice := words_at(path):
            return "is missing", f"add `{key}:` with one of {', '.join(map(repr, choice))}"
        return "is missing", f"add `{key}:`; `shardtune schema` says what it takes"
    if first in ("union_tag_invalid", "union_tag_not_found"):
        expected = items[0].get("ctx", {}).get("expected_tags")
        expected = expected or ", ".join(sorted(types_at(path[:-1])))
        given = items[0].get("ctx", {}).get("tag")
        words = [word.strip(" '") for word in expected.split(",")]
        if given is None:
            return "is missing", f"add `type:` with one of {expected}"
        if given in OTHERS_VALUES:
            return f"is {given!r}", OTHERS_VALUES[given]
        near = did_you_mean(given, words)
        return f"is {given!r}", f"did you mean {near!r}?" if near else f"write one of {expected}"
    wanted = either(list(dict.fromkeys(each for item in items for each in _alternatives(item))))
    given = _at(value, path)
    fix = f"give {wanted}"
    if path == ("model",) and isinstance(given, str):
        return f"is {_show(given)}; it must be {wanted}", f"write model: {{name: {given}}}"
    if path[:2] in _SOURCES and len(path) <= 3 and isinstance(given, str):
        source = f"{{path: {given}, format: instruction}}"
        source = f"[{source}]" if len(path) == 2 else source
        return f"is {_show(given)}; it must be {wanted}", f"write {source}, with its own format"
    if wanted == "text" and isinstance(given, (int, float)):
        fix = "put it in quotes"
    if isinstance(given, str):
        literals = [item for item in items if item["type"] == "literal_error"]
        words = [word.strip("'") for item in literals for word in _alternatives(item)]
        near = did_you_mean(given, words)
        fix = f"did you mean {near!r}?" if near else fix
        fix = OTHERS_VALUES.get(given, fix)
        if given in types_at(path):
            key = dotted((*path, "type"))
            fix = f"write {{type: {given}}}, or {key}={given} on the command line"
    return f"is {_show(given)}; it must be {wanted}", fix


def _model_elsewhere(value: Any) -> str:
    """The model that a job names as another tool would."""
    words = ("base_model", "model_name_or_path", "model_name")
    return next((value[word] for word in words if isinstance(value.get(word), str)), "")


def _another_tools(path: Path, value: dict[str, Any]) -> list[Problem]:
    """What is told first of a file that is another tool's job as a whole."""
    known = [key for key in value if key in OTHERS_KEYS or key in NEEDLESS_KEYS]
    if len(known) < OTHERS_AT_ONCE or {"model", "data"} & {*_sections(value)}:
        return []
    model = _model_elsewhere(value) or "MODEL"
    fact = f"is another tool's file: {len(known)} of its {len(value)} keys have other names or "
    fact += "places here, listed below"
    fix = f"`shardtune init {model} DATA` writes a whole job to put the values into"
    return [Problem(str(path), fact, fix)]


def _sections(value: dict[str, Any]) -> list[str]:
    return [key for key, inner in value.items() if isinstance(inner, dict)]


def _division_fix(path: KeyPath, value: Any) -> str:
    """Over how many ranks: all of them, where the job says how many there are."""
    key, launch = path[-1], value.get("launch")
    ranks = launch.get("processes") if isinstance(launch, dict) else None
    if type(ranks) is int and ranks > 1:
        return f"add `{key}: {ranks}`, all of launch.processes, or a divisor of it"
    return f"add `{key}: 2` or more: {_DIVIDES[path]}, a divisor of all there are"


def _show(given: Any) -> str:
    if isinstance(given, dict):
        return "a section"
    if isinstance(given, list):
        return f"a list of {len(given)}" if given else "an empty list"
    if given is None:
        return "empty"
    text = json.dumps(given, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _at(value: Any, path: KeyPath) -> Any:
    for part in path:
        value = value[part]
    return value


def _unknown_key(path: KeyPath, value: Any) -> tuple[str, str]:
    key = str(path[-1])
    known = _keys_at(path[:-1], value)
    near = did_you_mean(key, known)
    types = [type_of(model) for model in sections_at(path[:-1]) if key in model.model_fields]
    if types:
        return "unknown key here", f"it belongs to `type: {types[0]}`; set that, or remove the key"
    if (lead := OTHERS_PATHS.get(dotted(tuple(p for p in path if isinstance(p, str))))) is not None:
        return "unknown key", lead
    if key in OTHERS_KEYS and path[0] != "evaluate":  # which has lengths of its own
        return "unknown key", OTHERS_KEYS[key]
    if path == (key,) and key in NEEDLESS_KEYS:
        return "unknown key", f"leave it out: {NEEDLESS_KEYS[key]}"
    if near:
        return "unknown key", f"did you mean {near!r}?"
    keys = (other for other in all_keys() if other[0] != "backend")  # others' words for ours
    elsewhere = list(dict.fromkeys(dotted(other) for other in keys if other[-1] == key))
    if elsewhere and key != "type":  # which many have
        return "unknown key here", f"did you mean {' or '.join(map(repr, elsewhere[:2]))}?"
    return "unknown key", f"known here: {', '.join(known)}"


def _keys_at(path: KeyPath, value: Any) -> list[str]:
    section = _at(value, path)
    chosen = section.get("type") if isinstance(section, dict) else None
    models = sections_at(path)
    if chosen is not None:
        models = [model for model in models if type_of(model) in (None, chosen)]
    return list(dict.fromkeys(key for model in models for key in model.model_fields))
