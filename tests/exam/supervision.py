"""Cases in which processes die, hang, are slow or are told to stop."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time

import psutil

from tests.exam.case import Findings
from tests.exam.faults import Fault
from tests.exam.harness import Done, Lab, descendants

DOWN = 2.0  # seconds in which a group has to be down after one of its ranks is
NAMED = 5.0  # seconds in which a hung rank has to be named; the steps here are shorter
GONE = 5.0  # seconds in which every process has to be gone
GRACE = 5.0
SECRETS = {"HF_TOKEN": "hf_this-is-a-secret", "WANDB_API_KEY": "this-too-is-a-secret"}


def kills(lab: Lab, found: Findings) -> None:
    """1: SIGKILL each rank, in the first step, the second, the eighth and the last."""
    plan = [(0, 1), (1, 2), (0, 8), (1, 24), (1, 1), (0, 2), (1, 8), (0, 24)]
    # Who dies in a backward pass keeps the others from their update: one kill an attempt.
    faults = [
        Fault("kill", rank, step, "backward" if index < 4 else "update")
        for index, (rank, step) in enumerate(plan)
    ]
    done = lab.run("kills", "launch.restarts=9", faults=faults)
    restarts = done.events("restart")
    found.expect("it ends well", done.code == 0)
    found.expect("every kill was noticed", len(restarts) == len(faults))
    found.expect("the killed rank is named", _named(restarts) == _ranks(faults))
    _exact(lab.whole, done, found)
    slowest = max((_fault_to_event(done, event) for event in restarts), default=float("inf"))
    more = lab.struck_on_four
    first = more.events("restart")[0]
    found.expect("one of four ranks is named", _named([first]) == ["3@2"])
    slowest = max(slowest, more.after_fault(0, first))
    found.expect(f"all stopped within {DOWN:g} s", slowest <= DOWN)
    found.show(f"{len(restarts)} kills on 2 ranks, 1 on 4, down in {slowest:.2f} s at most")


def hangs(lab: Lab, found: Findings) -> None:
    """30, 31, 38: stopped in each phase, the GIL held, an exception before a collective."""
    faults = [
        Fault("stop", 0, 3, "forward"),
        Fault("stop", 1, 6, "collective"),
        Fault("stop", 0, 9, "save"),
        Fault("stop", 1, 12, "data"),
        Fault("hold gil", 0, 15, "forward", nth=2),
        Fault("raise", 1, 18, "collective"),
    ]
    done = lab.run("hangs", "launch.restarts=9", faults=faults)
    restarts = done.events("restart")
    found.expect("it ends well", done.code == 0)
    found.expect("each was noticed", len(restarts) == len(faults))
    found.expect("the rank is named", [event["rank"] for event in restarts] == [
        fault.rank for fault in faults
    ])  # fmt: skip
    for fault, event in zip(faults, restarts, strict=False):
        if fault.action != "raise":
            named = f"in step {fault.step} ({fault.phase})" in event["text"]
            found.expect(f"{fault.action} in {fault.phase}: the phase is named", named)
    if len(restarts) == len(faults):
        found.expect("the stack of the locked rank is shown", "_hold_gil" in restarts[4]["text"])
        raised = restarts[5]["text"].splitlines()
        found.expect("the cause comes first", "rank 1" in raised[0])
        found.expect("with its traceback", any("injected: this rank raises" in x for x in raised))
        times = [done.after_fault(index, event) for index, event in enumerate(restarts)]
        found.expect(f"named within {NAMED:g} s", max(times[:5]) <= NAMED)
        found.expect(f"an exception stops all within {DOWN:g} s", times[5] <= DOWN)
        found.show("stopped in " + ", ".join(f"{each:.1f}" for each in times[:4]) + " s")
        found.show(f"GIL held: {times[4]:.1f} s, exception: {times[5]:.2f} s")
    _exact(lab.whole, done, found)


def signals(lab: Lab, found: Findings) -> None:
    """5, 73: SIGTERM in a forward pass, a backward pass, between two micro-batches, in a save;
    then SIGTERM and SIGINT to one rank and not to the launcher. One run, resumed each time."""
    faults = [
        Fault("terminate", 0, 3, "forward"),
        Fault("terminate", 0, 7, "backward"),
        Fault("terminate", 0, 11, "forward", nth=2),
        Fault("terminate", 0, 15, "save"),
        Fault("terminate rank", 1, 18),
        Fault("interrupt rank", 0, 21),
    ]
    codes, seconds = [], []
    changes = (f"launch.grace={GRACE:g}", "launch.restarts=3")
    for index, fault in enumerate(faults):
        done = lab.run("signalled", *changes, *["--resume"] * bool(index), faults=faults)
        codes.append(done.code)
        seconds.append(done.ended - (done.plan.struck(index) or 0.0))
        where = f"{fault.action} in {fault.phase}"
        found.expect(f"{where}: nobody left", not done.left)
        saved = max(path.name for path in (done.folder / "checkpoints").iterdir())
        steps = len(done.trace.splitlines())
        found.expect(f"{where}: no step is lost", saved == f"step-{steps:06d}")
        found.expect(f"{where}: stopped soon", fault.step <= steps < 24)
        found.expect(f"{where}: no restart", not done.events("restart"))
        reported = (done.folder / "report.json").exists()
        found.expect(f"{where}: a report if asked to stop", reported == (done.code == 130))
    found.expect("SIGTERM: code 143; SIGINT: 130", codes == [143] * 5 + [130])
    found.expect("the summary says so", "stopped early, on request" in done.out)
    done = lab.run("signalled", *changes, "--resume", faults=faults)
    found.expect("it ends well", done.code == 0)
    _exact(lab.whole, done, found)
    found.expect(f"gone within {GRACE:g} s", max(seconds) <= GRACE)
    found.show("SIGTERM 4 x to the launcher, 1 x to a rank: code 143; SIGINT to a rank: code 130")
    found.show(f"down in {max(seconds):.1f} s at most, 0 steps lost, resumed to the bit")


def interruption(lab: Lab, found: Findings) -> None:
    """6: SIGINT once, then twice and three times."""
    once = lab.run("once", faults=[Fault("interrupt", 0, 3)])
    found.expect("once: code 130", once.code == 130)
    found.expect("once: saved", (once.folder / "checkpoints" / "step-000003").is_dir())
    found.expect("once: nobody left", not once.left)
    # As fast as a person presses keys; then nothing moves, so that only the signal can end it.
    struck = [
        each
        for nth in (1, 2, 3)
        for each in (
            Fault("interrupt", 0, 6, "forward", nth),
            Fault("pause", 0, 6, "backward", nth, value=0.5 if nth < 3 else 60.0),
        )
    ]
    twice = lab.run("once", "--resume", faults=struck)
    found.expect("twice: code 130", twice.code == 130)
    found.expect("twice: nobody left", not twice.left)
    seconds = twice.ended - (twice.plan.struck(2) or 0.0)
    found.expect(f"twice: gone within {GONE:g} s", seconds <= GONE)
    found.show(f"twice: down in {seconds:.1f} s")


def reader_gone(lab: Lab, found: Findings) -> None:
    """71: `| head -13`."""
    done = lab.kept
    found.expect("13 lines were read", len(done.out.splitlines()) == 13)
    found.expect("it ends well", done.code == 0)
    found.expect("nothing is complained of", done.error == "")
    found.expect("the trace is that of a run that is heard", done.trace == lab.whole.trace)
    log = (done.folder / "logs" / "attempt-0" / "rank-0.log").read_text("utf-8")
    found.expect("what was printed is in the log", "step 24/24" in log)
    found.show("24 steps to the bit, code 0")


def orphans(lab: Lab, found: Findings) -> None:
    """7: the launcher is killed; the terminal is closed."""
    with lab.slots.taken():
        _kill_launcher(lab, found)
        _close_terminal(lab, found)


def _kill_launcher(lab: Lab, found: Findings) -> None:
    process, _ = lab.start("orphans", faults=[Fault("kill launcher", 0, 3)])
    ranks: dict[int, psutil.Process] = {}
    while process.poll() is None:
        ranks |= {each.pid: each for each in descendants(process.pid)}
        time.sleep(0.05)
    begun = time.monotonic()
    _, alive = psutil.wait_procs(list(ranks.values()), timeout=GONE)
    found.expect("there were ranks", len(ranks) >= 2)
    found.expect("killed launcher: nobody left", not alive)
    found.show(f"killed launcher: down in {time.monotonic() - begun:.1f} s")
    process.communicate()


def _close_terminal(lab: Lab, found: Findings) -> None:
    ours, theirs = pty.openpty()
    change = ["save.directory=hung-up"]
    process = subprocess.Popen(
        [sys.executable, "-c", _AS_SHELL, *change],
        cwd=lab.path,
        env=lab.environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    metrics = lab.path / "hung-up" / "metrics.jsonl"
    os.set_blocking(ours, False)
    while process.poll() is None and not (
        metrics.exists() and '"kind": "step"' in metrics.read_text("utf-8")
    ):
        _drain(ours)
        time.sleep(0.05)
    family = descendants(process.pid)
    os.close(ours)  # the kernel sends SIGHUP to whoever has this terminal
    begun = time.monotonic()
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=GONE)
    seconds = time.monotonic() - begun
    found.expect("closed terminal: there were ranks", len(family) >= 2)
    found.expect("closed terminal: nobody left", not alive and seconds <= GONE)
    found.show(f"closed terminal: down in {seconds:.1f} s")


# A session needs its terminal as the controlling one for the kernel to send SIGHUP.
_AS_SHELL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[1:1] = ["train", "job.yaml"]
from shardtune.cli.main import program
program()
"""


