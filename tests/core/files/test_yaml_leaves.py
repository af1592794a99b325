"""The fast reader of jobs that runs have written: equal to the strict one, and safe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtune.core.files.yaml_document import dotted, dump_document, parse_document
from shardtune.core.files.yaml_leaves import yaml_leaves
from tests.synthetic import make_job

JOBS = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> dict[str, Any]:
    if not value or not isinstance(value, dict | list):
        return {dotted(path): None if isinstance(value, dict | list) else value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: found for at, each in items for key, found in leaves(each, (*path, at)).items()}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_recipe_is_read_as_the_strict_reader_does(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml_leaves(text) == leaves(parse_document(text, "job.yaml").value)


def test_a_job_that_a_run_wrote() -> None:
    text = dump_document(make_job("runs/16").model_dump(mode="json"))
    found = yaml_leaves(text)
    assert found == leaves(parse_document(text, "job.yaml").value)
    assert found["save.directory"] == "runs/16"
    assert found["data.train.0.weight"] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 200_000,  # libyaml's own composer ends the process here
        "{a: " * 50_000,
        "a: [&x b, *x]",
        "? [a]\n: b",
        "a: [1",
        "just words",
        "- 1",
        "a: " + "x" * 300_000,
        "a: [" + "1," * 100_000 + "]",
    ],
    ids=lambda text: text[:12],
)
def test_what_no_run_writes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(has|is) "):
        yaml_leaves(text)
