"""The commands as a person types them: real processes, the tiny model, files written here.

Runs are shared: the learning rate is constant, so that a shorter run is the beginning of a longer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.cli.main import main
from shardtune.config.auto import resolve
from shardtune.config.job_file import load_job
from shardtune.core.host.machine import Machine
from shardtune.models.catalogue import resolve as model_folder
from shardtune.training.inputs import open_inputs

JOB = """\
model: {name: tiny}
adapter: {type: lora, rank: 4, alpha: 8}
data:
  train: [{path: numbers.jsonl, format: instruction}, {path: tales.txt, format: completion}]
  eval: [{name: held, path: held.jsonl, format: instruction}]
  sequence_length: 80
train:
  steps: 40
  global_batch: 4
  learning_rate: 1e-2
  schedule: constant
  precision: fp32
  # LoRA's B starts at zero: with a tiny eps Adam would show the rounding of its first gradients.
  optimizer: {type: adamw, eps: 1e-4}
evaluate: {samples: 1, max_new_tokens: 8}
launch: {processes: 2, threads: 1}
save: {directory: whole, every: 10}
"""
pytestmark = [pytest.mark.slow, pytest.mark.early]
SHORT = 6  # steps of the runs that are compared with the beginning of the whole one
MEASURED = {
    "seconds", "tokens_per_second", "seconds_left", "memory_gib", "busy", "utilisation",
    "parts",
}  # fmt: skip
PROMPT = "Say the number 7."
KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH")  # of our environment


@dataclass(frozen=True)
class Place:
    """A folder with a job, its data, and a cache of its own."""

    path: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{name: os.environ[name] for name in KEPT if name in os.environ},
            "XDG_CACHE_HOME": str(self.path / "cache"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str) -> Done:
        process = self.start(*command)
        out, error = process.communicate(timeout=200)
        return Done(process.returncode, out, error)

    def train(self, *arguments: str) -> Done:
        return self.run("-m", "shardtune", "train", "job.yaml", *arguments)

    def metrics(self, directory: str) -> list[dict[str, Any]]:
        """Every line, without what a clock said."""
        text = (self.path / directory / "metrics.jsonl").read_text(encoding="utf-8")
        found = [json.loads(line) for line in text.splitlines()]
        return [{key: line[key] for key in line if key not in MEASURED} for line in found]

    def steps(self, directory: str) -> list[dict[str, Any]]:
        return [line for line in self.metrics(directory) if line["kind"] == "step"]

    def page(self, directory: str) -> str:
        return (self.path / directory / "report.html").read_text(encoding="utf-8")

    def report(self, directory: str) -> dict[str, Any]:
        return json.loads((self.path / directory / "report.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it said."""

    code: int
    out: str
    error: str


