"""`shardtune plan`, `estimate` and `bench`, from the outside."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardtune.cli.main import main
from shardtune.config.job import LocalLaunch
from shardtune.config.job_file import load_job
from shardtune.core.host.machine import Machine
from shardtune.core.host.matmul_speed import FAST_PRECISIONS

JOB = """\
model:
  name: {model}
data:
  train:
    - path: nowhere.jsonl
      format: chat
train:
  steps: 100
  global_batch: 32
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The data file that it names doesn't exist: planning opens none."""
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(model="meta-llama/Llama-3.1-8B"), encoding="utf-8")
    return path


def test_estimate_has_the_promised_keys(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(job), "--cluster", "8xH100-80GB", "--json", "--price", "2"]) == 1
    found = json.loads(capsys.readouterr().out)
    keys = "fits gpu_gib host_gib nvme_gib traffic_gib step_seconds tokens_per_second"
    keys += " tokens_per_second_per_gpu mfu hours reasons parameters chosen"
    assert set(keys.split()) <= found.keys()
    assert {"peak", "capacity", "params", "gradients", "optimizer"} <= found["gpu_gib"].keys()
    assert {"intra_node", "inter_node", "moves"} <= found["traffic_gib"].keys()
    assert found["step_seconds"]["total"] == pytest.approx(
        sum(seconds for part, seconds in found["step_seconds"].items() if part != "total")
    )
    counts = found["parameters"]
    assert counts["total"] == counts["active"] == counts["trained"] == 8_030_261_248
    chosen = {each["key"]: each["value"] for each in found["chosen"]}
    assert chosen["train.micro_batch"] >= 1
    assert not found["fits"]  # 8 B in fp32 with two moments on each of eight cards
    assert found["cost"] == pytest.approx(found["hours"] * 8 * 2)


def test_estimate_says_what_auto_chose(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", str(job), "--cluster", "8xH100-80GB", "strategy.type=auto"]
    assert main([*words, "--json", "adapter.type=lora", "adapter.rank=8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["trained"] < found["parameters"]["total"] / 100
    chosen = {each["key"]: each for each in found["chosen"]}
    assert chosen["strategy"]["value"]["type"] == found["strategy"]
    assert chosen["strategy"]["why"].startswith("planned: ")
    assert main([*words, "adapter.type=lora"]) == 0
    told = capsys.readouterr().out
    assert "8.03 B parameters" in told
    assert "planned: " in told


def test_estimate_says_what_would_fit(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["estimate", str(job), "--cluster", "8xH100-80GB", "strategy.type=fsdp"])
    assert code == 0
    assert "fits" in capsys.readouterr().out
    assert main(["estimate", str(job), "--cluster", "1xH100-80GB"]) == 1
    assert "fix:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["model.quantization=fp8"], "model.quantization"),
        (["model.quantization=nf4"], "model.quantization"),
        (
            ["train.precision=bf16", "train.optimizer.paged=true", "train.optimizer.bits=8"],
            "train.optimizer.paged",
        ),
        (["train.steps=5", "train.warmup_steps=9"], "train.warmup_steps"),
    ],
)
def test_what_can_not_run_is_refused_as_by_train(
    command: str, words: list[str], key: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(job), "--cluster", "1xH200", *words]) == 2
    told = capsys.readouterr().err
    assert main(["show", str(job), *words, "launch.processes=1"]) == 2
    assert told == capsys.readouterr().err
    assert f"command line: {key}: " in told


