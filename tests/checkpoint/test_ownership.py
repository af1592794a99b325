"""Nothing is replaced, renamed or deleted that a run of ours didn't write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardtune.checkpoint import commit_by_rename as store
from shardtune.checkpoint.overwrite import (
    foreign_in,
    is_unsettled,
    move_aside,
    overwriting,
    set_aside_unless_ours,
    settle,
)
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.run_guards import (
    require_overwritable,
    require_plain,
    require_run,
    require_safe_place,
    require_unoccupied,
)
from shardtune.checkpoint.run_marker import MARKER_FILE, RUN_FILES, read_marker, write_marker
from shardtune.checkpoint.seal import seal_folder
from shardtune.errors import RunError
from tests.checkpoint.together import save
from tests.jobs import make_environment
from tests.reports import make_report, step_line
from tests.synthetic import make_job

PLACE = "job.yaml:9: save.directory"
USERS = ("report.json", "metrics.jsonl", "environment.json", "answers.json", "trace.jsonl",
         ".x.partial", ".x.replaced", "job.yaml", "result/thesis.txt", "logs/mine.log",
         "track/notes.txt")  # fmt: skip


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path in a folder, with the bytes of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def begun(folder: Path, run: str = "a" * 16) -> RunDir:
    """A run with two checkpoints, a result and logs."""
    found = RunDir(folder)
    found.begin(make_job(str(folder)), make_environment(run))
    found.jsonl.log(step_line(1))
    found.write_answers(["a"])
    found.write_report(make_report())
    save(found.checkpoints, 2, 4, run=run)
    found.mark_saved()
    found.result.mkdir()
    (found.result / "model.safetensors").write_bytes(b"weights")
    seal_folder(found.result)
    (found.logs / "attempt-0").mkdir(parents=True)
    (found.logs / "attempt-0" / "rank-1.log").write_text("x")
    (found.logs / "events.jsonl").write_text("{}\n")
    (found.path / "track" / "wandb" / "offline-run-1").mkdir(parents=True)
    (found.path / "track" / "wandb" / "offline-run-1" / "anything").write_text("x")
    (found.path / "track" / "wandb-2.json").write_text("{}\n")
    (found.path / "track" / "wandb-2.log").write_text("x")
    found.own_profile().mkdir()
    for name in ("rank-0.json", "rank-0.trace.json.gz", "rank-11.memory.pickle"):
        (found.profile / name).write_text("x")
    return found


@pytest.mark.parametrize("name", USERS)
def test_a_folder_with_files_of_somebody_is_refused_and_left_as_it_is(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"run": "mine", "shardtune": 1}')
    before, run = contents(tmp_path), RunDir(tmp_path)
    top = name.split("/")[0]
    for refused in (require_unoccupied, require_overwritable):
        with pytest.raises(RunError, match=f"holds {top}, which no run of ours wrote") as caught:
            refused(run, PLACE)
        assert "--overwrite" not in str(caught.value)
    with pytest.raises(RunError, match=f"holds {top}, which no run of ours wrote"):
        run.prepare()
    with overwriting(run, wanted=True):
        pass
    assert contents(tmp_path) == before


def test_names_that_runs_took_later_stay_a_persons(tmp_path: Path) -> None:
    """A run of a version that wrote no page, resumed before its first checkpoint."""
    run = RunDir(tmp_path)
    run.prepare()
    marker = run.marker()
    assert marker is not None
    later = {"report.html", "data.json", "profile"}
    write_marker(tmp_path, replace(marker, names=tuple(set(marker.names) - later)))
    (tmp_path / "report.html").write_text("my page")
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "mine.txt").write_text("my face")
    run.begin(make_job("run"), make_environment(marker.run))
    assert (tmp_path / "report.html").read_text() == "my page"
    assert not run.owns("report.html")
    assert run.owns("data.json")
    with pytest.raises(RunError, match="profile: is not the run's"):
        run.own_profile()


def test_an_earlier_profile_makes_room_for_the_next(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run.profile / "notes.txt").write_text("mine")
    run.own_profile()
    assert [path.name for path in run.profile.iterdir()] == ["notes.txt"]


def test_the_marker_is_there_before_anything_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.prepare()
    assert [path.name for path in run.path.iterdir()] == [MARKER_FILE]
    marker = run.marker()
    assert marker is not None
    assert (marker.begun, marker.saved) == (False, False)
    run.begin(make_job("run"), make_environment(marker.run))
    again = run.marker()
    assert again is not None
    assert (again.run, again.begun) == (marker.run, True)


def test_a_marker_with_a_changed_bit_is_not_believed(tmp_path: Path) -> None:
    RunDir(tmp_path).prepare()
    data = (tmp_path / MARKER_FILE).read_bytes()
    for at in range(0, 8 * len(data), 61):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        (tmp_path / MARKER_FILE).write_bytes(changed)
        assert read_marker(tmp_path) is None, f"bit {at}"


@pytest.mark.parametrize("lost", [MARKER_FILE, "environment.json"])
def test_a_run_is_known_without_its_marker_or_its_environment(tmp_path: Path, lost: str) -> None:
    """Without the marker it is one of an earlier version."""
    run = begun(tmp_path)
    (tmp_path / lost).unlink()
    marker = run.marker()
    assert marker is not None
    assert (marker.run, marker.begun, marker.saved) == ("a" * 16, True, True)
    run.prepare()
    assert read_marker(tmp_path) == marker, "it has one from now on"


def test_what_was_being_written_is_swept_away_and_nothing_else(tmp_path: Path) -> None:
    run = begun(tmp_path)
    mine = (".job.yaml.partial", ".result.0a1b2c3d.partial", ".result.0a1b2c3d.old.partial")
    users = (".x.partial", ".x.replaced", ".notes.yaml.partial", "x.partial")
    saves = (".step-000006.partial", ".step-000002.0a1b2c3d.partial")
    for name in (*mine, *users):
        (tmp_path / name).write_text("x")
    for name in (*saves, ".mine.partial", ".step-000007.partial"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / ".step-000007.partial" / "thesis.txt").touch()
    run.prepare()
    left = {path.name for path in (*tmp_path.iterdir(), *run.checkpoints.iterdir())}
    assert not left & {*mine, *saves}
    assert left >= {*users, ".mine.partial", ".step-000007.partial", "step-000002", "step-000004"}


def test_a_result_that_was_being_replaced_is_back(tmp_path: Path) -> None:
    """Killed between the two renames; also if the run is to be overwritten next."""
    run = begun(tmp_path)
    before = contents(tmp_path)
    for act in (run.prepare, lambda: move_aside(run)):
        run.result.rename(tmp_path / ".result.0a1b2c3d.old.partial")
        act()
        settle(run)
        assert contents(run.result) == {
            name.removeprefix("result/"): data
            for name, data in before.items()
            if name.startswith("result/")
        }


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_not_written_through(tmp_path: Path, kind: str) -> None:
    run = begun(tmp_path / "run")
    (tmp_path / "users").write_text("x")
    run.metrics.unlink()
    if kind == "fifo":
        os.mkfifo(run.metrics)
    elif kind == "link":
        run.metrics.symlink_to(tmp_path / "users")
    else:
        run.metrics.mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl is no file of ours"):
        require_plain(run, PLACE)
    assert run.jsonl.epochs() == 0.0, "and reading it waits for nobody"


def test_a_disk_that_is_not_mounted_is_told(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.checkpoints.rename(tmp_path / "disk")
    run.checkpoints.symlink_to(tmp_path / "disk")
    require_plain(run, PLACE)
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"checkpoints leads to .*disk, which isn't there"):
        require_plain(run, PLACE)


@pytest.mark.parametrize("where", ["/", "home", "repository", "data"])
def test_dangerous_places_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("home", "repository/.git", "data", "fine"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "rows.jsonl").touch()
    data = {"train": [{"path": str(tmp_path / "data" / "rows.jsonl"), "format": "completion"}]}
    job = make_job("x", data=data)
    with pytest.raises(RunError, match=r"is (the|your) "):
        require_safe_place(RunDir(tmp_path / where), job, PLACE)
    require_safe_place(RunDir(tmp_path / "fine"), job, PLACE)
    require_safe_place(RunDir(tmp_path / "data" / "run"), job, PLACE)
    held_out = make_job("x", data=data | {"eval": {"share": 0.1}})
    require_safe_place(RunDir(tmp_path / "fine"), held_out, PLACE)


# Overwriting -------------------------------------------------------------------------------------


def test_an_overwritten_run_goes_when_the_new_one_has_begun(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "merged").mkdir()
    with overwriting(run, wanted=True):
        run.prepare()
        marker = run.marker()
        assert marker is not None
        assert marker.run != "a" * 16
        assert len(list(tmp_path.glob(".*.overwritten/checkpoints/step-*"))) == 2
        run.begin(make_job(str(tmp_path)), make_environment(marker.run))
    assert {path.name for path in tmp_path.iterdir()} == {
        MARKER_FILE, "job.yaml", "environment.json", "notes.txt", "merged"
    }  # fmt: skip
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_overwritten_run_is_back_if_the_new_one_does_not_begin(tmp_path: Path) -> None:
    run, said = begun(tmp_path), []
    before = contents(tmp_path)
    with overwriting(run, wanted=True, say=said.append):
        run.prepare()
        run.write_forecast(None)
        (run.logs / "attempt-0").mkdir(parents=True)
    assert contents(tmp_path) == before
    assert said == [f"{tmp_path}: the new run did not begin; the one that was there is back"]


def test_a_run_of_which_a_folder_cannot_be_moved_stays_whole(
    tmp_path: Path, mount_disk: Callable[[Path], None]
) -> None:
    """Its result is a disk of its own."""
    run, copy = begun(tmp_path / "run"), tmp_path / "copy"
    shutil.copytree(run.result, copy)
    mount_disk(run.result)
    shutil.copytree(copy, run.result, dirs_exist_ok=True)
    before = contents(run.path)
    with (
        pytest.raises(RunError, match="result: can't be moved aside: Device or resource busy"),
        overwriting(run, wanted=True),
    ):
        pytest.fail("it was moved")
    assert contents(run.path) == before


@pytest.mark.slow
def test_an_overwrite_that_is_cut_short_anywhere_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each of its renames, and at each of those that put the run back."""
    template = begun(tmp_path / "template")
    before, rename = contents(template.path), Path.rename

    class Killed(BaseException):
        pass

    for first in range(11):
        for second in (0, 3, 99):
            run = RunDir(tmp_path / f"{first}-{second}")
            shutil.copytree(template.path, run.path)
            for limit, act in ((first, move_aside), (second, settle)):
                left = limit

                def counted(path: Path, target: Path) -> Path:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise Killed
                    return rename(path, target)

                monkeypatch.setattr(Path, "rename", counted)
                try:
                    act(run)
                except Killed:
                    pass
                finally:
                    monkeypatch.undo()
            if is_unsettled(run):
                settle(run)
                assert contents(run.path) == before
            shutil.rmtree(run.path)


