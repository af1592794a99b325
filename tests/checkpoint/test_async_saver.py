"""Saving: whole or not there, few, found again, and beside the training."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardtune.checkpoint import commit_by_rename as store
from shardtune.checkpoint import rank_files as share
from shardtune.checkpoint.async_saver import AsyncSaver, CheckpointIdentity
from shardtune.checkpoint.digest import digest_tensors
from shardtune.checkpoint.latest import latest_checkpoint
from shardtune.checkpoint.reader import Reader
from shardtune.core.progress import Progress
from shardtune.core.tensor_shards import Region, TensorShard, round_robin
from shardtune.errors import RunError
from shardtune.launch.process_group import JoinedWorld
from tests.checkpoint.together import WAYS, ThreadRank, save, state, together

ALONE = JoinedWorld()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def reader(folder: Path) -> Reader:
    found = latest_checkpoint(folder, "run", ALONE).checkpoint
    assert found is not None
    return Reader(*found)


def piece(tensor: torch.Tensor) -> TensorShard:
    shape = tuple(tensor.shape)
    return TensorShard("weight.a", shape, Region.whole(shape), tensor)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("background", [True, False])
def test_what_ranks_save_in_pieces_comes_back_whole(
    tmp_path: Path, way: str, ranks: int, background: bool
) -> None:
    save(tmp_path, 7, ranks=ranks, way=way, background=background)
    found = reader(tmp_path)
    assert digest_tensors(found) == digest_tensors(state(7))
    assert (found.manifest.step, found.manifest.ranks) == (7, ranks)
    assert (found.manifest.numbers, found.manifest.progress) == (
        {"taken": 7},
        Progress(7, tokens=7),
    )
    for path in found.folder.glob("*.safetensors"):
        load_file(path)  # the library itself can read what we wrote


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wanted", WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_part_can_be_read_from_any_pieces(
    tmp_path: Path, way: str, wanted: str, ranks: int
) -> None:
    save(tmp_path, 7, ranks=3, way=way)
    found = reader(tmp_path)
    for rank in range(ranks):
        for each in WAYS[wanted](state(7), rank, ranks):
            part = found.part(each.key, each.region)
            assert torch.equal(part, each.tensor), (each.key, each.region)


def test_memory_that_was_made_before_is_what_the_first_copy_uses(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path, ALONE, keep=1, background=True)
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    saver.prepare([piece(tensor)])
    assert saver._preparing is not None
    saver._preparing.join()
    (place,) = (kept.data_ptr() for kept in saver.snapshot._kept.values())
    saver.save(CheckpointIdentity("run", 1, "ddp", ""), [piece(tensor)], {}, Progress())
    saver.wait()
    assert [kept.data_ptr() for kept in saver.snapshot._kept.values()] == [place]
    assert torch.equal(reader(tmp_path)["weight.a"], tensor)


def test_a_rank_without_memory_for_its_copy_is_named_on_all(tmp_path: Path) -> None:
    """A tensor of more bytes than any machine has; the other rank's save fails with it."""
    huge = torch.empty(1).expand(1 << 50)

    def act(rank: ThreadRank) -> str:
        saver = AsyncSaver(tmp_path, rank, keep=1, background=True)
        own = piece(huge) if rank.rank else piece(torch.ones(3))
        saver.save(CheckpointIdentity("run", 1, "ddp", ""), [own], {}, Progress())
        with pytest.raises(RunError) as raised:
            saver.wait()
        return str(raised.value)

    for said in together(2, act):
        assert "rank 1: its share can't be copied" in said
    assert names(tmp_path) == []


def test_what_was_prepared_for_other_pieces_is_let_go(tmp_path: Path) -> None:
    """Moments that came later, say."""
    saver = AsyncSaver(tmp_path, ALONE, keep=1, background=True)
    saver.prepare([piece(torch.ones(3))])
    saver.save(CheckpointIdentity("run", 1, "ddp", ""), [piece(torch.ones(5))], {}, Progress())
    saver.wait()
    assert [tuple(kept.shape) for kept in saver.snapshot._kept.values()] == [(5,)]
    assert torch.equal(reader(tmp_path)["weight.a"], torch.ones(5))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    # By number, not by name: the seventh digit comes after a million steps.
    save(tmp_path, 5, 10, 999_999, 1_000_000, 1_000_001, keep=2)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]
    assert latest_checkpoint(tmp_path, "run", ALONE).checkpoint is not None


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 4, way="rows")
    save(tmp_path, 4, way="columns", ranks=3)
    assert names(tmp_path) == ["step-000004"]
    assert reader(tmp_path).manifest.ranks == 3
    # Killed between the two renames: the old one is there again after a sweep.
    (tmp_path / "step-000004").rename(tmp_path / f".step-000004{store.REPLACED}")
    store.remove_partial(tmp_path)
    assert digest_tensors(reader(tmp_path)) == digest_tensors(state(4))


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    for name in ("step-9", "step-000009.damaged", "notes"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path, "run", ALONE).checkpoint is None
    save(tmp_path, 3, keep=1)
    assert reader(tmp_path).manifest.step == 3
    assert len(names(tmp_path)) == 4


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "checkpoints", "run", ALONE).checkpoint is None


