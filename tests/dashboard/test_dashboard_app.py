"""The dashboard's routes over run directories: whole, torn, deleted, hostile."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server comes with the extra serve")

from starlette.testclient import TestClient

from shardtune.core.runs.run_history import RunHistory, read_run_summary
from shardtune.core.runs.step_parts import PARTS
from shardtune.dashboard.dashboard_app import Dashboard
from shardtune.dashboard.live_stream import live_events
from shardtune.dashboard.metric_columns import FIGURES
from shardtune.dashboard.run_folder import RunFolder
from shardtune.web.http_guard import AccessRules
from tests.dashboard.run_folders import append_steps, write_long_metrics, write_run
from tests.reports import step_line, task_line

HERE = "http://127.0.0.1:8070"


def client(root: Path, access: AccessRules | None = None) -> TestClient:
    return TestClient(Dashboard(root, access or AccessRules()).app, base_url=HERE)


def listed(root: Path, query: str = "") -> dict[str, Any]:
    reply = client(root).get("/api/runs", params={"q": query})
    assert reply.status_code == 200
    return reply.json()


def test_states_progress_and_time_left(tmp_path: Path) -> None:
    write_run(tmp_path / "done")
    write_run(tmp_path / "deep" / "er" / "training", done=False, old=False)
    write_run(tmp_path / "killed", done=False)
    event = {"kind": "failed", "time": 1e9, "rank": 1, "step": 3, "cause": "rank 1: out of memory"}
    write_run(tmp_path / "failed", done=False, logs={"events.jsonl": json.dumps(event) + "\n"})
    (tmp_path / "no run").mkdir()
    found = {run["name"]: run for run in listed(tmp_path)["runs"]}
    assert {name: run["state"] for name, run in found.items()} == {
        "done": "done", "deep/er/training": "running", "killed": "failed", "failed": "failed",
    }  # fmt: skip
    assert next(iter(found)) == "deep/er/training"  # those that train come first
    training = found["deep/er/training"]
    assert (training["step"], training["steps"], training["seconds_left"]) == (3, 6, 1.0)
    assert training["spark"] == [3.0, 2.0, 1.0]
    assert found["failed"]["cause"] == "rank 1: out of memory"
    assert found["done"]["seconds_left"] is None


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", {"a", "b"}),
        ("lora rank=16", {"a"}),
        ("adapter=lora", {"a", "b"}),
        ("strategy=fsdp lora", {"b"}),
        ("adapter.rank=8", {"b"}),
        ("learning_rate>=2e-4", {"a"}),
        ("learning_rate<2e-4 state=done", {"b"}),
        ("loss<1.5", {"a", "b"}),
        ("rank!=16", {"b"}),
        ("model=tiny fsdp", {"b"}),
        ('name="x y"', set()),
        ('"unclosed', set()),
        ("rank=many", set()),
    ],
)
def test_runs_are_searched_by_their_jobs(tmp_path: Path, query: str, found: set[str]) -> None:
    write_run(tmp_path / "a", adapter={"type": "lora", "rank": 16})
    write_run(
        tmp_path / "b", adapter={"type": "lora", "rank": 8}, strategy={"type": "fsdp"},
        train={"learning_rate": 1e-4},
    )  # fmt: skip
    assert {run["name"] for run in listed(tmp_path, query)["runs"]} == found


def only_id(root: Path) -> str:
    (run,) = listed(root)["runs"]
    return str(run["id"])


def test_curves_grow_with_the_file_and_begin_anew_with_another(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=False, old=False)
    path, asked = f"/api/runs/{only_id(tmp_path)}/curves", client(tmp_path)

    def curve() -> tuple[list[int], list[float]]:
        loss = asked.get(path).json()["figures"]["loss"]
        return loss["steps"], loss["values"]

    assert curve() == ([1, 2, 3], [3.0, 2.0, 1.0])
    with (run / "metrics.jsonl").open("a") as file:  # killed within a line, or still writing it
        file.write('{"kind": "step", "step": 4, "lo')
    assert curve() == ([1, 2, 3], [3.0, 2.0, 1.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.5}\nno JSON\n[1]\n{"kind": "step", "step": "x"}\n')
    assert curve() == ([1, 2, 3, 4], [3.0, 2.0, 1.0, 0.5])
    append_steps(run, 4, 0.75, float("nan"))  # a resumed run takes a step again
    assert curve() == ([1, 2, 3, 4, 5], [3.0, 2.0, 1.0, 0.75, None])
    other = run / "new"
    other.write_text('{"kind": "step", "step": 1, "loss": 7}\n')
    other.rename(run / "metrics.jsonl")
    assert curve() == ([1], [7.0])


def test_scores_of_tasks_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            "".join(f"{task_line(step, 'sums', 0.25 * step).to_json()}\n" for step in (0, 3))
        )
        file.write('{"kind": "task", "step": 3}\n')
    asked, id = client(tmp_path), only_id(tmp_path)
    found = asked.get(f"/api/runs/{id}/curves").json()["tasks"]
    assert found == {"sums": {"steps": [0, 3], "tokens": [0, 24], "values": [0.0, 0.75]}}
    details = asked.get(f"/api/runs/{id}").json()
    assert details["tasks"] == {}
    drawn = {figure["name"] for figure in details["figures"]}
    assert drawn == set(FIGURES) - {"loss"}


def test_a_long_run_is_thinned_without_losing_a_spike(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_long_metrics(run, 5000, spike=2345)
    asked, id = client(tmp_path), only_id(tmp_path)
    whole = asked.get(f"/api/runs/{id}/curves", params={"points": 200}).json()
    loss = whole["figures"]["loss"]
    assert len(loss["steps"]) <= 200
    assert (loss["steps"][0], loss["steps"][-1]) == (1, 5000)
    assert loss["values"][loss["steps"].index(2345)] == 99.0
    assert loss["tokens"][-1] == 5000 * 4096
    asked_part = {"from": 2300, "to": 2400, "points": 200}
    part = asked.get(f"/api/runs/{id}/curves", params=asked_part).json()["figures"]["loss"]
    assert part["steps"] == list(range(2300, 2401))
    (row,) = listed(tmp_path)["runs"]
    assert len(row["spark"]) == 40
    assert row["step"] == 5000
    assert row["spark"][0] > 2 > row["spark"][-1]


def test_only_what_has_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", done=False)
    event = {"kind": "failed", "time": time.time(), "rank": 9, "step": 3, "cause": "died"}
    asked, read = client(tmp_path), list[Path]()

    def reading(path: Path) -> RunHistory:
        read.append(path)
        return read_run_summary(path)

    monkeypatch.setattr("shardtune.dashboard.run_row.read_run_summary", reading)

    def row() -> dict[str, Any]:
        (found,) = asked.get("/api/runs").json()["runs"]
        return found

    assert [row()["state"], row()["state"], len(read)] == ["failed", "failed", 1]
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert (row()["state"], len(read)) == ("running", 1)
    os.close(descriptor)
    assert (row()["state"], len(read)) == ("failed", 1)
    (run / "logs").mkdir()
    (run / "logs" / "events-1.jsonl").write_text(json.dumps(event) + "\n")
    assert (row()["cause"], len(read)) == ("died", 2)


def test_a_long_line_of_many_ranks_has_its_place_in_the_sparkline(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rank = dict.fromkeys((*PARTS, "positions"), 0)
    parts = {"steps": 1, "ranks": [rank] * 64}
    lines = [step_line(n, loss=float(n), parts=parts).to_json() for n in range(1, 61)]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (row,) = listed(tmp_path)["runs"]
    assert (row["step"], row["loss"]) == (60, 60.0)
    assert len(row["spark"]) == 40
    assert (row["spark"][0], row["spark"][-1]) == (1.0, 60.0)


def test_a_comparison_has_the_difference_of_the_jobs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", adapter={"type": "lora", "rank": 16})
    write_run(tmp_path / "b", adapter={"type": "lora", "rank": 8}, losses=(5.0, 4.0))
    ids = [run["id"] for run in sorted(listed(tmp_path)["runs"], key=lambda run: run["name"])]
    found = client(tmp_path).get("/api/compare", params={"run": ids}).json()
    assert [each["loss"]["values"] for each in found["runs"]] == [[3.0, 2.0, 1.0], [5.0, 4.0]]
    assert {each["key"]: each["values"] for each in found["differences"]} == {
        "adapter.rank": [16, 8], "train.steps": [3, 2],
    }  # fmt: skip
    assert client(tmp_path).get("/api/compare", params={"run": ids[:1]}).status_code == 400


def test_logs_and_stacks_of_each_rank(tmp_path: Path) -> None:
    error = {
        "message": {"extraInfo": {"py_callstack": "Traceback\nboom \ud800"}}, "time": 1.0,
        "kind": "fault", "problems": [],
    }  # fmt: skip
    log = "step 1\n" * 20_000 + "\x1b[31mred\x1b[0m 10%\r20%\rdone \x07\n"
    write_run(
        tmp_path / "run",
        logs={
            "attempt-0/rank-0.log": "first",
            "attempt-1/rank-0.log": log,
            "attempt-1/rank-1.log": "",
            "attempt-1/stack-0.txt": "Current thread 0x1 (most recent call first):\n  File x",
            "attempt-1/error-1.json": json.dumps(error),
            "attempt-1/rank-x.log": "not a rank",
        },
    )
    asked, path = client(tmp_path), f"/api/runs/{only_id(tmp_path)}"
    found = asked.get(f"{path}/output").json()
    assert [(each["attempt"], each["rank"]) for each in found["logs"]] == [(1, 0), (1, 1), (0, 0)]
    assert [(each["rank"], each["kind"]) for each in found["stacks"]] == [
        (0, "stack"),
        (1, "error"),
    ]
    assert found["stacks"][1]["text"] == "Traceback\nboom ?"
    page = asked.get(f"{path}/log", params={"attempt": 1, "rank": 0}).json()
    assert page["text"].endswith("step 1\ndone \n")
    assert len(page["text"]) <= 1 << 16 < page["bytes"]
    whole = page["text"]
    while page["begin"]:
        before = {"attempt": 1, "rank": 0, "before": page["begin"]}
        page = asked.get(f"{path}/log", params=before).json()
        whole = page["text"] + whole
    assert whole == "step 1\n" * 20_000 + "done \n"
    for wrong in ({"attempt": 7, "rank": 0}, {"attempt": 1, "rank": 9}):
        assert asked.get(f"{path}/log", params=wrong).status_code == 404
    assert asked.get(f"{path}/log", params={"attempt": "../..", "rank": 0}).status_code == 400


def test_links_are_refused(tmp_path: Path) -> None:
    root, secret = tmp_path / "runs", tmp_path / "secret"
    outside = write_run(tmp_path / "outside" / "run")
    secret.write_text("the secret\n")
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "up").symlink_to(tmp_path)
    (root / "circle").symlink_to(root / "circle")
    for name in ("metrics.jsonl", "job.yaml", "logs", "report.json"):
        linked = write_run(root / f"linked {name}")
        path = linked / name
        path.unlink(missing_ok=True)
        path.symlink_to(secret if name != "logs" else tmp_path)
    good = write_run(root / "good", logs={"attempt-0/rank-0.log": "x"})
    log = good / "logs" / "attempt-0" / "rank-0.log"
    log.unlink()
    log.symlink_to(secret)
    (good / "logs" / "attempt-1").symlink_to(tmp_path)
    found = listed(root)
    assert [run["name"] for run in found["runs"]] == ["good"]
    assert len(found["notes"]) == 6
    id = found["runs"][0]["id"]
    asked = client(root)
    assert asked.get(f"/api/runs/{id}/output").json()["logs"] == []
    assert asked.get(f"/api/runs/{id}/log?attempt=0&rank=0").status_code == 404
    # What becomes a link after it was found is no longer there.
    shutil.move(good, tmp_path / "moved")
    good.symlink_to(tmp_path / "moved")
    assert asked.get(f"/api/runs/{id}/curves").status_code == 404


def test_hostile_names_and_files_harm_nothing(tmp_path: Path) -> None:
    names = [b"<img src=x onerror=alert(1)>", b"a\nb", b"\xff\xfe", "é".encode(), b"%2e"]
    for name in names:
        write_run(tmp_path / os.fsdecode(name))
    broken = write_run(tmp_path / "broken", done=False)
    (broken / "job.yaml").write_text("a: " + "[" * 100_000)
    (broken / "metrics.jsonl").write_bytes(
        b'{"kind": "step", "step": 1e300, "loss": 1e999, "tokens": -1}\n\x00\xff\n'
        b'{"kind": "step", "step": 9' + b"9" * 5000 + b"}\n" + b"[" * 9999 + b"\n"
        b'{"kind": "step", "step": 1, "loss": 9' + b"9" * 400 + b"}\n"
        b'{"kind": "evaluation", "step": 9' + b"9" * 30 + b', "set": "code", "loss": 1}\n'
    )
    (tmp_path / "no marker").mkdir()
    (tmp_path / "no marker" / "run.json").write_text("{}")
    found = listed(tmp_path)
    assert len(found["runs"]) == len(names) + 1
    asked = client(tmp_path)
    for run in found["runs"]:
        assert asked.get(f"/api/runs/{run['id']}/curves").status_code == 200
        assert asked.get(f"/api/runs/{run['id']}").status_code == 200
    for path in ("/api/runs/..", "/api/runs/%2e%2e%2f", "/static/../x", "/static/%2e%2e/page.py"):
        assert asked.get(path).status_code == 404


@pytest.mark.slow
def test_a_run_that_is_deleted_while_it_is_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=False, old=False)
    dashboard = Dashboard(tmp_path, AccessRules())
    folder = RunFolder(tmp_path)
    (id,) = folder.runs().runs

    def summary() -> Any:
        there = folder.find(id)
        return None if there is None else dashboard._summaries.of(there)

    async def follow() -> list[dict[str, Any]]:
        heard = []
        async for event in live_events(dashboard._open.open(run), summary, lambda: False):
            heard.append(json.loads(event.removeprefix(b"data: ")))
            if len(heard) == 1:
                append_steps(run, 4, 0.5)
            elif len(heard) == 2:
                shutil.rmtree(run)
        return heard

    begun = time.monotonic()
    heard = asyncio.run(asyncio.wait_for(follow(), 20))
    assert time.monotonic() - begun < 4
    assert [each["kind"] for each in heard] == ["changed", "changed", "gone"]
    assert [each["run"]["step"] for each in heard[:2]] == [3, 4]
    assert client(tmp_path).get(f"/api/runs/{id}").status_code == 404


def test_who_may_ask(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    asked = client(tmp_path)
    assert asked.get("/api/runs", headers={"Host": "evil.example"}).status_code == 403
    assert asked.get("/api/runs", headers={"Origin": "http://evil.example"}).status_code == 403
    assert asked.get("/api/runs", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        reply = asked.request(method, "/api/runs", headers={"Content-Type": "application/json"})
        assert reply.status_code == 405
    with_key = client(tmp_path, AccessRules("secret", loopback_only=False))
    assert with_key.get("/api/runs").status_code == 401
    assert with_key.get("/", headers={"Host": "box:8070"}).status_code == 200
    allowed = {"Authorization": "Bearer secret", "Host": "box:8070"}
    assert with_key.get("/api/runs", headers=allowed).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:8070"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
    ids=lambda headers: " ".join(map(": ".join, headers.items())),
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_another_site_gets_nothing_and_changes_nothing(
    method: str, headers: dict[str, str], tmp_path: Path
) -> None:
    """Whatever its page asks a person's browser for; a socket is no way in either."""
    write_run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    asked = client(tmp_path)
    (id,) = (run["id"] for run in listed(tmp_path)["runs"])
    for path in ("/api/runs", f"/api/runs/{id}", f"/api/runs/{id}/curves", "/api/plan"):
        reply = asked.request(method, path, headers=headers, params={"key": "secret"})
        assert 400 <= reply.status_code < 500
        assert "access-control-allow-origin" not in reply.headers
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        assert asked.request(method, path, headers=headers | upgrade).status_code >= 400
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_page_loads_only_its_own_files_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    asked = client(tmp_path)
    page = asked.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in page.text
    first = asked.get("/api/runs")
    again = asked.get("/api/runs", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_plan_form(tmp_path: Path) -> None:
    asked = client(tmp_path)
    offered = asked.get("/api/plan/options").json()
    assert offered["strategies"][0] == "auto"
    assert {"fsdp", "ddp", "deepspeed"} <= set(offered["strategies"])
    form = {"model": "smollm2-135m-instruct", "cluster": "2xA40"}
    best = asked.get("/api/plan", params=form).json()
    assert best["chosen"] == best["plan"]["candidates"][0]["name"]
    assert best["picture"].startswith("<svg")
    assert "name: smollm2-135m-instruct" in best["job"]
    fsdp = asked.get("/api/plan", params=form | {"strategy": "fsdp"}).json()
    assert "type: fsdp" in fsdp["job"]
    for wrong in (
        {"model": str(tmp_path)},
        {"model": "nobody/nothing"},
        {"cluster": "/etc/passwd"},
        {"cluster": "cluster.yaml"},
        {"cluster": "9999x9999xA40"},
        {"global_batch": "-1"},
        {"global_batch": "many"},
        {"adapter": "magic"},
        {"more": "x"},
    ):
        assert asked.get("/api/plan", params=form | wrong).status_code == 400, wrong


def test_a_runs_own_page_is_shown_in_a_sandbox(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    asked, path = client(tmp_path), f"/api/runs/{only_id(tmp_path)}"
    assert asked.get(path).json()["has_page"] is False
    assert asked.get(f"{path}/report").status_code == 404
    (run / "report.html").write_text("<p>the page</p>")
    assert asked.get(path).json()["has_page"] is True
    page = asked.get(f"{path}/report")
    assert page.text == "<p>the page</p>"
    policy = page.headers["content-security-policy"].split("; ")
    assert "sandbox allow-scripts" in policy  # without allow-same-origin: it can't ask for runs
    assert "default-src 'none'" in policy