def test_estimate_refuses_what_plan_would_leave_out(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["adapter.type=lora", "model.quantization=fp8"]
    assert main(["plan", str(job), "--cluster", "1xH200", *words]) == 0
    assert main(["estimate", str(job), "--cluster", "1xH200", *words, "strategy.type=fsdp"]) == 2
    assert "fsdp doesn't support it" in capsys.readouterr().err


@pytest.mark.slow
def test_a_larger_cluster_of_ones_own_cards_is_a_change_of_their_profile(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "gpu: {name: MyCard, memory_gib: 24, bf16_tflops: 100, fp16_tflops: 100, memory_gbs: 900}"
    profile = job.with_name("own.yaml")
    profile.write_text(own, encoding="utf-8")
    asked = ["estimate", str(job), "model.name=llama-3.1-405b", "adapter.type=ia3"]
    assert main([*asked, "--cluster", str(profile)]) == 1
    fix = capsys.readouterr().err.partition("fix: ")[2]
    told = re.match(r"nodes: (\d+) and gpus_per_node: (\d+) in the profile, with (.*?)  \(", fix)
    assert told is not None, fix
    nodes, gpus, changes = told.groups()
    profile.write_text(f"{own}\nnodes: {nodes}\ngpus_per_node: {gpus}", encoding="utf-8")
    assert main([*asked, "--cluster", str(profile), *changes.split()]) == 0


def test_plan_says_what_of_the_job_it_plans_anew(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(job), "--cluster", "1xH100-80GB", "adapter.type=lora"]
    asked = [*words, "train.gradient_checkpointing=full"]
    assert main(asked) == 0
    line = "train.gradient_checkpointing: none with one GPU, though command line says full: "
    assert line in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    assert any(line in each for each in json.loads(capsys.readouterr().out)["best"]["reasons"])
    assert main(words) == 0
    assert "though" not in capsys.readouterr().out


def test_plan_writes_the_best_job(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "best.yaml"
    assert main(["plan", str(job), "--cluster", "8xH100-80GB", "--write", str(best)]) == 0
    capsys.readouterr()
    assert main(["estimate", str(best), "--cluster", "8xH100-80GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_plan_replaces_what_it_wrote_and_nothing_else(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "best.yaml"
    words = ["plan", str(job), "--cluster", "8xH100-80GB", "--write"]
    assert [main([*words, str(best)]), main([*words, str(best)])] == [0, 0]
    best.write_text(f"# my notes\n{best.read_text('utf-8')}", "utf-8")
    for mine in (best, job):
        text = mine.read_text("utf-8")
        assert main([*words, str(mine)]) == 2
        assert "is there already" in capsys.readouterr().err
        assert mine.read_text("utf-8") == text


def test_plan_as_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--cluster", "4xA40", "--json", "adapter.type=lora"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["fits"]
    assert all(each["why"] for each in found["candidates"])


@pytest.mark.parametrize(
    ("spec", "words"),
    [("4xB17", "no GPU"), ("fourxA40", "neither a cluster nor a file"), ("2x8xA100@400", "what?")],
)
def test_a_bad_cluster_is_explained(
    job: Path, spec: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job), "--cluster", spec]) == 2
    assert words in capsys.readouterr().err


def use_machine(patch: pytest.MonkeyPatch, cache: Path, gpus: int) -> None:
    """A machine with so many cards that `bench` has never measured."""
    machine = Machine(64, gpus, "NVIDIA A100-SXM4-80GB" if gpus else "")
    patch.setattr(Machine, "here", lambda: machine)
    patch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_without_a_cluster_it_is_this_machines_gpus(
    command: str,
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_machine(monkeypatch, tmp_path, gpus=4)
    words = [command, str(job), "adapter.type=lora", "--json"]
    assert main(words) == 0
    here = capsys.readouterr()
    assert here.err == "planned for this machine: 4xA100-80GB\n"
    assert main([*words, "--cluster", "4xA100-80GB"]) == 0
    assert json.loads(here.out) == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "JOB", "model.name=qwen3-8b", "adapter.type=lora"],
        ["estimate", "JOB", "adapter.type=lora"],
        ["estimate", "JOB", "adapter.type=lora", "--sweep", "data.sequence_length=512,1024"],
        ["estimate", "--deepspeed-tables", "13B,164M"],
    ],
)
def test_without_a_gpu_the_command_is_offered_with_a_cluster(
    words: list[str],
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_machine(monkeypatch, tmp_path, gpus=0)
    asked = [word.replace("JOB", str(job)) for word in words]
    assert main(asked) == 2
    fact, fix = capsys.readouterr().err.split("fix: ")
    assert fact.startswith(f"error: shardtune {words[0]}: no GPU is visible here, and --cluster")
    option = shlex.split(fix.removeprefix("add ").partition(",")[0])
    assert main([*asked, *option]) == 0
    assert "`shardtune bench --out here.yaml` measures this machine" in fix


def test_planning_imports_no_torch(job: Path) -> None:
    code = (
        "import sys; from shardtune.cli.main import main; "
        f"main(['plan', {str(job)!r}, '--cluster', '8xH100-80GB', '--json']); "
        "sys.exit(3 if {'torch', 'transformers', 'datasets'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_almost_a_billion_is_a_billion(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 3 1B has 999,885,952 parameters."""
    main(["estimate", str(job), "--cluster", "1xH200", "model.name=google/gemma-3-1b-pt"])
    assert "\n1 B parameters, 1 B trained" in capsys.readouterr().out


def test_an_unknown_model_names_the_nearest(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(job), "--cluster", "4xA40", "model.name=llama-3.1-8c"]
    assert main(arguments) == 2
    assert "did you mean" in capsys.readouterr().err


def test_where_there_is_no_network_a_model_of_the_hub_is_refused_at_once(job: Path) -> None:
    """As on most compute nodes. The hub's own client tries for 24 seconds, a line each time."""
    words = ["estimate", str(job), "--cluster", "4xA40", "model.name=unsloth/Llama-3.1-8B-Instruct"]
    unset = ("http_proxy", "https_proxy", "all_proxy", "hf_hub_offline")
    kept = {name: value for name, value in os.environ.items() if name.lower() not in unset}
    done = subprocess.run(
        [sys.executable, "-m", "shardtune", *words],
        env=kept | {"HF_ENDPOINT": "https://hub.invalid"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "https://hub.invalid has no address here, and it isn't in the cache" in done.stderr
    assert "Retrying" not in done.stderr
    assert "fix: the catalogue has meta-llama/Llama-3.1-8B; or download" in done.stderr


@pytest.mark.long
def test_estimate_replays_a_step_without_memory(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", str(job), "--cluster", "2xA40", "--dry-run", "model.name=tiny"]
    assert main([*words, "strategy.type=fsdp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["dry_run"]
    assert found["kernels"] == "eager"
    assert found["allocated_gib"] == pytest.approx(sum(found["gpu_gib"].values()))
    assert found["difference"] == pytest.approx(
        found["closed_form_gib"] / found["allocated_gib"] - 1
    )
    assert main(words) == 0
    assert "dry run: " in capsys.readouterr().out


def test_what_deepspeed_holds_cannot_be_replayed(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", str(job), "--cluster", "8xH100-80GB", "--dry-run"]
    assert main([*words, "strategy.type=deepspeed"]) == 2
    assert "estimate without --dry-run" in capsys.readouterr().err


def test_stages_cannot_be_replayed_by_one_rank(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["estimate", str(job), "--cluster", "4xA40", "--dry-run", "model.name=tiny"]
    assert main([*words, "strategy.type=pipeline", "strategy.stages=2"]) == 2
    said = capsys.readouterr().err
    assert "strategy: pipeline(2) x data(2): a dry run has one rank" in said
    assert "estimate without --dry-run" in said


def test_a_written_job_counts_the_processes_of_a_node(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--nodes 2` starts so many on each."""
    best = tmp_path / "best.yaml"
    assert main(["plan", str(job), "--cluster", "2x8xH100-80GB", "--write", str(best)]) == 0
    launch = load_job(best, []).job.launch
    assert isinstance(launch, LocalLaunch)
    assert (launch.processes, launch.threads) == (8, 16)


def test_a_job_that_cannot_be_written_is_told(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "missing" / "best.yaml"
    assert main(["plan", str(job), "--cluster", "8xH100-80GB", "--write", str(target)]) == 2
    assert "can't be written: No such file or directory" in capsys.readouterr().err


def test_an_estimate_of_auto_is_one_of_the_best(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights of 8 B don't fit beside their moments under plain data parallelism."""
    assert main(["estimate", str(job), "--cluster", "8xH100-80GB", "strategy=auto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["plan", str(job), "--cluster", "8xH100-80GB", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    del found["chosen"]
    assert {key: best[key] for key in found} == found


def test_a_ranking_shows_what_it_costs(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(job), "--cluster", "8xH100-80GB"]
    assert main([*words, "--price", "2", "--json"]) == 0
    best, *_ = json.loads(capsys.readouterr().out)["candidates"]
    assert best["cost"] == pytest.approx(best["step_seconds"] * 100 / 3600 * 8 * 2)
    assert main([*words, "--price", "2"]) == 0
    assert f"{best['cost']:,.2f}" in capsys.readouterr().out
    assert main([*words, "--price", "-2"]) == 2
    assert "--price: is -2" in capsys.readouterr().err


def test_headings_of_a_ranking_are_whole_in_80_columns(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the longest names, which are wrapped instead."""
    monkeypatch.setenv("COLUMNS", "80")
    main(["plan", str(job), "--cluster", "2xA40", "--price", "0.4"])
    lines = capsys.readouterr().out.splitlines()
    headings = "strategy step tokens/s GPU, GiB micro-batch checkpointing cost"
    assert headings in {" ".join(line.split()) for line in lines}


def test_what_fits_is_shown_below_the_room(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory that torch keeps and would give back isn't what a job is judged by."""
    words = ["model.name=llama-3.1-405b", "train.global_batch=1024", "data.sequence_length=8192"]
    assert main(["plan", str(job), "--cluster", "128x8xH100", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    room = found["best"]["gpu_gib"]["capacity"]
    sizes = [(each["fits"], each["gpu_gib"]) for each in found["candidates"] if each["gpu_gib"]]
    assert any(fits for fits, _ in sizes)
    assert all((size <= room) == fits for fits, size in sizes)


def test_the_classes_of_memory_add_up_to_what_is_needed(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that torch keeps for later, and would give back, have a line of their own."""
    words = ["adapter.type=none", "strategy.type=fsdp", "train.gradient_checkpointing=full"]
    words += ["train.micro_batch=4", "data.sequence_length=8192"]
    assert main(["estimate", str(job), "--cluster", "8xA100-80GB", *words]) == 0
    told = capsys.readouterr().out
    needed = re.search(r"fits: ([\d.]+) ", told)
    table = re.search(r"on a GPU, GiB\s+(.+)\ncached, if there is room +[\d.]+", told, re.DOTALL)
    assert needed is not None
    assert table is not None
    sizes = [float(line.split()[1]) for line in table[1].splitlines()]
    assert len(sizes) == 7
    assert sum(sizes) == pytest.approx(float(needed[1]), abs=0.1)


def test_words_that_slurm_would_misread_are_refused(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["slurm", str(job), "--nodes", "1", "--gpus", "8"]
    assert main([*words, "--time", "bogus", "--partition", "a b", "--account", "a\nrm"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(":")[1].strip() for line in said.err.splitlines() if "error" in line] == [
        "--partition",
        "--account",
        "--time",
    ]
    assert main([*words, "--time", "2-00:00:00", "--partition", "large"]) == 0


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("T4", "fp16 (T4 is older than Ampere and has no bf16: fp16 with loss scaling)"),
        ("V100", "fp16 (V100-32GB is older than Ampere and has no bf16: fp16 with loss scaling)"),
        ("A100-80GB", "bf16 (A100-80GB is fast in bf16)"),
    ],
)
def test_the_precision_is_that_of_the_clusters_gpus(
    gpu: str, expected: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(job), "--cluster", f"8x{gpu}", "model.name=tiny"]
    line = f"precision: {expected}"
    for command in ("estimate", "plan"):
        assert main([command, *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert line in (found if command == "estimate" else found["best"])["reasons"]
        assert main([command, *words]) == 0
        assert line in " ".join(capsys.readouterr().out.split())
        assert main([command, *words, "train.precision=fp32"]) == 0  # the job says it itself
        assert "precision:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "taken"), [("bf16,fp16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32"), ("", "fp32")]
)
def test_show_says_which_precision_is_taken_here_and_why(
    said: str,
    taken: str,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine(cores=2, gpus=0, memory=1 << 38))
    monkeypatch.setenv(FAST_PRECISIONS, said)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", str(job), "model.name=tiny"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "train.precision" in line)
    assert row.split() == ["train.precision", taken, "auto:", f"{FAST_PRECISIONS}={said}"]
