"""Whatever happens to a checkpoint on the disk, it is noticed before a weight of it is used."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from shardtune.checkpoint.digest import digest_tensors
from shardtune.checkpoint.latest import latest_checkpoint
from shardtune.checkpoint.manifest import MANIFEST_FILE, read_manifest, seal
from shardtune.checkpoint.reader import Reader
from shardtune.errors import RunError
from shardtune.launch.process_group import JoinedWorld
from tests.checkpoint.together import save, state, together
from tests.exam.corruption import CORRUPTIONS, shards, stale, swap

ALONE = JoinedWorld()
TRIALS = 25  # of each of the corruptions


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 3, 4 and 5 of one run, and of step 5 of another."""
    folder = tmp_path_factory.mktemp("runs")
    save(folder / "ours", 3, 4, 5)
    save(folder / "theirs", 5, run="another")
    assert len(shards(folder / "ours" / "step-000005")) > 3
    return folder


def copy(runs: Path, target: Path, *steps: int) -> Path:
    for step in steps:
        shutil.copytree(runs / "ours" / f"step-{step:06d}", target / f"step-{step:06d}")
    return target


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CORRUPTIONS)))
def test_every_corruption_is_refused_and_the_one_before_is_used(
    runs: Path, tmp_path: Path, number: int
) -> None:
    expected = digest_tensors(state(4))
    for trial in range(TRIALS):
        draw = random.Random(f"{number}/{trial}")
        folder = copy(runs, tmp_path / str(trial), 4, 5)
        other = draw.choice([runs / "ours" / "step-000003", runs / "theirs" / "step-000005"])
        CORRUPTIONS[number](draw, folder / "step-000005", other)
        found = latest_checkpoint(folder, "run", ALONE)
        ((path, why),) = found.passed_over
        assert path.name == "step-000005"
        assert why
        assert found.checkpoint is not None
        assert found.checkpoint[0].name == "step-000004"
        assert digest_tensors(Reader(*found.checkpoint)) == expected


def test_the_message_says_whose_file_it_is(runs: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    folder = copy(runs, tmp_path / "a", 4, 5)
    name = shards(folder / "step-000005")[0].name
    shutil.copy(runs / "ours" / "step-000003" / name, folder / "step-000005" / name)
    ((_, why),) = latest_checkpoint(folder, "run", ALONE).damaged
    assert (
        why == f"{name} has other content than was written (SHA-256 differs); it belongs to step 3"
    )
    folder = copy(runs, tmp_path / "b", 4, 5)
    shutil.copy(runs / "theirs" / "step-000005" / name, folder / "step-000005" / name)
    ((_, why),) = latest_checkpoint(folder, "run", ALONE).damaged
    assert why.endswith("it belongs to run another")
    folder = copy(runs, tmp_path / "c", 4, 5)
    swap(draw, folder / "step-000005", folder)
    ((_, why),) = latest_checkpoint(folder, "run", ALONE).damaged
    assert "rank-0000" in why
    folder = copy(runs, tmp_path / "d", 4, 5)
    shards(folder / "step-000005")[1].write_bytes(b"")
    ((_, why),) = latest_checkpoint(folder, "run", ALONE).damaged
    assert "has 0 bytes instead of" in why


def test_if_none_is_good_each_is_named_with_its_reason(runs: Path, tmp_path: Path) -> None:
    folder = copy(runs, tmp_path / "all", 3, 4, 5)
    for path in folder.iterdir():
        shards(path)[-1].unlink()
    with pytest.raises(RunError) as caught:
        latest_checkpoint(folder, "run", ALONE)
    places = [Path(problem.place).name for problem in caught.value.problems]
    assert places == ["step-000005", "step-000004", "step-000003"]
    assert all("is missing" in problem.fact for problem in caught.value.problems)


def test_checkpoints_of_another_run_are_not_taken(runs: Path) -> None:
    """Nor are they called damaged: what is damaged is set aside, and these aren't ours to move."""
    found = latest_checkpoint(runs / "ours", "mine", ALONE)
    assert found.checkpoint is None
    assert not found.damaged
    assert [path.name for path, _ in found.others] == ["step-000005", "step-000004", "step-000003"]
    assert all("of another run (run; this one is mine)" in why for _, why in found.others)


def test_ranks_that_share_the_reading_find_the_same(runs: Path, tmp_path: Path) -> None:
    for number in range(len(shards(runs / "ours" / "step-000005"))):
        folder = copy(runs, tmp_path / str(number), 4, 5)
        shards(folder / "step-000005")[number].write_bytes(b"x")  # seen by one of the ranks only
        found = together(3, lambda rank, folder=folder: latest_checkpoint(folder, "run", rank))
        assert {each.checkpoint[0].name for each in found if each.checkpoint} == {"step-000004"}
        assert len({each.damaged for each in found}) == 1


def test_one_of_a_newer_version_is_refused_not_passed_over(runs: Path, tmp_path: Path) -> None:
    folder = copy(runs, tmp_path / "new", 4, 5)
    path = folder / "step-000005" / MANIFEST_FILE
    body = json.loads(path.read_text())
    del body["seal"]
    path.write_text(seal({**body, "format": 2}))
    with pytest.raises(RunError, match="format 2; this version reads 1"):
        latest_checkpoint(folder, "run", ALONE)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "rank-00000-000.safetensors/.."])
def test_a_manifest_that_names_files_elsewhere_is_refused(
    runs: Path, tmp_path: Path, name: str
) -> None:
    """Even one that somebody has sealed himself."""
    folder = copy(runs, tmp_path / "bad", 4, 5)
    path = folder / "step-000005" / MANIFEST_FILE
    body = json.loads(path.read_text())
    del body["seal"]
    body["files"][name] = {"bytes": 1, "sha256": ""}
    path.write_text(seal(body))
    ((_, why),) = latest_checkpoint(folder, "run", ALONE).damaged
    assert why == "manifest.json names files that are none of a checkpoint's"


def test_a_stale_manifest_is_that_of_another_step(runs: Path, tmp_path: Path) -> None:
    folder = copy(runs, tmp_path / "stale", 4, 5)
    shutil.copy(
        runs / "ours" / "step-000003" / MANIFEST_FILE, folder / "step-000005" / MANIFEST_FILE
    )
    ((_, why),) = latest_checkpoint(folder, "run", ALONE).damaged
    assert why == "manifest.json is that of step 3"
    assert read_manifest(folder / "step-000004").step == 4
    assert stale in CORRUPTIONS
