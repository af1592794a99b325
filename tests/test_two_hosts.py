"""Whole runs on two hosts, by our own command and by torchrun: the losses of one process."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardtune.cli.main import main
from tests.hosts import Host, two_hosts

PORT = 29400
JOB = """\
model: {name: tiny}
data: {train: [{path: tales.jsonl, format: completion}], sequence_length: 32}
train: {steps: 4, global_batch: 8, precision: fp32, learning_rate: 0.1, optimizer: {type: sgd}}
evaluate: {samples: 0}
launch: {processes: 2, threads: 1}
"""
HYBRID = "strategy={type: fsdp, sharding: hybrid, replicas: 2}"
PIPELINE = "strategy={type: pipeline, stages: 2}"  # ranks 0, 1 on one host, 2, 3 on the other
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}"}) + "\n" for n in range(48)]
    (folder / "tales.jsonl").write_text("".join(lines))
    (folder / "job.yaml").write_text(JOB)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    """The losses of one process on one host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "job.yaml", "launch.processes=1", "save.directory=alone"]) == 0
    return losses(folder / "alone")


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "step"]


def listening(host: Host) -> set[str]:
    """The addresses that somebody listens on, on a host."""
    command = ["ip", "netns", "exec", host.namespace, "ss", "-Hltn"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3].rpartition(":")[0].strip("[]") for line in lines}


def finished(processes: list[subprocess.Popen[str]], hosts: tuple[Host, Host]) -> list[set[str]]:
    """Waits for the end; returns who was listened to on each host meanwhile."""
    heard: list[set[str]] = [set(), set()]
    while any(process.poll() is None for process in processes):
        for number, host in enumerate(hosts):
            heard[number] |= listening(host)
        time.sleep(0.5)
    texts = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    return heard


def by_us(
    hosts: tuple[Host, Host], folder: Path, *words: str, environment: dict[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    command = ["-m", "shardtune", "train", "job.yaml", *words, "--nodes", "2"]
    head = ["--head", f"{hosts[0].address}:{PORT}", "--node-rank"]
    return [
        host.start(*command, *head, str(number), cwd=folder, environment=environment)
        for number, host in enumerate(hosts)
    ]


def by_torchrun(hosts: tuple[Host, Host], folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    run = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    run += ["--master-addr", hosts[0].address, "--master-port", str(PORT + 1), "--node-rank"]
    command = ["-m", "shardtune", "train", "job.yaml", *words]
    return [
        host.start(*run, str(number), *command, cwd=folder) for number, host in enumerate(hosts)
    ]


@pytest.mark.long
def test_hybrid_sharding_by_our_command(
    hosts: tuple[Host, Host], folder: Path, alone: list[float]
) -> None:
    heard = finished(by_us(hosts, folder, HYBRID, "save.directory=hybrid"), hosts)
    assert losses(folder / "hybrid") == pytest.approx(alone, abs=1e-5)
    report = json.loads((folder / "hybrid" / "report.json").read_text())
    assert report["ranks"] == 4
    # Only on the interface that was named; IPv4 addresses may be written as IPv6 ones.
    for host, addresses in zip(hosts, heard, strict=True):
        assert {each.removeprefix("::ffff:") for each in addresses} == {host.address}
    # Each host has prepared the data once, in a cache of its own.
    for host in hosts:
        kept = list((folder / f"cache-{host.interface}" / "shardtune" / "data").glob("[!.]*"))
        assert len(kept) == 1


@pytest.mark.long
def test_a_pipeline_across_hosts_by_our_command(
    hosts: tuple[Host, Host], folder: Path, alone: list[float]
) -> None:
    """With one cache for both hosts: whoever comes first prepares."""
    shared = {"XDG_CACHE_HOME": str(folder / "one-cache")}
    words = (PIPELINE, "save.directory=stages")
    finished(by_us(hosts, folder, *words, environment=shared), hosts)
    assert len(list((folder / "one-cache" / "shardtune" / "data").glob("[!.]*"))) == 1
    assert losses(folder / "stages") == pytest.approx(alone, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [HYBRID, PIPELINE], ids=["hybrid", "pipeline"])
def test_torchrun(
    hosts: tuple[Host, Host], folder: Path, alone: list[float], strategy: str
) -> None:
    name = f"torchrun-{strategy.partition('type: ')[2][:4]}"
    finished(by_torchrun(hosts, folder, strategy, f"save.directory={name}"), hosts)
    assert losses(folder / name) == pytest.approx(alone, abs=1e-5)