def _drain(file: int) -> None:
    try:
        while os.read(file, 65536):
            pass
    except (BlockingIOError, OSError):
        pass


def crash_loop(lab: Lab, found: Findings) -> None:
    """19, 39, 52: the same step fails each time; the environment names a rendezvous that isn't, and
    holds secrets."""
    faults = [Fault("raise", 1, 4, always=True)]
    stale = {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "stale"}
    done = lab.run("loop", "launch.restarts=9", faults=faults, env=stale | SECRETS)
    written = [path.read_bytes() for path in done.folder.rglob("*") if path.is_file()]
    shown = [*written, done.out.encode(), done.error.encode()]
    leaks = [secret for secret in SECRETS.values() if any(secret.encode() in x for x in shown)]
    found.expect("no secret is written or shown", len(written) > 5 and not leaks)
    found.expect("code 1", done.code == 1)
    found.expect("two restarts", len(done.events("restart")) == 2)
    found.expect("the cause is told", "injected: this rank raises" in done.error)
    found.expect("and that it is a loop", "step 4: failed 3 times" in done.error)
    found.expect("nobody left", not done.left)
    found.show("stopped at the third failure")


def pauses(lab: Lab, found: Findings) -> None:
    """32, 33: a slow rank is told and left alone; long legal pauses are no alarm."""
    faults = [
        Fault("pause", 1, 1, "forward", value=7.0),
        Fault("pause", 0, 2, "save", value=7.0),
        Fault("pause", 1, 3, "evaluate", value=7.0),
        Fault("slow", 1, 4, "forward", value=5.0),
        Fault("slow", 0, 28, "data", value=5.0),
    ]
    changes = ("train.steps=52", "save.every=0", "save.trace=false", "evaluate.every=3")
    done = lab.run("pauses", *changes, "launch.restarts=3", faults=faults)
    slow = [(event["rank"], event["phase"]) for event in done.events("slow")]
    found.expect("it ends well", done.code == 0)
    found.expect("no restart", not done.events("restart"))
    found.expect("both slow ranks are told, each with its phase", {(1, "forward"), (0, "data")} <= {
        *slow
    })  # fmt: skip
    found.expect("each once", len(slow) == len(set(slow)))
    found.expect("no other rank is called slow", set(slow) <= {(1, "forward"), (0, "data")})
    found.show(f"0 restarts in {len(done.records('step'))} steps, 3 pauses of 7 s; reported {slow}")


def _fault_to_event(done: Done, event: dict[str, object]) -> float:
    """Kills strike in another order than they are listed: by rank and step."""
    key = (event["rank"], event["step"])
    index = [(each.rank, each.step) for each in done.plan.faults].index(key)  # type: ignore[arg-type]
    return done.after_fault(index, event)


def _named(events: list[dict[str, object]]) -> list[str]:
    return sorted(f"{event['rank']}@{event['step']}" for event in events)


def _ranks(faults: list[Fault]) -> list[str]:
    return sorted(f"{fault.rank}@{fault.step}" for fault in faults)


def _exact(whole: Done, done: Done, found: Findings) -> None:
    found.expect("the trace is that of the run without a fault", done.trace == whole.trace)
    found.expect("which has one", len(whole.trace.splitlines()) == 24)
    found.expect("nobody left", not done.left)
    first = next((json.loads(line)["step"] for line in done.trace.splitlines()), None)
    found.expect("from its first step", first == 1)
