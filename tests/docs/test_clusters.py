"""The commands of docs/clusters.md are commands, its sections are sections of a job."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from shardtune.cli.main import main, parse
from shardtune.config.job import RayLaunch
from shardtune.config.job_file import load_job
from tests.docs.test_readme import ROOT, blocks
from tests.jobs import job_text

PAGE = ROOT / "docs" / "clusters.md"
LINES = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
MANIFEST = ROOT / "deploy" / "kuberay.yaml"


def words(line: str) -> list[str]:
    """What shardtune gets of a line: all but where its output goes, and who starts it."""
    found = shlex.split(line.partition(" > ")[0])
    return found[found.index("shardtune") + 1 :]


@pytest.mark.parametrize("line", LINES)
def test_a_command_parses(line: str) -> None:
    parse(words(line))


@pytest.mark.parametrize("line", [line for line in LINES if " slurm " in line])
def test_a_script_is_written(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(job_text(train="{steps: 2, global_batch: 64}"))
    monkeypatch.chdir(tmp_path)
    assert main(words(line)) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")


@pytest.mark.parametrize("line", [f"shardtune doctor {ROOT}/recipes/quickstart.yaml --json"])
def test_the_doctor_looks(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line.replace(f"{ROOT}/", "") in LINES
    monkeypatch.chdir(ROOT)
    assert main(words(line)) == 0, capsys.readouterr().out


@pytest.mark.parametrize("block", blocks(PAGE, "yaml"))
def test_a_section_is_one_of_a_job(block: str, tmp_path: Path) -> None:
    text = "".join(line for line in job_text().splitlines(True) if not line.startswith("launch"))
    (tmp_path / "job.yaml").write_text(text + block)
    assert isinstance(load_job(tmp_path / "job.yaml").job.launch, RayLaunch)


def test_the_manifest_starts_a_job_on_ray(tmp_path: Path) -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    command = words(manifest["spec"]["entrypoint"])
    overrides = parse(command).overrides
    (tmp_path / "job.yaml").write_text(job_text().replace("launch: {processes: 1}\n", ""))
    launch = load_job(tmp_path / "job.yaml", overrides).job.launch
    assert isinstance(launch, RayLaunch)
    assert (launch.address, launch.use_gpu) == ("auto", True)
    cluster = manifest["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods:
        (container,) = pod["template"]["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
