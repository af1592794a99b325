"""The doctor, alone and on two hosts with a throttled link."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardtune.cli import main as cli
from shardtune.cli.doctor_command import _job, about_links, about_nodes_to_come
from shardtune.cli.main import main
from shardtune.core.host.machine import Machine
from shardtune.core.units import GIB
from shardtune.measure import node_checks as checkup
from shardtune.measure.bandwidth import MeasuredLink, receive, send
from shardtune.measure.node_checks import Finding, NodeFacts, findings, local_facts
from shardtune.plan.this_machine import forecast_here
from tests.hosts import ROOT, two_hosts
from tests.jobs import make_job, write_job

MEGABITS = 100


def facts(**changes: Any) -> NodeFacts:
    """A good node."""
    good = NodeFacts(
        host="a", versions={"torch": "2.13.0"}, driver="", gpus=0, gpu="", cores=8,
        memory=64 * GIB, open_files=65536, shared_memory=8 * GIB, disk={"cache": 100 * GIB},
        data={"a": "1" * 64},
    )  # fmt: skip
    return replace(good, **changes)


def worse(found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.level != "good"]


def test_good_nodes_have_nothing_wrong() -> None:
    assert worse(findings([facts(), facts()], make_job(data={"train": [A]}))) == []


A = {"path": "a.jsonl", "format": "completion"}


@pytest.mark.parametrize(
    ("other", "place", "fact"),
    [
        ({"versions": {"torch": "2.11.0"}}, "torch", "2.13.0 on node 0, 2.11.0 on node 1"),
        ({"data": {"a": "2" * 64}}, "a", "111111111111 on node 0, 222222222222 on node 1"),
        ({"data": {}}, "node 1", "a.jsonl is not there"),
        ({"driver": "580.1"}, "driver", "none on node 0, 580.1 on node 1"),
        ({"open_files": 1024}, "node 1", "a process may open 1024 files"),
        ({"shared_memory": 64 << 20}, "node 1", "/dev/shm has 0.062 GiB"),
        ({"disk": {"cache": 2 * GIB}}, "node 1", "2.0 GiB are free where cache is"),
    ],
)
def test_a_node_that_differs_or_lacks_something(
    other: dict[str, Any], place: str, fact: str
) -> None:
    found = worse(findings([facts(), facts(**other)], make_job(data={"train": [A]})))
    assert any(each.place == place and fact in each.fact and each.fix for each in found), found


def test_a_large_file_that_differs_in_its_middle_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "_WHOLE", 1 << 16)
    path = tmp_path / "a.jsonl"
    content = bytearray(b"x" * (1 << 18))
    path.write_bytes(content)
    before = checkup._fingerprint(path)
    content[: 1 << 17] = b"y" * (1 << 17)
    path.write_bytes(content)
    assert checkup._fingerprint(path) != before
    assert checkup._fingerprint(tmp_path / "none") == ""


def test_the_facts_travel_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    found = local_facts(make_job(data={"train": [A]}))
    assert NodeFacts.from_json(found.to_json()) == found
    assert len(found.data["a"]) == 64


LINK = MeasuredLink(0, 1, gbps=0.2, milliseconds=0.1, clock_seconds=0.0)


def test_doctor_and_estimate_agree_on_what_leaves_a_node() -> None:
    """FSDP over four ranks on two nodes: a ring leaves each node once, and carries 3/4 of the
    weights twice in 16 bits and of the gradients once in 32."""
    job = make_job(
        strategy={"type": "fsdp"},
        launch={"processes": 4},
        train={"micro_batch": 1, "global_batch": 4},
    )
    found = about_links([LINK], job, 2, None)[-1]
    predicted = forecast_here(job, Machine.here(), 2)
    assert predicted is not None
    bits = predicted.traffic().leaves_node * GIB * 8
    assert f"about {bits / 1e9:.3g} Gbit leave each node" in found.fact
    assert f"{bits / 0.2e9:.3g} s at 0.2 Gbit/s" in found.fact
    trained = predicted.summary().parameters.trained
    assert bits == pytest.approx(0.75 * (2 * 16 + 32) * trained, rel=0.3)


def test_hybrid_sharding_does_not_gather_between_nodes() -> None:
    hybrid = {"type": "fsdp", "sharding": "hybrid", "replicas": 2}
    for strategy in (hybrid, {"type": "ddp"}):
        job = make_job(strategy=strategy)
        assert not job.strategy.capabilities.gathers_from_all_nodes


def test_a_link_slower_than_expected_and_a_wrong_clock_are_said() -> None:
    found = worse(about_links([MeasuredLink(0, 1, 60.0, 0.1, 7.5)], None, 2, 100.0))
    assert [each.place for each in found] == ["node 0 -> node 1"] * 2
    assert "60 Gbit/s over TCP" in found[0].fact
    assert "100 Gbit/s were expected" in found[0].fact
    assert "7.5 s apart" in found[1].fact
    assert worse(about_links([MeasuredLink(0, 1, 90.0, 0.1, 0.5)], None, 2, 100.0)) == []


@pytest.mark.slow
def test_a_link_is_measured_in_one_direction() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = threading.Thread(target=receive, args=(listener,))
        far.start()
        link = send(0, 1, *listener.getsockname())
        far.join()
    assert link.gbps > 0.05
    assert abs(link.clock_seconds) < 0.1


def test_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_job(tmp_path)
    assert main(["doctor", str(path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert "good.jsonl is not there" in [each["fact"] for each in told["findings"]]
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    assert main(["doctor", str(path)]) == 0
    assert "0 bad" in capsys.readouterr().out
    assert main(["doctor"]) == 0


def test_nodes_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--nodes` alone: what the job would send, and which link it takes; nothing is measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n' * 8)
    path = write_job(tmp_path, strategy="{type: fsdp}", train="{steps: 2, global_batch: 4}")
    words = ["doctor", str(path), "launch.processes=2", "--json", "--nodes", "2"]
    told = {}
    for expected in ([], ["--expected", "0.001"]):
        assert main([*words, *expected]) == 0
        found = json.loads(capsys.readouterr().out)["findings"]
        told.update({(each["place"], len(expected)): each for each in found})
    sent = r"about ([\d.e+-]+) Gbit leave each node in a step \(fsdp on 2 nodes\)"
    words_of = rf"{sent}, which computes for about ([\d.e+-]+) s: ([\d.e+-]+) Gbit/s keep up"
    said = re.match(words_of, told["job", 0]["fact"])
    assert said is not None
    bits, seconds, enough = map(float, said.groups())
    assert bits / seconds == pytest.approx(enough, rel=0.02)
    assert told["job", 2]["level"] == "warning"
    assert "the network limits the run" in told["job", 2]["fact"]
    assert "--node-rank N --head HOST:29400" in told["links", 0]["fix"]
    main([*words, "data.sequence_length=1000000"])
    found = json.loads(capsys.readouterr().out)["findings"]
    (why,) = (each for each in found if each["place"] == "job")
    assert why["fact"].startswith("what it sends can't be forecast: data.sequence_length: 1000000")
    assert why["fix"].startswith("set data.sequence_length to at most")
    assert main(["doctor", "--nodes", "0"]) == 2
    assert "--nodes: is 0" in capsys.readouterr().err


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.process  # DeepSpeed asks the compiler for libaio
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_strategy_says_what_it_sends(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two nodes, from the strategy's own declaration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = cli.parse(["doctor", str(recipe)])
    job, _ = _job(arguments, nodes=2)
    assert job is not None
    job = job.model_copy(update={"launch": job.launch.with_processes(4)})
    *_, found = about_links([LINK], job, 2, None)
    before, _ = about_nodes_to_come(job, 2, None)
    for each in (found, before):
        assert each.place == "job"
        assert re.search(
            r"about [\d.,]+ Gbit leave each node in a step|can't be forecast", each.fact
        )
    if job.strategy.type != "auto":
        assert "Gbit leave each node" in found.fact or job.strategy.mesh(4).size != 4, found


@pytest.mark.slow
def test_two_nodes_on_one_machine(tmp_path: Path) -> None:
    """Both ends of the command, and a strategy that gathers nothing: DDP."""
    (tmp_path / "good.jsonl").write_text('{"text": "so it is"}\n')
    job = write_job(tmp_path, strategy="{type: ddp}", train="{steps: 2, global_batch: 4}")
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["-m", "shardtune", "doctor", str(job), "launch.processes=2", "--json", "--nodes", "2"]
    words += ["--head", f"127.0.0.2:{port}", "--node-rank"]
    processes = [
        subprocess.Popen([sys.executable, *words, str(number)], cwd=tmp_path, text=True,
                         stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for number in range(2)
    ]  # fmt: skip
    texts = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    told = json.loads(texts[0])
    assert [len(told[key]) for key in ("nodes", "links")] == [2, 2]
    assert any("leave each node in a step (ddp on 2 nodes)" in f["fact"] for f in told["findings"])


@pytest.mark.slow
def test_two_hosts_with_a_throttled_link(tmp_path: Path) -> None:
    """What the link carries is what `tc` lets through, less the headers of its packets."""
    lines = [json.dumps({"text": "so it is"}) + "\n"] * 8
    (tmp_path / "good.jsonl").write_text("".join(lines))
    job = write_job(tmp_path, strategy="{type: fsdp}", train="{steps: 2, global_batch: 4}")
    with two_hosts() as hosts:
        for host in hosts:
            host.throttle(MEGABITS)
        words = ["doctor", str(job), "launch.processes=2", "--json", "--expected", "1"]
        words += ["--nodes", "2", "--head", f"{hosts[0].address}:29400", "--node-rank"]
        processes = [
            host.start("-m", "shardtune", *words, str(number), cwd=tmp_path)
            for number, host in enumerate(hosts)
        ]
        texts = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "c10d" not in "".join(texts)  # that no DNS knows these hosts is no news
    told = json.loads(texts[0][texts[0].index("{\n") :])
    assert len(told["links"]) == 2
    for link in told["links"]:
        assert link["gbps"] * 1000 == pytest.approx(MEGABITS, rel=0.15)
    sentences = [each["fact"] for each in told["findings"]]
    assert any("1 Gbit/s were expected" in each for each in sentences)
    assert any("leave each node in a step (fsdp on 2 nodes" in each for each in sentences)
    assert any("all 2 nodes reach node 0" in each for each in sentences)
