"""`init`: the job that it writes passes `show` and trains; what it can't tell is said."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardtune.cli import main as cli
from shardtune.cli.resolve_job import resolve_here
from shardtune.cli.starter_job import starter_job
from shardtune.config.job import Job
from shardtune.config.job_file import load_job
from shardtune.core.host.machine import Machine
from shardtune.core.model.known_models import find_model
from shardtune.models import tiny
from shardtune.train import train
from tests.models import encoder_decoder

BIG = "meta-llama/Llama-3.1-70B"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, without hub and GPUs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def write_rows(name: str, *rows: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def questions(count: int) -> list[dict[str, Any]]:
    return [{"Question": f"What is {n}?", "Answer": f"It is {n}."} for n in range(count)]


def init(model: str, data: str) -> Job:
    """The job that is written, which `show` takes."""
    assert cli.main(["init", model, data]) == 0
    assert cli.main(["show", "job.yaml"]) == 0
    return load_job(Path("job.yaml")).job


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["init", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "    fix: " in told.err
    return told.err


# From a model and a file to a run -----------------------------------------------------------------


@pytest.mark.slow
def test_the_job_trains() -> None:
    job = init("tiny", write_rows("qa.jsonl", *questions(120)))
    assert (job.trains, job.data.sequence_length, job.save.directory) == (
        "full fine-tune", 64, "runs/qa",
    )  # fmt: skip
    loaded = load_job(Path("job.yaml"), ["train.steps=2", "evaluate.samples=0"])
    report = train(resolve_here(loaded, runs_here=True).job)
    assert report is not None
    assert report.finished
    assert [*report.evaluation] == ["qa"]
    assert (Path("runs/qa") / "result").is_dir()


@pytest.mark.slow
def test_a_model_with_an_encoder_trains() -> None:
    encoder_decoder.write(Path("t5"), "flan_t5")
    job = init("./t5", write_rows("qa.jsonl", *questions(12)))
    assert job.data.train[0].format == "source_target"
    assert job.data.target_length == 64
    loaded = load_job(Path("job.yaml"), ["train.steps=2"])
    report = train(resolve_here(loaded, runs_here=True).job)
    assert report is not None
    assert report.finished


def test_the_file_says_what_was_seen_and_why() -> None:
    job = init("tiny", write_rows("qa.jsonl", *questions(120)))
    text = Path("job.yaml").read_text(encoding="utf-8")
    assert "#   model: llama, a decoder, 109 thousand parameters, context 4,096 tokens" in text
    assert "#   data: 120 rows; instruction, found among the columns 'Question', 'Answer'" in text
    assert "columns: {instruction: Question, output: Answer}" in text
    assert "# Tokens of 120 sampled rows: half have up to 41, 95 % up to 43, the longest 43" in text
    assert "# Forecast on this machine: a rank takes " in text
    assert "Suggested strategy" not in text  # one rank has no choice
    assert str(Path.cwd().parent) not in text
    assert max(map(len, text.splitlines())) <= 100
    assert job.data.eval.share == 0.1  # type: ignore[union-attr]
    assert job.data.train[0].columns.output == "Answer"


def test_text_that_is_longer_than_the_context_is_split() -> None:
    Path("book.txt").write_text("\n\n".join(["A paragraph. " * 800] * 6), encoding="utf-8")
    job = init("tiny", "book.txt")
    assert (job.data.sequence_length, job.data.train[0].overflow) == (4096, "split")
    assert job.train.epochs == 1
    assert "between blank lines" in Path("job.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("lengths", "stop", "length"), [((9, 90), "none", 128), ((40, 40), "required", 40)]
)
def test_token_ids_without_an_end(lengths: tuple[int, int], stop: str, length: int) -> None:
    rows = [{"input_ids": [65 + n % 9] * lengths[n % 2]} for n in range(20)]
    job = init("tiny", write_rows("ids.jsonl", *rows))
    assert (job.data.train[0].stop, job.data.sequence_length) == (stop, length)


def test_a_tokenizer_without_a_chat_template_is_given_one() -> None:
    path = tiny.make()
    for file in path.iterdir():
        target = Path("bare") / file.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(file.read_bytes())
    settings = json.loads(Path("bare/tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    Path("bare/tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    Path("bare/chat_template.jinja").unlink(missing_ok=True)
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    job = init("./bare", write_rows("talks.jsonl", {"messages": turns}, {"messages": turns}))
    assert job.data.chat_template == "chatml"  # whose tokens it has


# Large models, and machines -----------------------------------------------------------------------


def test_a_large_model_is_adapted_without_its_tokenizer() -> None:
    job = init(BIG, write_rows("qa.jsonl", *questions(30)))
    text = Path("job.yaml").read_text(encoding="utf-8")
    assert job.trains == "lora"
    assert "# Not measured: the tokenizer isn't available here" in text
    assert "# It doesn't fit: needs " in text
    assert "# What would: " in text


def test_a_strategy_that_fits_is_written_where_the_default_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Machine(cores=96, gpus=6, gpu_name="NVIDIA A100-SXM4-80GB", memory=1 << 40)
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: here))
    text = starter_job(BIG, write_rows("qa.jsonl", *questions(300)), Path("job.yaml"))
    Path("job.yaml").write_text(text, encoding="utf-8")
    loaded = load_job(Path("job.yaml"))
    assert loaded.origin(("strategy", "type")).startswith("job.yaml:")
    assert "# Suggested strategy: " in text
    job = resolve_here(loaded).job
    assert (job.launch.processes, job.train.global_batch % 6) == (6, 0)


def test_quantized_files_are_told() -> None:
    Path("model").mkdir()
    for file in tiny.make().iterdir():
        (Path("model") / file.name).write_bytes(file.read_bytes())
    config = json.loads(Path("model/config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    Path("model/config.json").write_text(json.dumps(config), encoding="utf-8")
    assert init("model", write_rows("qa.jsonl", *questions(10))).trains == "lora"
    assert "# The files are quantized (gptq)." in Path("job.yaml").read_text(encoding="utf-8")


# Refusals -----------------------------------------------------------------------------------------


def test_a_file_is_never_replaced_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text("mine", encoding="utf-8")
    told = refused(capsys, "tiny", write_rows("qa.jsonl", *questions(9)))
    assert "error: --out: job.yaml is there already" in told
    assert "--force" in told
    assert Path("job.yaml").read_text(encoding="utf-8") == "mine"
    assert cli.main(["init", "tiny", "qa.jsonl", "--out", "other.yaml"]) == 0
    assert cli.main(["init", "tiny", "qa.jsonl", "--force"]) == 0
    assert Path("job.yaml").read_text(encoding="utf-8").startswith("# A first job")


def test_what_can_not_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows("qa.jsonl", *questions(9))
    assert "can't be written: No such file" in refused(capsys, "tiny", data, "--out", "no/job.yaml")
    assert "is a folder" in refused(capsys, "tiny", data, "--out", ".")


def test_a_full_disk_takes_nothing_and_costs_nothing(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, target = write_rows("qa.jsonl", *questions(9)), small_disk / "job.yaml"
    target.write_text("mine")
    with (small_disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert "No space left" in refused(capsys, "tiny", data, "--out", str(target), "--force")
    assert "No space left" in refused(capsys, "tiny", data, "--out", str(small_disk / "other.yaml"))
    assert sorted(each.name for each in small_disk.iterdir()) == ["filler", "job.yaml"]
    assert target.read_text() == "mine"


def test_columns_for_another_kind_of_training_are_said_not_to_be_read() -> None:
    row = {"text": "What is this? <image>", "image": "a.png"}
    assert cli.main(["init", "tiny", write_rows("seen.jsonl", *[row] * 9)]) == 0
    text = Path("job.yaml").read_text()
    assert "not read: 'image'. Texts are trained on: no media, no preferences" in text
    row = {"instruction": "a", "output": "b", "chosen": "b", "rejected": "c"}
    assert cli.main(["init", "tiny", write_rows("dpo.jsonl", *[row] * 9), "--force"]) == 0
    assert "not read: 'rejected'." in Path("job.yaml").read_text()
    assert cli.main(["init", "tiny", write_rows("qa.jsonl", *questions(9)), "--force"]) == 0
    assert "not read" not in Path("job.yaml").read_text()


def test_what_it_says_to_run_next_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my jobs").mkdir()
    data = write_rows("qa.jsonl", *questions(9))
    assert cli.main(["init", "tiny", data, "--out", "my jobs/a.yaml"]) == 0
    assert "  shardtune train 'my jobs/a.yaml'\n" in capsys.readouterr().out
    assert "`shardtune train 'my jobs/a.yaml'`" in Path("my jobs/a.yaml").read_text()


def test_a_missing_model_or_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows("qa.jsonl", *questions(9))
    assert "did you mean qa.jsonl?" in refused(capsys, "tiny", "qs.jsonl")
    assert "there is no folder './modle'" in refused(capsys, "./modle", data)
    assert "'nobody/nothing' is neither in the catalogue" in refused(capsys, "nobody/nothing", data)
    assert "write its hub id, meta-llama" in refused(capsys, "llama-3.1-8b", data)
    Path("bare").mkdir()
    Path("bare/config.json").write_text(json.dumps(find_model("gpt2").config), encoding="utf-8")
    assert "has no tokenizer" in refused(capsys, "./bare", data)
    assert not Path("job.yaml").exists()


def test_columns_that_make_no_format_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "tiny", write_rows("odd.jsonl", {"a": 1, "b": "x"}))
    assert "it has 'a' (int), 'b' (text); looked for messages or conversations" in told
