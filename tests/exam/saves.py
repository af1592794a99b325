"""Cases about checkpoints that need whole runs: kills inside a save, resuming anywhere."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardtune.checkpoint.commit_by_rename import checkpoint_name
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.verify import verify_run
from shardtune.config.job_file import load_job
from tests.exam.case import Findings
from tests.exam.faults import SMALL_DISK, Fault
from tests.exam.harness import FAILED_WRITES, Lab
from tests.exam.kill_in_save import NO_STRACE, Exam, every_call, has_strace, random_moments
from tests.runs import train_on

MOST = 2  # of the calls of each name; `python -m tests.exam.kill_in_save` takes all of them
MOMENTS = 8
RANKS = 2


def killed_in_save(lab: Lab, found: Findings) -> None:
    """2, 3, 4: in a save that writes, commits and removes the checkpoint before."""
    with lab.slots.taken(), tempfile.TemporaryDirectory() as folder:
        exam = Exam.prepare(Path(folder), RANKS, background=True)
        outcomes = []
        if has_strace():
            outcomes += [each for rank in range(RANKS) for each in every_call(exam, rank, MOST)]
            found.expect("there were kills before and after the commit", {2, 3} <= {
                outcome.step for outcome in outcomes
            })  # fmt: skip
            found.show(f"{len(outcomes)} kills at system calls")
        else:
            found.show(f"no kills at system calls: {NO_STRACE}")
        outcomes += random_moments(exam, MOMENTS)
    good = sum(outcome.good for outcome in outcomes)
    found.expect("old or new, to the bit, after every one", good == len(outcomes))
    found.show(f"{MOMENTS} at random moments; {good} of {len(outcomes)} resumed to the bit")


def failing_disk(lab: Lab, found: Findings) -> None:
    """8, 10: the disk is full, broken, read-only, over quota; no file may be opened."""
    done = lab.struck_on_four
    found.expect("it ends well", done.code == 0)
    there = {path.name for path in (done.folder / "checkpoints").iterdir()}
    expected = {checkpoint_name(step) for step in range(1, 25) if step not in FAILED_WRITES}
    found.expect("what failed is not there, all others are", there == expected)
    for number, (step, code) in enumerate(FAILED_WRITES.items()):
        said = f"{checkpoint_name(step)}: can't be written: rank {number % 4}: {os.strerror(code)}"
        found.expect(f"{errno.errorcode[code]} is told", said in " ".join(done.out.split()))
    room = re.search(r"needs [\d.]+ MiB; [\d.,]+ MiB are free", done.out)
    found.expect("a full disk is told with what it needs and has", room is not None)
    found.expect("training went on to the bit", done.trace == lab.whole_on_four.trace)
    good = all(not verdict.faults for verdict in verify_run(RunDir(done.folder)))
    found.expect("every checkpoint is good", good)
    found.show(f"{len(FAILED_WRITES)} failed saves reported, {len(there)} intact, trace equal")


def full_disk(lab: Lab, found: Findings) -> None:
    """8: a small disk of memory is filled while the run saves, and emptied again."""
    place = lab.path / SMALL_DISK
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        found.show("a disk of memory may not be mounted here: errors were injected only")
        return
    try:
        filling = Fault("fill disk", 0, 9, "data", value=1)
        emptying = Fault("fill disk", 0, 15, "data")
        done = lab.run(f"{SMALL_DISK}/run", faults=[filling, emptying])
        found.expect("small disk: it ends well", done.code == 0)
        told = re.findall(r"step-(\d+): can't be written: .*No space left", done.out)
        found.expect("small disk: failures are told", {9, 13} <= set(map(int, told)))
        found.expect("small disk: and end when there is room", "000015" not in told)
        found.expect("small disk: exact", done.trace == lab.whole.trace)
        steps = [line["step"] for line in done.records("step")]
        found.expect("small disk: every line is there once", steps == list(range(1, 25)))
        good = all(not verdict.faults for verdict in verify_run(RunDir(done.folder)))
        found.expect("small disk: every checkpoint is good", good)
        found.show(f"{len(told)} saves failed on a full disk of 8 MiB")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def twice(lab: Lab, found: Findings) -> None:
    """20: the same run again, in other processes."""
    again = lab.kept
    found.expect("it ends well", again.code == 0)
    found.expect("the traces are equal", again.trace == lab.whole.trace)
    found.show(f"{len(again.trace.splitlines())} steps equal to the bit")


def resumed_at_every_step(lab: Lab, found: Findings) -> None:
    """21: from each checkpoint of the whole run two steps further, and to the end from the last."""
    whole = lab.kept.folder
    expected = lab.whole.trace.splitlines()
    os.environ["XDG_CACHE_HOME"] = lab.environment()["XDG_CACHE_HOME"]
    with lab.slots.taken():
        good = sum(_resumes_from(step, whole, lab, expected) for step in range(1, 25))
    found.expect("each follows the whole run to the bit", good == 24)
    found.show(f"{good} of 24 resumes to the bit")


def _resumes_from(step: int, whole: Path, lab: Lab, expected: Sequence[str]) -> bool:
    """Whether two steps more, from a copy of what was there after this one, are as expected."""
    folder = lab.path / "resumed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    for later in range(step + 1, 25):
        shutil.rmtree(folder / "checkpoints" / f"step-{later:06d}")
    until = min(24, step + 2)
    job = load_job(folder / "job.yaml", [
        f"save.directory={folder}", f"train.steps={until}",
        f"data.train.0.path={lab.path / 'rows.jsonl'}",
        f"data.eval.0.path={lab.path / 'held.jsonl'}",
    ]).job  # fmt: skip
    train_on(2, job, resume=True)
    return (folder / "trace.jsonl").read_text("utf-8").splitlines() == expected[:until]
