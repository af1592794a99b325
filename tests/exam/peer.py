"""The short list of cases, put to Hugging Face's Trainer by a small script.

Each is as near to our own case as the Trainer allows: the same model, data and fault.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.exam.artefacts import Malicious
from tests.exam.case import Findings, Verdict
from tests.exam.harness import ROOT, Lab
from tests.exam.slots import at

STEPS = 6
PATIENCE = 20.0  # seconds that a hung rank is given; ours is named in 5


def sit(lab: Lab) -> dict[int, Verdict]:
    """Verdicts by the number of the case."""
    with at("peer"):
        return _sit(lab)


def _sit(lab: Lab) -> dict[int, Verdict]:
    reference = _train(lab, "peer-whole", {})
    if reference["code"] != 0:
        return {2: Verdict("not applicable", "the Trainer's own run failed: " + reference["error"])}
    found = {}
    for number, case in CASES.items():
        findings = Findings()
        try:
            case(lab, findings, reference)
            found[number] = findings.verdict()
        except Exception as error:  # ours have yet to run, and count
            found[number] = Verdict("not applicable", f"{type(error).__name__}: {error}"[:200])
        print(f"Trainer, case {number}: {found[number].outcome}", file=sys.stderr, flush=True)
    return found


def killed_in_save(lab: Lab, found: Findings, reference: dict[str, Any]) -> None:
    """2: the process dies in the middle of writing the checkpoint of step 3."""
    _train(lab, "peer-killed", {"kill_in_save": 3})
    left = sorted(path.name for path in (lab.path / "peer-killed").glob("checkpoint-*"))
    done = _train(lab, "peer-killed", {"resume": True})
    why = (done["error"].strip().splitlines() or [""])[-1][:120]
    found.expect(f"resumes from what is left: {', '.join(left)} ({why})", done["code"] == 0)
    same = done.get("losses", [])[-1:] == reference["losses"][-1:]
    found.expect("ends with the loss of the whole run", same)


def flipped_bit(lab: Lab, found: Findings, reference: dict[str, Any]) -> None:
    """11: one bit of the newest checkpoint's weights."""
    _spoil(lab, "peer-flipped", "model.safetensors", _flip)
    done = _train(lab, "peer-flipped", {"resume": True})
    found.expect("the damaged checkpoint is noticed", done["code"] != 0)


def nan(lab: Lab, found: Findings, reference: dict[str, Any]) -> None:
    """34: the loss of step 3 is NaN."""
    done = _train(lab, "peer-nan", {"nan": 3})
    found.expect("it ends well", done["code"] == 0)
    found.expect("the weights stay numbers", done.get("finite", False))
    found.expect("NaN is not shown as a loss of 0", 0.0 not in done.get("losses", [0.0]))


def hung(lab: Lab, found: Findings, reference: dict[str, Any]) -> None:
    """30: rank 1 of 2 is stopped in a forward pass."""
    marker = lab.path / "peer-hung.stopped"
    with lab.slots.taken():
        process = _start(lab, "peer-hung", {"stop": 3}, ranks=2)
        while not marker.exists() and process.poll() is None:
            time.sleep(0.1)
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < PATIENCE:
        time.sleep(0.1)
    noticed = process.poll() is not None
    found.expect(f"noticed within {PATIENCE:g} s", noticed)
    _end(process)


def malicious(lab: Lab, found: Findings, reference: dict[str, Any]) -> None:
    """46: the checkpoint's RNG state is a pickle that runs code."""
    import pickle

    canary = lab.path / "peer-canary"
    poison = pickle.dumps(Malicious(canary))
    _spoil(lab, "peer-pickle", "rng_state.pth", lambda path: path.write_bytes(poison))
    done = _train(lab, "peer-pickle", {"resume": True})
    found.expect("its code is not run", not canary.exists())
    found.expect("and the user is told", done["code"] != 0)


def malformed(lab: Lab, found: Findings, reference: dict[str, Any]) -> None:
    """40: three broken lines among the rows."""
    lines = (lab.path / "rows.jsonl").read_text("utf-8").splitlines()
    for place, text in ((10, "{broken"), (20, '{"instruction": 7, "output": null}'), (30, "[]")):
        lines[place] = text
    (lab.path / "peer-rows.jsonl").write_text("\n".join(lines), "utf-8")
    done = _train(lab, "peer-rows", {"rows": "peer-rows.jsonl"})
    # A tool may count lines from 0 or from 1.
    named = [n for n in (10, 20, 30) if re.search(rf"\b({n}|{n + 1})\b", done["error"])]
    found.expect(f"all three lines are named (named: {len(named)})", len(named) == 3)


def _spoil(lab: Lab, name: str, file: str, change: Callable[[Path], object]) -> None:
    shutil.copytree(lab.path / "peer-whole", lab.path / name)
    newest = max((lab.path / name).glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    shutil.rmtree(newest)  # the last is complete: go on from the one before
    newest = max((lab.path / name).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    change(newest / file)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


def _train(lab: Lab, name: str, options: dict[str, Any]) -> dict[str, Any]:
    with lab.slots.taken():
        process = _start(lab, name, options)
        assert process.stderr is not None
        error = process.stderr.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        lab.slots.charge(process)
        process.wait()
    result = lab.path / name / "result.json"
    facts = json.loads(result.read_text("utf-8")) if process.returncode == 0 else {}
    return {"code": process.returncode, "error": error[-2000:], **facts}


def _start(lab: Lab, name: str, options: dict[str, Any], ranks: int = 1) -> subprocess.Popen[str]:
    script = ["-m", "tests.exam.peer_script", name, json.dumps(options)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [sys.executable, *(launcher if ranks > 1 else []), *script],
        cwd=lab.path,
        env=lab.environment() | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    from tests.exam.harness import descendants

    for each in [*descendants(process.pid)]:
        each.kill()
    process.kill()
    process.communicate()


CASES = {2: killed_in_save, 11: flipped_bit, 30: hung, 34: nan, 40: malformed, 46: malicious}