@pytest.mark.parametrize("relative", [False, True])
def test_linked_folders_of_an_overwritten_run_stay_links(tmp_path: Path, relative: bool) -> None:
    run, disk = begun(tmp_path / "run"), tmp_path / "disk"
    disk.mkdir()
    for folder in (run.checkpoints, run.result):
        folder.rename(disk / folder.name)
        folder.symlink_to(Path("../disk" if relative else disk) / folder.name)
    save(tmp_path / "other", 7, run="another")
    before = contents(tmp_path)
    with overwriting(run, wanted=True):
        run.prepare()
    assert contents(tmp_path) == before, "put back"
    with overwriting(run, wanted=True):
        run.prepare()
        # Another run's that came there meanwhile is not ours to delete.
        (tmp_path / "other" / "step-000007").rename(disk / "checkpoints" / "step-000007")
        run.begin(make_job(str(run.path)), make_environment("b" * 16))
    assert run.checkpoints.is_symlink()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000007"]
    assert list(run.result.iterdir()) == []
    assert not is_unsettled(run)


@pytest.mark.parametrize("left", ["", ".run.json.partial", "thesis.txt"])
def test_an_overwrite_that_died_early_is_no_obstacle(tmp_path: Path, left: str) -> None:
    run = begun(tmp_path)
    aside = tmp_path / f".{'a' * 16}.overwritten"
    aside.mkdir()
    if left:
        (aside / left).write_text("x")
    before = contents(run.result)
    move_aside(run)
    assert is_unsettled(run)
    settle(run)
    assert contents(run.result) == before
    assert (aside / "thesis.txt").exists() == (left == "thesis.txt")