def test_a_sweep_leaves_checkpoints_only(tmp_path: Path) -> None:
    save(tmp_path, 3)
    store.begin(tmp_path, 5)
    (store.partial_folder(tmp_path, 5) / "rank-00000-000.safetensors").write_bytes(b"half")
    store.remove_partial(tmp_path)
    assert names(tmp_path) == ["step-000003"]


def test_training_goes_on_while_a_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is held up; the weights change; what is written is the weights as they were."""
    free = threading.Event()
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        assert free.wait(30)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    weight = torch.arange(8.0)
    saver = AsyncSaver(tmp_path, ALONE, keep=2, background=True)
    saver.save(CheckpointIdentity("run", 1, "ddp", ""), [piece(weight)], {}, Progress())
    before = weight.clone()
    for _ in range(3):
        weight += 1
        saver.poll()
        assert names(tmp_path) == [".step-000001.partial"], "not there before it is on the disk"
    free.set()
    deadline = time.monotonic() + 30
    while not (tmp_path / "step-000001").exists():
        saver.poll()
        assert time.monotonic() < deadline
    assert torch.equal(reader(tmp_path)["weight.a"], before)


def test_memory_of_a_snapshot_is_used_again(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path, ALONE, keep=1, background=True)
    weight = torch.ones(4)
    places = set()
    for step in (1, 2, 3):
        copies = saver.snapshot.take([piece(weight * step)])
        places.add(copies[0].tensor.data_ptr())
        assert torch.equal(copies[0].tensor, weight * step)
    assert len(places) == 1


def test_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path) -> None:
    save(tmp_path, 3)

    def act(rank: ThreadRank) -> str:
        saver = AsyncSaver(tmp_path, rank, keep=1, background=True)
        pieces = [*WAYS["rows"](state(4), rank.rank, rank.size)]
        if rank.rank == 1:
            pieces.append(piece(torch.ones(1, dtype=torch.complex64)))  # the format has none
        saver.save(CheckpointIdentity("run", 4, "ddp", ""), pieces, {}, Progress())
        with pytest.raises(RunError) as caught:
            saver.wait()
        assert saver.failure is caught.value
        return str(caught.value)

    said = together(2, act)
    assert said[0] == said[1]
    assert "step-000004: can't be written: rank 1: KeyError" in said[0]
    assert names(tmp_path) == ["step-000003"], "what was there is untouched, and nothing else is"


def test_a_file_that_cannot_grow_fails_the_save_and_the_next_succeeds(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path, ALONE, keep=1, background=True)
    saver.save(CheckpointIdentity("run", 1, "ddp", ""), [piece(torch.zeros(9))], {}, Progress())
    saver.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        saver.save(
            CheckpointIdentity("run", 2, "ddp", ""), [piece(torch.zeros(9000))], {}, Progress()
        )
        with pytest.raises(RunError, match="rank 0: File too large"):
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-000001"]
    saver.save(CheckpointIdentity("run", 3, "ddp", ""), [piece(torch.zeros(9000))], {}, Progress())
    saver.wait()
    assert saver.failure is None
    assert names(tmp_path) == ["step-000003"]


def test_tensors_that_are_not_whole_are_not_committed(tmp_path: Path) -> None:
    tensor = torch.ones(4, 2)
    cases: dict[str, list[TensorShard]] = {
        "has 4 of 8 elements": [TensorShard("w", (4, 2), Region((0, 0), (2, 2)), tensor[:2])],
        "overlap": [
            TensorShard("w", (4, 2), Region((0, 0), (2, 2)), tensor[:2]),
            TensorShard("w", (4, 2), Region((1, 0), (2, 2)), tensor[:2]),
        ],
        "outside": [TensorShard("w", (4, 2), Region((3, 0), (4, 2)), tensor)],
    }
    for said, pieces in cases.items():
        saver = AsyncSaver(tmp_path, ALONE, keep=1, background=False)
        with pytest.raises(RunError, match=said):
            saver.save(CheckpointIdentity("run", 1, "ddp", ""), pieces, {}, Progress())
        assert latest_checkpoint(tmp_path, "run", ALONE).checkpoint is None


def test_files_are_of_bounded_size(tmp_path: Path) -> None:
    tensors = {f"weight.{n}": torch.zeros(100) for n in range(10)}
    written = share.write_rank_files(
        tmp_path, round_robin(tensors, 0, 1), run="r", step=1, rank=0, file_size=1000
    )
    assert len(written.files) == 5  # two of 400 bytes fit
    assert all(each.bytes < 1000 + 500 for each in written.files.values())


def test_every_file_is_synced_before_the_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        happened.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def renamed(path: Path, target: Any) -> Path:
        happened.append(("rename", Path(target).name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path, 4, ranks=1)
    written = sorted(path.name for path in (tmp_path / "step-000004").iterdir())
    at = happened.index(("rename", "step-000004"))
    before = [name for what, name in happened[:at] if what == "sync"]
    assert sorted(before[:-1]) == written
    assert before[-2:] == ["manifest.json", ".step-000004.partial"]
    assert happened[at + 1] == ("sync", tmp_path.name)
