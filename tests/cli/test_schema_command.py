"""JSON Schemas that are printed, against JSON that commands and a run have really written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtune.cli.main import main
from shardtune.cli.schema_command import KINDS, adapter_of
from tests.hosts import ROOT
from tests.jobs import write_job

RECIPES = ("quickstart", "fsdp_full", "zero3_offload_cpu", "pipeline_1f1b", "gpu_qlora_70b")


def printed(kind: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["schema", "--of", kind]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def require_valid(kind: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the printed schema, and by the types it is made of."""
    adapter_of(kind).validate_json(text)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(text), printed(kind, capsys))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_schema_in_which_fields_are_described(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(kind, capsys)
    assert found["$schema"].startswith("https://json-schema.org/")
    described = [
        field.get("description")
        for each in [found, *found["$defs"].values()]
        for field in each.get("properties", {}).values()
    ]
    assert sum(map(bool, described)) > 5


def test_a_job_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == printed("job", capsys)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("command", ["plan", "estimate"])
@pytest.mark.parametrize("cluster", ["1xRTX4090", "2x2xA40"])
def test_what_planning_prints(
    recipe: str, command: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(ROOT / "recipes" / f"{recipe}.yaml"), "--cluster", cluster, "--json"]
    code = main([command, *words])
    text = capsys.readouterr().out
    if code == 2:  # the job can't be had on so many ranks: nothing is printed
        assert text == ""
        return
    require_valid(command, text, capsys)
    with pytest.raises(ValueError, match="extra_forbidden"):
        adapter_of(command).validate_python(json.loads(text) | {"unknown": 1})


@pytest.mark.slow
def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", str(write_job(tmp_path)), "--cluster", "2xA40", "--dry-run", "--json"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["dry_run"]["kernels"] == "eager"
    require_valid("estimate", text, capsys)


@pytest.mark.process
@pytest.mark.slow
def test_what_a_run_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"so it is, {n} times"}) for n in range(12)]
    Path("good.jsonl").write_text("\n".join(rows[:8]))
    Path("held.jsonl").write_text("\n".join(rows[8:]))
    train, held = "{path: good.jsonl, format: completion}", "{path: held.jsonl, format: completion}"
    data = f"{{train: [{train}], eval: [{held}], sequence_length: 64}}"
    evaluate = "{every: 2, samples: 1, max_new_tokens: 4}"
    job = write_job(
        tmp_path, data=data, train="{steps: 3, global_batch: 2}", evaluate=evaluate,
        launch="{processes: 2}", adapter="{type: lora}",
    )  # fmt: skip
    assert main(["train", str(job)]) == 0
    capsys.readouterr()
    require_valid("report", Path("runs/bad/report.json").read_text(), capsys)
    lines = Path("runs/bad/metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["kind"] for line in lines} == {"step", "evaluation"}
    for line in lines:
        require_valid("metrics", line, capsys)