def test_what_every_launcher_writes_is_the_run_s(tmp_path: Path) -> None:
    run = begun(tmp_path)
    names = ("rank-0.log", "error-0.json", "stack-1.txt", "worker-1.json", "beat-1", "end")
    for name in names:
        (run.logs / "attempt-0" / name).touch()
    (run.logs / "events-1.jsonl").touch()
    marker = run.marker()
    assert marker is not None
    assert foreign_in(tmp_path, marker) == []


@pytest.mark.parametrize(("steps", "saved"), [(2, False), (3, True)])
def test_a_run_without_marker_has_saved_what_its_metrics_are_past(
    tmp_path: Path, steps: int, saved: bool
) -> None:
    run = RunDir(tmp_path)
    run.begin(make_job(str(tmp_path), save={"every": 2}), make_environment())
    for step in range(1, steps + 1):
        run.jsonl.log(step_line(step))
    (tmp_path / MARKER_FILE).unlink()
    marker = run.marker()
    assert marker is not None
    assert marker.saved == saved
    (run.checkpoints / ".step-000002.partial").mkdir(parents=True)
    marker = run.marker()
    assert marker is not None
    assert not marker.saved, "it was killed in its first save"


FOREIGN = ("result/thesis.txt", "logs/mine.log", "logs/attempt-0/notes", "checkpoints/notes.txt",
           "checkpoints/step-000004/notes.txt", "checkpoints/mine/x",
           "track/notes.txt", "profile/notes.txt")  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_run_that_holds_something_else_is_not_overwritten(tmp_path: Path, name: str) -> None:
    run = begun(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    shown = name.removesuffix("/x")
    for refused in (lambda: require_overwritable(run, PLACE), lambda: move_aside(run)):
        with pytest.raises(RunError, match=f"holds {shown}, which no run of ours wrote"):
            refused()
    assert contents(tmp_path) == before


def test_a_result_that_cannot_be_told_from_other_files_is_not_overwritten(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run.result / "manifest.json").write_text("{")
    with pytest.raises(RunError, match=r"result/manifest\.json, result/model\.safetensors"):
        require_overwritable(run, PLACE)


def test_a_damaged_checkpoint_of_the_run_may_go_with_it(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run.checkpoints / "step-000004" / "manifest.json").write_text("{")
    store.quarantine(run.checkpoints / "step-000004")
    marker = run.marker()
    assert marker is not None
    assert foreign_in(tmp_path, marker) == []


def test_what_somebody_put_into_an_overwritten_run_is_not_deleted(tmp_path: Path) -> None:
    run = begun(tmp_path)
    move_aside(run)
    mine = next(tmp_path.glob(".*.overwritten")) / "result" / "thesis.txt"
    mine.write_text("mine")
    run.begin(make_job(str(tmp_path)), make_environment("b" * 16))
    settle(run)
    assert mine.read_text() == "mine"


def test_a_run_that_is_aside_is_told(tmp_path: Path) -> None:
    run = begun(tmp_path)
    move_aside(run)
    with pytest.raises(RunError, match="was being overwritten when that was cut short"):
        require_run(run)


def test_a_result_with_something_else_in_it_is_set_aside(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert set_aside_unless_ours(run.result) is None
    for number in ("", "-2"):
        if not run.result.exists():
            run.result.mkdir()
        (run.result / "thesis.txt").write_text("mine")
        assert set_aside_unless_ours(run.result) == tmp_path / f"result.damaged{number}"
    assert (tmp_path / "result.damaged" / "thesis.txt").read_text() == "mine"
    assert set_aside_unless_ours(run.result) is None


# Checkpoints of other runs -----------------------------------------------------------------------


def test_checkpoints_of_another_run_are_neither_counted_nor_rotated_nor_replaced(
    tmp_path: Path,
) -> None:
    save(tmp_path, 3, 106, run="another")
    theirs = contents(tmp_path / "step-000106")
    save(tmp_path, 1, 2, 3, keep=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step-000002", "step-000003", "step-000003.of-another-run", "step-000106"}
    assert contents(tmp_path / "step-000106") == theirs
    assert store.run_of(tmp_path / "step-000003") == "run"
    assert store.run_of(tmp_path / "step-000003.of-another-run") == "another"


def test_a_checkpoint_with_something_else_in_it_is_not_rotated(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000001" / "notes.txt").write_text("mine")
    save(tmp_path, 2, 3, 4, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000001", "step-000003", "step-000004"]


def test_a_linked_checkpoint_is_not_emptied(tmp_path: Path) -> None:
    save(tmp_path / "disk", 1)
    before = contents(tmp_path / "disk")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000001").symlink_to(tmp_path / "disk" / "step-000001")
    save(tmp_path / "run", 1, 2, 3, keep=1)
    assert contents(tmp_path / "disk") == before


def test_that_there_was_a_checkpoint_is_noted(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.begin(make_job(str(tmp_path)), make_environment("run"))
    save(run.checkpoints, 1, committed=run.mark_saved)
    marker = run.marker()
    assert marker is not None
    assert marker.saved


def test_names_of_ours_are_those_that_are_listed(tmp_path: Path) -> None:
    run = begun(tmp_path)
    marker = run.marker()
    assert marker is not None
    there = {path.name for path in tmp_path.iterdir()} - {MARKER_FILE}
    assert there <= set(marker.names)
    assert set(RUN_FILES) <= set(marker.names)
