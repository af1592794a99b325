"""Cases about files, names and code that nobody should trust."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

from tests.exam.case import Findings
from tests.exam.harness import ROOT, Lab

FORBIDDEN = {
    "eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler",
    "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "marshal.loads",
    "shelve.open", "joblib.load", "torch.hub.load",
}  # fmt: skip


def two_jobs(lab: Lab, found: Findings) -> None:
    """16, 17: a second run in the same directory, while the first lives and after it died."""
    hold = (
        "import sys, time; from pathlib import Path\n"
        "from shardtune.checkpoint.run_dir import RunDir\n"
        "with RunDir(Path(sys.argv[1])).locked():\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(600)"
    )
    folder = lab.path / "taken"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(folder)],
        stdout=subprocess.PIPE,
        env=lab.environment(),
        text=True,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    refused = lab.run("taken", "train.steps=1", "launch.processes=1", "--overwrite")
    told = f"code {refused.code}: {refused.error[-300:]!r}"
    found.expect(f"the second is refused ({told})", refused.code == 2)
    found.expect("with the reason", "another run is writing to this folder now" in refused.error)
    found.expect("and no traceback", "Traceback" not in refused.error)
    holder.kill()
    holder.communicate()
    after = lab.run("taken", "train.steps=1", "launch.processes=1", "--overwrite")
    found.expect("the lock of a dead process is gone", after.code == 0)
    found.show("second refused with code 2; lock released when the first is dead")


class Malicious:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self.canary), "w"))


def pickles(lab: Lab, found: Findings) -> None:
    """46: a pickle under every name that some tool would load."""
    canary = lab.path / "canary"
    poison = pickle.dumps(Malicious(canary))
    from shardtune.models.tiny import make

    model = lab.path / "poisoned"
    model.mkdir(exist_ok=True)
    for file in make().iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    for name in ("pytorch_model.bin", "training_args.bin", "adapter_model.bin", "value_head.bin"):
        (model / name).write_bytes(poison)
    changes = ("train.steps=2", "launch.processes=1", "model.name=poisoned")
    first = lab.run("beside", *changes, "save.every=1")
    found.expect("pickles beside good weights are not looked at", first.code == 0)
    for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt", ".metadata"):
        (first.folder / "checkpoints" / "step-000001" / name).write_bytes(poison)
    (first.folder / "report.json").unlink()
    resumed = lab.run("beside", *changes, "--resume")
    found.expect("nor is one in a checkpoint", resumed.code == 0)
    (model / "model.safetensors").write_bytes(poison)
    disguised = lab.run("disguised", *changes)
    found.expect("one called safetensors is refused", disguised.code in (1, 2))
    (model / "model.safetensors").unlink()
    alone = lab.run("alone", *changes)
    found.expect("a model of pickles alone is refused", alone.code == 2)
    found.expect("nothing was run", not canary.exists())
    found.show("10 pickles, none read")


def forbidden_calls(lab: Lab, found: Findings) -> None:
    """46, 49: no call in the package can run code from data or hand a string to a shell."""
    files = sorted((ROOT / "shardtune").rglob("*.py"))
    with lab.slots.taken():
        calls = [
            (path, node) for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Call)
        ]  # fmt: skip
    wrong = [
        f"{path.name}:{node.lineno} {ast.unparse(node.func)}"
        for path, node in calls
        if ast.unparse(node.func) in FORBIDDEN
        or any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords)
        or any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
    ]
    found.expect(f"no call that could run data: {wrong}", not wrong)
    found.show(f"{len(calls):,} calls in {len(files)} files checked")


def odd_names(lab: Lab, found: Findings) -> None:
    """49: names that a shell would act on."""
    canary = lab.path / "shell-canary"
    name = f"x; touch {canary.name} $(touch {canary.name}) `touch {canary.name}` -o"
    done = lab.run(name, "train.steps=1", "launch.processes=1")
    found.expect("the run is made", done.code == 0)
    found.expect("under its name", (lab.path / name / "report.json").exists())
    found.expect("no shell saw it", not canary.exists())
    found.show("names are never run")


def huge_rows(lab: Lab, found: Findings) -> None:
    """42: one row of 50 MB, and many tiny ones, in bounded memory."""
    path = lab.path / "huge.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.write('{"text": "' + "word \N{GRINNING FACE} " * 5_000_000 + '"}\n')
        for number in range(100_000):
            file.write(f'{{"text": "{number} \\u05e9\\u05dc\\u05d5\\u05dd e\\u0301"}}\n')
    size = path.stat().st_size
    command = ["-m", "shardtune", "data", "job.yaml", "data.train.0.path=huge.jsonl",
               "data.train.0.format=completion", "data.workers=1", "--examples", "0"]  # fmt: skip
    with lab.slots.taken(), (lab.path / "huge.out").open("w+", encoding="utf-8") as out:
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *command], cwd=lab.path, env=lab.environment(), stdout=out
        )
        _, status, used = os.wait4(process.pid, 0)  # its own memory, not that of runs beside it
        lab.slots.cpu["huge_rows"] += used.ru_utime + used.ru_stime
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        shown = out.read()
        seconds = time.monotonic() - begun
    peak = used.ru_maxrss / (1 << 20)
    found.expect("it is read", process.returncode == 0)
    found.expect("the cut is reported", "truncated" in shown)
    found.expect("memory is bounded", peak < 3.0)
    found.show(f"{size >> 20} MiB in {seconds:.0f} s, peak {peak:.1f} GiB")
    path.unlink()
