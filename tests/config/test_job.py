"""The job's own types, and the schema that editors read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from shardtune.checkpoint.run_dir import RunDir
from shardtune.config.job import Job, Source
from shardtune.config.job_file import load_job
from tests.jobs import make_environment, make_job

ROOT = Path(__file__).resolve().parents[2]

JOBS = {
    "smallest": make_job(),
    "quickstart": load_job(ROOT / "recipes" / "quickstart.yaml").job,
    "everything": make_job(
        model={"name": "no", "revision": "1234567", "stop_tokens": ["<|im_end|>", "null", "1:30"]},
        adapter={"type": "lora", "rank": 4, "alpha": 0.5, "dropout": 0.1, "targets": ["q_proj"]},
        data={
            "train": [
                {"path": "ä ö.jsonl", "format": "chat", "weight": 1e-3, "name": "true"},
                {"path": "b", "format": "instruction", "columns": {"input": "yes"}},
            ],
            "eval": [{"path": "~", "format": "pretokenized", "overflow": "split"}],
            "sequence_length": 4096,
            "packing": False,
            "bad_rows": "skip",
            "workers": 3,
        },
        train={
            "epochs": 1e20,
            "learning_rate": 1e-10,
            "max_grad_norm": None,
            "seed": 2**63 - 1,
            "optimizer": {"type": "sgd", "momentum": 0.9},
        },
        evaluate={"every": 0, "samples": 0},
        launch={"processes": 8, "threads": "auto"},
        save={"directory": "a: b # c", "every": 7},
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_survives_its_own_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    dumped = yaml.safe_dump(JOBS[name].model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    path.write_text(dumped, encoding="utf-8")
    assert load_job(path).job == JOBS[name]


@pytest.mark.parametrize("name", [*JOBS, "like numbers"])
def test_a_job_survives_the_run_directory(name: str, tmp_path: Path) -> None:
    sources = [{"path": "08.jsonl", "format": "chat", "name": "08"}]
    job = JOBS.get(name) or make_job(model={"name": "1e5"}, data={"train": sources})
    RunDir(tmp_path).begin(job, make_environment())
    assert load_job(tmp_path / "job.yaml").job == job


def test_a_job_is_frozen() -> None:
    job = make_job()
    with pytest.raises(ValidationError, match="frozen"):
        job.train.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        job.train = job.train


def test_nothing_is_turned_into_another_type() -> None:
    for section, values in {
        "train": {"steps": "10"},
        "data": {"packing": 1},
        "model": {"name": 3},
        "save": {"every": 1.0},
        "launch": {"processes": True},
    }.items():
        with pytest.raises(ValidationError):
            make_job(**{section: values})


def test_a_whole_number_is_a_number() -> None:
    assert make_job(train={"learning_rate": 1}).train.learning_rate == 1.0


def test_the_seed_fits_what_torch_takes() -> None:
    with pytest.raises(ValidationError, match="less than 9223372036854775808"):
        make_job(train={"seed": 2**63})


# The schema --------------------------------------------------------------------------------------

# The keywords of JSON Schema 2020-12 that pydantic writes, and what each one takes.
NUMBER = (int, float)
KEYWORDS: dict[str, type | tuple[type, ...]] = {
    "$defs": dict, "$ref": str, "additionalProperties": (bool, dict), "anyOf": list,
    "const": object, "default": object, "description": str, "discriminator": dict, "enum": list,
    "exclusiveMaximum": NUMBER, "exclusiveMinimum": NUMBER, "items": dict, "maxItems": int,
    "maxLength": int, "maximum": NUMBER, "minItems": int, "minLength": int, "minimum": NUMBER,
    "oneOf": list, "pattern": str, "prefixItems": list, "properties": dict, "required": list,
    "title": str, "type": str,
}  # fmt: skip
TYPES = {"null", "boolean", "object", "array", "number", "string", "integer"}


def schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all those within it."""
    yield schema
    for keyword, value in schema.items():
        if keyword in ("$defs", "properties"):
            inner = list(value.values())
        elif keyword in ("anyOf", "oneOf", "prefixItems"):
            inner = value
        elif keyword in ("items", "additionalProperties") and isinstance(value, dict):
            inner = [value]
        else:
            inner = []
        for each in inner:
            yield from schemas(each)


def test_the_schema_is_a_json_schema() -> None:
    whole = Job.model_json_schema()
    assert json.loads(json.dumps(whole)) == whole
    for schema in schemas(whole):
        assert isinstance(schema, dict)
        for keyword, value in schema.items():
            assert isinstance(value, KEYWORDS[keyword]), (keyword, value)
        assert schema.get("type", "string") in TYPES
        assert set(schema.get("required", [])) <= set(schema.get("properties", {}))
        if "$ref" in schema:
            assert schema["$ref"].removeprefix("#/$defs/") in whole["$defs"]
        for choice in ("anyOf", "oneOf", "enum", "prefixItems"):
            assert schema.get(choice, ["at least one"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("sections", "good"),
    [
        ({}, True),
        ({"train": {"optimizer": {"weight_decay": 0.1}}}, True),
        ({"train": {"optimizer": {"type": "sgd", "momentum": 0.5}}}, True),
        ({"train": {"optimizer": {"momentum": 0.5}}}, False),
        ({"train": {"optimizer": "adamw"}}, False),
        ({"strategy": "auto"}, True),
        ({"strategy": "fsdp"}, False),
        ({"launch": {"processes": 2}}, True),
        ({"launch": {"type": "ray", "workers": 2}}, True),
        ({"launch": {"workers": 2}}, False),
        ({"backend": {"type": "ray", "trainer": {"strategy": "auto"}}}, True),
    ],
)
def test_an_editor_and_the_loader_say_the_same(sections: dict[str, Any], good: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    data = {"train": [{"path": "a.jsonl", "format": "chat"}]}
    document = {"model": {"name": "tiny"}, "data": data, **sections}
    with nullcontext() if good else pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, Job.model_json_schema())
    with nullcontext() if good else pytest.raises(ValidationError):
        Job.model_validate_json(json.dumps(document))


def test_every_section_is_closed() -> None:
    sections = [schema for schema in schemas(Job.model_json_schema()) if "properties" in schema]
    assert len(sections) > 10
    assert all(section["additionalProperties"] is False for section in sections)


def test_every_field_and_section_says_what_it_is() -> None:
    whole = Job.model_json_schema()
    silent = []
    for schema in schemas(whole):
        if "properties" not in schema:
            continue
        silent += [] if schema.get("description") else [schema["title"]]
        for name, field in schema["properties"].items():
            # A field that is a section is described by the section, which an editor shows.
            section = whole["$defs"].get(field.get("$ref", "").removeprefix("#/$defs/"), {})
            if name != "type" and not (field.get("description") or section.get("description")):
                silent.append(f"{schema['title']}.{name}")
    assert silent == []


@pytest.mark.parametrize(
    ("path", "given", "label"),
    [
        ("data/code_train.v2.jsonl", "auto", "code_train.v2"),
        ("org/some-set", "auto", "some-set"),
        ("data/ünder scores.json", "auto", "nder-scores"),
        ("...", "auto", "data"),
        ("x.json", "mine", "mine"),
    ],
)
def test_a_data_set_is_called_as_its_file(path: str, given: str, label: str) -> None:
    assert Source(path=path, format="chat", name=given).label == label
