"""Exit codes, as the table in docs/faults.md has them. Those of signals: test_supervisor.py."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from shardtune import errors
from shardtune.cli import schema_command
from shardtune.cli.main import main
from shardtune.core.files.atomic_write import atomic_write
from shardtune.launch import INTERRUPTED, PREEMPTED
from shardtune.launch.process_group import StopSignals
from tests.jobs import write_job

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
TOO_LARGE = ["--cluster", "1xA40", "model.name=llama-3.1-70b"]
CASES: dict[str, tuple[int, list[str]]] = {
    "done": (0, ["schema"]),
    "it doesn't fit": (1, ["estimate", "job.yaml", *TOO_LARGE]),
    "no such job": (2, ["train", "nowhere.yaml"]),
    "an unknown key": (2, ["train", "job.yaml", "train.stpes=3"]),
    "no such data": (2, ["train", "job.yaml"]),
    "no run to verify": (2, ["verify", "nowhere"]),
    "no such host": (
        2, ["train", "job.yaml", "--nodes", "2", "--node-rank", "0", "--head", "no.invalid:29400"],
    ),
}  # fmt: skip


def documented() -> set[int]:
    """The codes of the first column."""
    section = PAGE.read_text("utf-8").partition("## Exit codes")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE)
    return {int(code) for cell in cells for code in cell.split(",")}


@pytest.mark.parametrize("case", CASES)
def test_command(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    code, words = CASES[case]
    assert main(words) == code, capsys.readouterr()
    assert "Traceback" not in capsys.readouterr().err


def test_every_code_is_documented_and_every_documented_code_is_tried() -> None:
    of_errors = {kind.exit_code for kind in vars(errors).values() if _is_error(kind)}
    of_commands = {code for code, _ in CASES.values()}
    of_signals = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    assert {INTERRUPTED, PREEMPTED} <= of_signals
    assert of_errors | of_commands | of_signals == documented()


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.ShardtuneError)


def test_a_rank_that_was_stopped_is_not_done() -> None:
    stopped = StopSignals()
    assert stopped.exit_code == 0
    for number in (signal.SIGINT, signal.SIGTERM):
        stopped.on_signal(number, None)
        assert stopped.exit_code == stopped.agreed  # until all ranks have heeded it
        stopped.agreed = stopped.request
        assert stopped.exit_code == 128 + number
        stopped = StopSignals()


def test_an_interrupted_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(schema_command, "schema", interrupted)
    assert main(["schema"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_what_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["schema"]) == 1
    assert capsys.readouterr().err == "error: standard output: No space left on device\n"


def test_a_file_for_which_there_is_no_room_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_disk: Path
) -> None:
    target = small_disk / "profile.yaml"
    monkeypatch.setattr(schema_command, "schema", lambda _: atomic_write(target, "x" * (1 << 20)))
    assert main(["schema"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {target}: No space left on device\n")


def test_a_reader_that_has_read_enough_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w", encoding="utf-8") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert main(["schema"]) == 0