@contextmanager
def started(place: Place, directory: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run under way, whose processes are gone in the end whatever happens."""
    arguments = (*arguments, f"save.directory={directory}")
    process = place.start("-m", "shardtune", "train", "job.yaml", *arguments)
    try:
        yield process
    finally:
        for each in everybody(process):
            each.kill()
        process.communicate()


def everybody(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The launcher and its ranks."""
    try:
        launcher = psutil.Process(process.pid)
        return [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("end-to-end")

    def rows(numbers: range) -> str:
        said = [(n, f"It is {n}, and twice that is {2 * n}.") for n in numbers]
        lines = [{"instruction": f"Say the number {n}.", "output": text} for n, text in said]
        return "\n".join(map(json.dumps, lines))

    (folder / "numbers.jsonl").write_text(rows(range(40)), encoding="utf-8")
    (folder / "held.jsonl").write_text(rows(range(100, 104)), encoding="utf-8")
    tales = "\n".join(f"Once there were {n} geese. Then one flew away." for n in range(20))
    (folder / "tales.txt").write_text(tales, encoding="utf-8")
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    return Place(folder)


@pytest.fixture(scope="session")
def whole(place: Place) -> Done:
    """The run that the others are compared with, on 2 ranks."""
    done = place.train()
    assert done.code == 0, done
    return done


@pytest.fixture(scope="session")
def merged(place: Place, whole: Done) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.path)
        patch.setenv("XDG_CACHE_HOME", place.environment["XDG_CACHE_HOME"])
        assert main(["merge", "whole", "merged"]) == 0
    return place.path / "merged"


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, as if it was started in the place."""
    monkeypatch.chdir(place.path)
    monkeypatch.setenv("XDG_CACHE_HOME", place.environment["XDG_CACHE_HOME"])


# A whole run -------------------------------------------------------------------------------------


def test_the_run_directory_is_complete(place: Place, whole: Done) -> None:
    found = {path.name for path in (place.path / "whole").iterdir()}
    assert found == {
        "answers.json", "checkpoints", "environment.json", "forecast.json", "job.yaml", "logs",
        "data.json", "metrics.jsonl", "report.html", "report.json", "result", "run.json",
    }  # fmt: skip
    kept = sorted(path.name for path in (place.path / "whole" / "checkpoints").iterdir())
    assert kept == ["step-000030", "step-000040"]
    assert [line["step"] for line in place.steps("whole")] == list(range(1, 41))
    judged = [line["step"] for line in place.metrics("whole") if line["kind"] == "evaluation"]
    assert judged == [0, 10, 20, 30, 40]
    environment = json.loads((place.path / "whole" / "environment.json").read_text())
    assert environment["ranks"] == 2
    assert environment["packages"]["torch"]


def test_a_run_says_what_it_is_at(whole: Done) -> None:
    words = ("forecast: ", "loading the model", "preflight: ", "after step 0", "step 1/40")
    places = [whole.out.index(word) for word in words]
    assert places == sorted(places), whole.out


def test_something_is_learnt(place: Place, whole: Done) -> None:
    report = place.report("whole")
    assert report["finished"]
    held = report["evaluation"]["held"]
    assert held["after"]["loss"] < 0.9 * held["before"]["loss"]


@pytest.mark.usefixtures("here")
def test_the_job_in_it_is_the_one_that_ran(place: Place, whole: Done) -> None:
    expected = resolve(load_job(Path("job.yaml")).job, Machine.here()).job
    assert load_job(Path("whole/job.yaml")).job == expected


@pytest.mark.usefixtures("here")
def test_plain_peft_finds_the_loss_that_was_reported(place: Place, whole: Done) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder("tiny"))
    model = PeftModel.from_pretrained(base, "whole/result").eval()
    inputs = open_inputs(load_job(Path("whole/job.yaml")).job, quiet=True)
    total, labels = 0.0, 0
    for row in inputs.data.eval[0].rows:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        losses = functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total += losses[torch.tensor(row["trained"][1:])].sum().item()
        labels += sum(row["trained"])
    reported = place.report("whole")["evaluation"]["held"]["after"]
    assert labels == reported["labels"]
    assert total / labels == pytest.approx(reported["loss"], rel=1e-5)


def test_a_log_has_plain_lines(whole: Done) -> None:
    for text in (whole.out, whole.error):
        assert not [c for c in text if not c.isprintable() and c != "\n"]
    lines = whole.out.splitlines()
    steps = [re.match(r"step (\d+)/40  loss \d\.\d{4}  lr 1\.00e-02 ", line) for line in lines]
    shown = [int(match[1]) for match in steps if match]
    assert (shown[0], shown[-1]) == (1, 40)  # one every few seconds between them
    assert shown == sorted(set(shown))
    assert len([line for line in lines if re.match(r"after step \d+  held: loss ", line)]) == 5
    assert any(line.startswith("run") and "done: 40 steps" in line for line in lines)


@pytest.mark.usefixtures("here")
def test_one_process_computes_the_same(place: Place, whole: Done) -> None:
    """In the place of another run, which it is told to replace."""
    shutil.copytree(place.path / "whole", place.path / "one")
    (place.path / "one" / "notes.txt").touch()
    changes = ("save.directory=one", "launch.processes=1", f"train.steps={SHORT}", "save.every=0")
    assert main(["train", "job.yaml", "--overwrite", *changes]) == 0
    found, expected = place.steps("one"), place.steps("whole")[:SHORT]
    assert len(found) == SHORT
    for one, two in zip(found, expected, strict=True):
        assert one["samples_sha256"] == two["samples_sha256"]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
    kept = [path.name for path in (place.path / "one" / "checkpoints").iterdir()]
    assert kept == [f"step-{SHORT:06d}"], "none of the run that was replaced"
    assert (place.path / "one" / "notes.txt").exists(), "but what no run wrote stays"


def test_torchrun_computes_the_same(place: Place, whole: Done) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    changes = ("save.directory=torchrun", f"train.steps={SHORT}", "save.every=0")
    done = place.run(*launcher, "-m", "shardtune", "train", "job.yaml", *changes)
    assert done.code == 0, done
    assert place.steps("torchrun") == place.steps("whole")[:SHORT]
    assert place.report("torchrun")["ranks"] == 2


ACCELERATE = (
    "-m", "accelerate.commands.launch", "--use_fsdp", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
)  # fmt: skip
"""As `accelerate launch`, from a configuration that somebody made for another program."""


@pytest.mark.long
def test_accelerate_computes_the_same(place: Place, whole: Done) -> None:
    changes = ("save.directory=accelerate", f"train.steps={SHORT}", "save.every=0")
    done = place.run(*ACCELERATE, "-m", "shardtune", "train", "job.yaml", *changes)
    assert done.code == 0, done
    assert place.steps("accelerate") == place.steps("whole")[:SHORT]
    assert place.report("accelerate")["ranks"] == 2
    told = "note: ACCELERATE_USE_FSDP of accelerate: not used; the job's strategy decides"
    assert done.out.count(told) == 1


ON_ITS_OWN = """
import os, sys
from shardtune.cli.main import main
rows = f"train.micro_batch={1 + int(os.environ['RANK'])}"
sys.exit(main(["train", "job.yaml", "save.directory=parted", *sys.argv[1:], rows]))
"""


@pytest.mark.long
def test_ranks_that_disagree_do_not_cost_the_old_run(place: Place) -> None:
    changes = ("save.directory=parted", f"train.steps={SHORT}", "save.every=0")
    assert place.run("-m", "shardtune", "train", "job.yaml", *changes).code == 0
    before = place.steps("parted")
    (place.path / "rank.py").write_text(ON_ITS_OWN, encoding="utf-8")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = place.run(*launcher, "rank.py", "--overwrite")
    assert done.code != 0
    assert "train.micro_batch: is 1 on rank 0, and 2 on rank 1" in done.error
    assert place.steps("parted") == before
    assert (place.path / "parted" / "result").is_dir()


# Again in the same place -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), ["job.yaml:17: save.directory", "whole holds a run already", "--resume"]),
        (
            ("--resume", "train.learning_rate=0.02", "adapter.rank=8"),
            [
                "train.learning_rate: is 0.02, but the run was begun with 0.01",
                "adapter.rank: is 8, but the run was begun with 4",
                "2 problems",
            ],
        ),
    ],
    ids=["again", "resume-another"],
)
def test_a_run_is_not_spoilt(
    place: Place, whole: Done, arguments: tuple[str, ...], said: list[str]
) -> None:
    before = snapshot(place.path / "whole")
    done = place.train(*arguments)
    assert done.code == 2
    for fragment in said:
        assert fragment in done.error
    assert "Traceback" not in done.error
    assert snapshot(place.path / "whole") == before


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(place: Place, whole: Done) -> None:
    metrics = place.path / "parts" / "metrics.jsonl"
    with started(place, "parts") as process:
        wait_until(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 4, process)
        ranks = everybody(process)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, (out, error)
    assert len(ranks) >= 3
    assert not psutil.wait_procs(ranks, timeout=5)[1]
    assert "stopping after this step" in error
    assert "Traceback" not in error
    assert "stopped early, on request" in out
    stopped = place.report("parts")
    at = stopped["training"]["step"]
    assert not stopped["finished"]
    assert 4 <= at < 40
    assert (place.path / "parts" / "checkpoints" / f"step-{at:06d}").is_dir()
    assert 'class="state stopped"' in place.page("parts")

    done = place.train("save.directory=parts", "--resume")
    assert done.code == 0, done
    assert f"resuming after step {at}" in done.out
    assert place.report("parts")["finished"]
    assert 'class="state done"' in place.page("parts")
    # Bit for bit, evaluations included: but for the one at the stop, which the whole run had not.
    found = [
        line for line in place.metrics("parts") if line["kind"] == "step" or line["step"] != at
    ]
    expected = [
        line for line in place.metrics("whole") if line["kind"] == "step" or line["step"] != at
    ]
    assert found == expected
    for name in ("tokens", "first_loss", "last_loss"):
        assert place.report("parts")["training"][name] == place.report("whole")["training"][name]
    one, other = (
        load_file(place.path / run / "result" / "adapter_model.safetensors")
        for run in ("parts", "whole")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_twice_stops_at_once(place: Place, whole: Done) -> None:
    # Before the first step the model answers a question, at such length that it is no use to wait.
    answering = place.path / "killed" / "metrics.jsonl"
    with started(place, "killed", "evaluate.max_new_tokens=4000") as process:
        wait_until(answering.exists, process)
        ranks = everybody(process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None, "it waits for the end of the step"
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        out, error = process.communicate(timeout=60)
        assert not psutil.wait_procs(ranks, timeout=5)[1]
        assert time.monotonic() - begun < 5
    assert len(ranks) >= 3
    assert process.returncode == 130
    assert "Traceback" not in error
    assert "stopped early" not in out
    assert place.steps("killed") == []
    assert 'class="state stopped"' in place.page("killed")


# The result --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_the_merged_model_says_what_the_run_says(
    merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "whole", "--prompt", PROMPT, "--max-new-tokens", "24"]) == 0
    said = capsys.readouterr().out.removesuffix("\n")

    model = AutoModelForCausalLM.from_pretrained(merged)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    asked = [{"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**ids, do_sample=False, max_new_tokens=24)
    text = tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said
    assert said == text.strip()


@pytest.mark.usefixtures("here")
def test_merging_twice_is_refused(
    place: Place, merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(merged)
    assert main(["merge", "whole", "merged"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert snapshot(merged) == before
