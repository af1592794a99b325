"""Cases about whose a run directory is, and which run is in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardtune.checkpoint.commit_by_rename import run_of
from tests.exam.case import Findings
from tests.exam.harness import SHORT, Done, Lab
from tests.exam.mutations import snapshot

ONE = ("launch.processes=1",)
USERS = ("report.json", "metrics.jsonl", "environment.json", "answers.json", "trace.jsonl",
         ".x.partial", ".x.replaced", "result/thesis.txt", "logs/mine.log", "job.yaml")  # fmt: skip
WEIGHTS = "adapter_model.safetensors"


def users_files(lab: Lab, found: Findings) -> None:
    """53, 54: a folder of somebody's, with the names that a run writes."""
    folder = lab.path / "somebody"
    for name in USERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine\n", "utf-8")
    before = snapshot(folder)
    for words in ((), ("--overwrite",), ("--resume",)):
        done = lab.run("somebody", *ONE, "train.steps=1", *words)
        said = " ".join(words) or "a plain train"
        found.expect(f"{said} is refused with code 2", done.code == 2)
        found.expect(f"{said}: no traceback", "Traceback" not in done.error)
        found.expect(f"{said}: --overwrite is not proposed", "--overwrite)" not in done.error)
        found.expect(f"{said}: every file is as it was", snapshot(folder) == before)
    found.show(f"{len(USERS)} foreign files kept by 3 commands")


def lost_and_found(lab: Lab, found: Findings) -> None:
    """55 to 58: checkpoints out of sight, those of another run, torn logs, a lost result."""
    whole = lab.short
    run = lab.run("owned", *ONE, "train.steps=3", "save.keep=2")
    found.expect("both end well", whole.code == run.code == 0)
    folder = run.folder
    (folder / "checkpoints").rename(lab.path / "unmounted")
    _tear(folder)
    refused = lab.run("owned", *SHORT, "--resume")
    found.expect("without its checkpoints it stops", refused.code == 2)
    found.expect("and says so", "has saved checkpoints" in refused.error + refused.out)
    (lab.path / "unmounted").rename(folder / "checkpoints")
    theirs = folder / "checkpoints" / "step-000024"
    shutil.copytree(lab.whole.folder / "checkpoints" / "step-000024", theirs)
    before = snapshot(theirs)
    _tear(folder)
    done = lab.run("owned", *SHORT, "--resume")
    said = done.out + done.error
    found.expect("with them it goes on", done.code == 0)
    found.expect("the torn lines are told", "can't be read" in said)
    last = (done.trace.splitlines() or [""])[-1]
    found.expect("to the bit", last == (whole.trace.splitlines() or ["-"])[-1])
    found.expect("another run's checkpoint is as it was", snapshot(theirs) == before)
    kept = sorted(path.name for path in theirs.parent.iterdir())
    found.expect("and not counted", kept == ["step-000005", "step-000006", "step-000024"])
    found.expect("each run has its own id", run_of(theirs) != run_of(theirs.parent / kept[0]))
    _lost_result(lab, done, SHORT, found)


def _tear(folder: Path) -> None:
    """The last line of the metrics, and the report, as a crash may leave them."""
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-9] + b"\n")
    (folder / "report.json").write_text('{"finis', "utf-8")


def _lost_result(lab: Lab, done: Done, words: tuple[str, ...], found: Findings) -> None:
    weights = (done.folder / "result" / WEIGHTS).read_bytes()
    shutil.rmtree(done.folder / "result")
    code, _ = lab.command("verify", str(done.folder))
    found.expect("verify misses the result", code == 1)
    again = lab.run("owned", *words, "--resume")
    found.expect("--resume writes it again", again.code == 0)
    result = done.folder / "result" / WEIGHTS
    found.expect("to the bit", result.is_file() and result.read_bytes() == weights)
    found.show("stopped without its checkpoints, exact with them; result restored to the bit")
