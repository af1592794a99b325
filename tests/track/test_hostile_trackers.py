"""Trackers that fail in every way, beside the same run without any: it is the same run."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.runs import lines
from tests.track.hostile_site import install_hostile
from tests.track.read_back import csv_points
from tests.track.tracked_runs import points

# A tracker runs where a core is idle: on two busy ones some never come to do their harm.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
KEY = "a-key-that-nobody-may-see"
JOB = """\
model: {name: tiny}
data: {train: [{path: tales.jsonl, format: completion}], eval: {share: 0.2}, sequence_length: 32}
train: {steps: 40, global_batch: 4, precision: fp32, learning_rate: 0.1, schedule: constant}
evaluate: {samples: 1, max_new_tokens: 4, every: 20}
launch: {processes: 1, threads: 1}
save: {directory: run, every: 20}
"""
WAYS = ("refuse", "raise", "hang", "spin", "fill", "chatter", "kill")
ENDLESS = ("hang", "spin", "chatter")
HARMFUL = ", ".join(
    f"{{type: hostile, how: {way}, disk_mib: 4, finish_seconds: {3 if way in ENDLESS else 60}}}"
    for way in WAYS
)
GOOD = "{type: csv, finish_seconds: 60}"
LABELS = {way: "hostile" + f"-{number}" * (number > 1) for number, way in enumerate(WAYS, 1)}


class Place:
    """A folder with a job, its data, and a package of trackers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        texts = ({"text": f"{n} times {n} is {n * n}"} for n in range(40))
        (path / "tales.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
        (path / "job.yaml").write_text(JOB)
        site = install_hostile(path)
        self.environment = {
            "PATH": os.environ["PATH"], "HOME": str(path), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))), "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(path / "cache"), "HOSTILE_API_KEY": KEY,
        }  # fmt: skip

    def train(self, directory: str, *words: str, under: tuple[str, ...] = ()) -> str:
        """What the run printed. Its processes are gone with it."""
        command = [*(under or (sys.executable,)), "-m", "shardtune", "train", "job.yaml"]
        done = subprocess.run(
            [*command, f"save.directory={directory}", *words],
            cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=280,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def losses(self, directory: str) -> list[object]:
        """To the bit, as JSON has the shortest text of a double."""
        return [line["loss"] for line in lines(self.path / directory / "metrics.jsonl")]

    def left(self) -> list[psutil.Process]:
        """Processes of ours that still run, but for those that are dying."""
        return [
            each
            for each in psutil.process_iter(["cwd", "status"])
            if each.info["cwd"] == str(self.path) and each.info["status"] != psutil.STATUS_ZOMBIE
        ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def said(place: Place) -> str:
    """Of a run with all of them, and one that is good; beside it a run without any."""
    place.train("alone")
    return place.train("run", f"track=[{GOOD}, {HARMFUL}]")


def test_losses_are_the_same_to_the_bit(place: Place, said: str) -> None:
    assert place.losses("run") == place.losses("alone")
    assert len(place.losses("run")) == 40 + 3
    assert json.loads((place.path / "run" / "report.json").read_text())["finished"]


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("refuse", "ConnectionError: no route to https://[redacted]@tracker/x"),
        ("raise", "RuntimeError: key [redacted] is not valid"),
        ("hang", "it didn't finish in 3 s"),
        ("spin", "it didn't finish in 3 s"),
        ("fill", "it wrote more than 4 MiB (disk_mib); removed"),
        ("chatter", "it didn't finish in 3 s"),
        ("kill", "killed by signal 11"),
    ],
)
def test_each_failure_is_one_line(place: Place, said: str, way: str, told: str) -> None:
    label = LABELS[way]
    found = [line for line in said.splitlines() if line.startswith(f"track: {label} ")]
    assert found == [
        f"track: {label} stopped: {told}; the run goes on, and `shardtune track run --to {label}` "
        "sends the rest later"
    ]


def test_a_good_tracker_beside_them_has_every_point(place: Place, said: str) -> None:
    run = place.path / "run"
    wanted = [(name, s, v) for name, curve in points(run).items() for s, v in curve.items()]
    assert sorted(csv_points(run / "track" / "csv" / "run")) == sorted(wanted)


def test_nothing_is_left_running_or_lying_about(place: Place, said: str) -> None:
    assert not place.left()
    track = place.path / "run" / "track"
    assert not (track / LABELS["fill"]).exists()
    assert (track / f"{LABELS['chatter']}.log").stat().st_size < 2 << 20


def test_no_secret_is_written(place: Place, said: str) -> None:
    for path in (place.path / "run").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert KEY.encode() not in data, path
            assert b"hunter22" not in data, path
    assert KEY not in said
    assert "hunter22" not in said


def test_what_a_tracker_lacks_is_sent_later(place: Place, said: str) -> None:
    words = [sys.executable, "-m", "shardtune", "track", "run", "--to", LABELS["raise"]]
    done = subprocess.run(
        [*words, "how=listen"], cwd=place.path, env=place.environment, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    text = (place.path / "run" / "track" / LABELS["raise"] / "seen.txt").read_text()
    logged = [line["step"] for line in lines(place.path / "run" / "metrics.jsonl")]
    seen = [int(step) for step in text.split()]
    assert 3 in seen
    assert seen == logged[-len(seen) :]  # it may have had the first ones
    assert f"sent {len(seen) + 1} lines" in done.stdout  # and the report


def test_a_tracker_that_comes_late_has_every_point(place: Place, said: str) -> None:
    """The run was begun without it, and goes on with it."""
    place.train("alone", "track=csv", "train.steps=50", "--resume")
    found = csv_points(place.path / "alone" / "track" / "csv" / "alone")
    assert [step for name, step, _ in found if name == "train/loss"] == list(range(1, 51))


def test_rank_0_starts_them_where_others_start_the_ranks(place: Place) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1")
    said = place.train("torchrun", f"track=[{GOOD}, {HARMFUL}]", under=torchrun)
    assert said.count("the run goes on") == len(WAYS)
    found = csv_points(place.path / "torchrun" / "track" / "csv" / "torchrun")
    assert [step for name, step, _ in found if name == "train/loss"] == list(range(1, 41))
    assert not place.left()


@pytest.mark.timeout(900)
def test_a_step_takes_as_long_as_without_them(place: Place) -> None:
    """Short runs with and without trackers that hang, raise, fill the disk, print and spin, in
    turn: a shared machine's own speed drifts by 15 % within minutes. The time of a step is the
    lower quartile of all steps of the runs of a kind; what else the machine does falls out."""
    harmful = ", ".join(
        f"{{type: hostile, how: {way}, disk_mib: 64, finish_seconds: 0}}"
        for way in ("hang", "raise", "fill", "chatter", "spin")
    )
    job = ("train.steps=140", "data.sequence_length=256", "save.every=0", "evaluate.every=0")
    job += ("train.global_batch=4", "launch.threads=1", "--overwrite")
    seconds: dict[str, list[float]] = {"track=[]": [], f"track=[{harmful}]": []}
    begun = time.monotonic()
    for pair in itertools.count():
        for track, found in seconds.items():
            place.train("timed", track, *job)
            steps = [each for each in lines(place.path / "timed/metrics.jsonl") if "busy" in each]
            found += [each["seconds"] for each in steps[20:]]
        alone, tracked = (statistics.quantiles(found, n=4)[0] for found in seconds.values())
        if pair >= 5 and (tracked <= 1.01 * alone or time.monotonic() > begun + 400):
            break
    assert tracked <= 1.01 * alone
