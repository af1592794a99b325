"""Every tracker holds every point, once, and is read back by its own reader."""

from __future__ import annotations

import json
import struct
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardtune.checkpoint.run_dir import RunDir
from shardtune.cli.main import main
from shardtune.track.event_file import masked_crc
from tests.track import read_back
from tests.track.tracked_runs import append, begin_run, end_run, points, step_lines

SETTINGS = {
    "tensorboard": [], "csv": [], "wandb": ["mode=offline"], "mlflow": [], "trackio": [],
}  # fmt: skip
PATIENCE = 20.0
"""Seconds for a tracker's own service, which outlives us, to write what it was given."""
READERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
TRACKERS = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(
                name in READERS and find_spec(READERS[name]) is None,
                reason=f"{READERS.get(name)} is not installed",
            ),
            # W&B has a service of its own.
            *([pytest.mark.process] if name == "wandb" else []),
            *([pytest.mark.filterwarnings("ignore")] if name in READERS else []),
        ],
    )
    for name in SETTINGS
]


@pytest.fixture(autouse=True)
def _no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or written to what a person has."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def send(run: Path, tracker: str, *words: str) -> None:
    assert main(["track", str(run), "--to", tracker, *SETTINGS[tracker], *words]) == 0


def held(run: Path, tracker: str) -> list[read_back.Point]:
    name = json.loads((run / "track" / f"{tracker}.json").read_text())["id"]
    folder = run / "track" / tracker
    if tracker == "tensorboard":
        return read_back.tensorboard_points(folder / name)
    if tracker == "csv":
        return read_back.csv_points(folder / name)
    if tracker == "mlflow":
        return read_back.mlflow_points(folder, name)
    return read_back.wandb_points(folder) if tracker == "wandb" else read_back.trackio_points(name)


def require_all(run: Path, tracker: str) -> None:
    """Every point of metrics.jsonl, each once, with its value. TensorBoard keeps 32 bits."""
    single = tracker == "tensorboard"
    wanted = {
        (name, step): struct.unpack("<f", struct.pack("<f", value))[0] if single else value
        for name, curve in points(run).items()
        for step, value in curve.items()
    }
    assert len(wanted) > 130
    found = held(run, tracker)
    deadline = time.monotonic() + PATIENCE
    while len(found) < len(wanted) and time.monotonic() < deadline:
        time.sleep(0.2)
        found = held(run, tracker)
    assert {(name, step): value for name, step, value in found} == wanted
    assert len(found) == len(wanted)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_run_that_is_resumed_goes_on_in_the_same_place(tracker: str, tmp_path: Path) -> None:
    run = begin_run(tmp_path / "run")
    send(run, tracker)
    require_all(run, tracker)
    before = json.loads((run / "track" / f"{tracker}.json").read_text())["id"]
    RunDir(run).jsonl.forget_after(10)  # the steps after the checkpoint are taken again
    append(run, step_lines(11, 20))
    end_run(run, 20)
    send(run, tracker)
    require_all(run, tracker)
    assert json.loads((run / "track" / f"{tracker}.json").read_text())["id"] == before


def test_masked_crc_is_that_of_tfrecord() -> None:
    """CRC-32C of "123456789" is 0xe3069283 (RFC 3720, appendix B.4, has others); masked as
    TensorFlow's crc32c.h does it."""
    crc = 0xE3069283
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc(b"123456789") == struct.pack("<I", masked)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_job_the_tables_and_the_notes(tmp_path: Path) -> None:
    run = end_run(begin_run(tmp_path / "run"))
    send(run, "tensorboard")
    texts = read_back.tensorboard_texts(run / "track" / "tensorboard" / "run")
    assert "| model.name | tiny |" in texts["job"]
    assert texts["notes/spike"] == "loss 9 after 1"
    assert "| code | 1.5121 | 0.7511 |" in texts["evaluation"]
    assert "| Add [two] numbers. | a + b |  | [b] + a |" in texts["answers"]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore")
def test_points_after_a_crash_are_void_when_they_come_again(tmp_path: Path) -> None:
    """Points had arrived that nobody had noted."""
    run = begin_run(tmp_path / "run")
    send(run, "tensorboard")
    state = run / "track" / "tensorboard.json"
    noted = json.loads(state.read_text())
    noted["sent"] |= {"step": 7, "evaluation/held": 5}
    state.write_text(json.dumps(noted))
    send(run, "tensorboard")
    require_all(run, "tensorboard")


def test_csv_files_hold_tables_and_notes(tmp_path: Path) -> None:
    run = end_run(begin_run(tmp_path / "run"))
    send(run, "csv")
    folder = run / "track" / "csv" / "run"
    assert (folder / "notes.csv").read_text().splitlines()[1:] == [
        "3,notes/spike,loss 9 after 1",
        "3,notes/overfitting,held rises",
        "3,notes/overfitting,other rises",
    ]
    assert "Add [two] numbers.,a + b,,[b] + a" in (folder / "answers-12.csv").read_text()
    assert "code,1.5121,0.7511" in (folder / "evaluation-12.csv").read_text()


@pytest.mark.parametrize("tracker", ["tensorboard", "csv"])
def test_a_folder_that_is_there_is_left_alone(tracker: str, tmp_path: Path) -> None:
    run, other = begin_run(tmp_path / "run"), tmp_path / "logs" / "mine"
    other.mkdir(parents=True)
    send(run, tracker, f"directory={tmp_path / 'logs'}", "name=mine")
    assert not list(other.iterdir())
    assert list((tmp_path / "logs" / "mine-2").iterdir())
