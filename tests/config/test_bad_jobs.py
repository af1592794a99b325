"""What people get wrong: each names its place, the fact and the fix, and writes nothing.

The tables are the list; a row is a working directory with one thing wrong in it, trained.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardtune.cli.main import main
from tests.jobs import ENVIRONMENT, LINE, job_text

ROOT = Path(__file__).resolve().parents[2]
CANARY = "touch canary"


@dataclass(frozen=True)
class Bad:
    """A working directory with a mistake in it, and fragments of what has to be said about it."""

    place: str
    fact: str
    fix: str
    job: str | bytes = job_text()
    files: dict[str, str | bytes] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    model: Callable[[Path], None] | None = None
    """Spoils a copy of the tiny model, which the job names as ./model."""

    def lay_out(self, folder: Path) -> None:
        good = rows({"text": "to be"}, {"text": "or not"})
        for name, content in {"good.jsonl": good, **self.files, "job.yaml": self.job}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        if self.model is not None:
            from shardtune.models.catalogue import resolve

            shutil.copytree(resolve("tiny"), folder / "model")
            self.model(folder / "model")


def rows(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def data(path: str, format: str, more: str = "", *, section: str = "") -> str:
    """A job that trains on one file."""
    source = f"{{path: {path}, format: {format}{more}}}"
    return job_text(data=f"{{train: [{source}], sequence_length: 64{section}}}")


def at(section: str, key: str = "") -> str:
    return f"job.yaml:{LINE[section]}: {section}{key}"


# Jobs that are refused before anything heavy is imported ----------------------------------------

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)

JOBS = {
    "misspelt key": Bad(
        at("train", ".learning_rat"), "unknown key", "did you mean 'learning_rate'?",
        job_text(train="{learning_rat: 1e-4}"),
    ),
    "misspelt section": Bad(
        "job.yaml:7: lunch", "unknown key", "did you mean 'launch'?",
        job_text(lunch="{processes: 2}"),
    ),
    "key of another section": Bad(
        at("train", ".rank"), "unknown key here", "did you mean 'adapter.rank'?",
        job_text(train="{rank: 8}"),
    ),
    "key of another type": Bad(
        at("adapter", ".rank"), "unknown key here", "it belongs to `type: lora`",
        job_text(adapter="{type: none, rank: 8}"),
    ),
    "misspelt type": Bad(
        at("adapter", ".type"), "is 'lorra'", "did you mean 'lora'?",
        job_text(adapter="{type: lorra}"),
    ),
    "text for a number": Bad(
        at("train", ".steps"), 'is "ten"; it must be a whole number', "give a whole number",
        job_text(train="{steps: ten}"),
    ),
    "number for text": Bad(
        at("model", ".name"), "is 7; it must be text", "put it in quotes",
        job_text(model="{name: 7}"),
    ),
    "word for a section": Bad(
        at("model"), 'is "tiny"; it must be a section', "`key: value` lines",
        job_text(model="tiny"),
    ),
    "out of range": Bad(
        at("train", ".learning_rate"), "is -1; it must be more than 0", "give more than 0",
        job_text(train="{learning_rate: -1}"),
    ),
    "not finite": Bad(
        at("train", ".learning_rate"), "is NaN; it must be a finite number", "give a finite",
        job_text(train="{learning_rate: .nan}"),
    ),
    "no data": Bad("job.yaml:1: data", "is missing", "add `data:`", "model: {name: tiny}\n"),
    "no data sets": Bad(
        at("data", ".train"), "is an empty list", "give a list of at least 1",
        job_text(data="{train: []}"),
    ),
    "unknown format": Bad(
        at("data", ".train.0.format"), 'is "chatt"; it must be', "did you mean 'chat'?",
        data("good.jsonl", "chatt"),
    ),
    "key written twice": Bad(
        "job.yaml:7: train", "written twice (first on line 4)", "keep one of the two",
        job_text() + "train: {steps: 9}\n",
    ),
    "broken syntax": Bad(
        "job.yaml:5", "not valid YAML: while parsing a flow mapping from line 4 on, expected ','",
        "fix the syntax",
        job_text(train="{steps: 2"),
    ),
    "empty file": Bad("job.yaml", "is empty", "at least `model:` and `data:`", ""),
    "a list": Bad("job.yaml", "is not a mapping", "at least `model:` and `data:`", "- model\n"),
    "not UTF-8": Bad(
        "job.yaml:2", "is not UTF-8 text (byte 0xff)", "save it as UTF-8", b"a: 1\nb: \xff\n"
    ),
    "a NUL byte": Bad(
        "job.yaml:1", "it holds the character U+0000", "take it out", b"model: \0\n"
    ),
    "huge file": Bad("job.yaml", "more than 262,144 bytes", "job file instead", b"#" * (1 << 20)),
    "data file for a job": Bad(
        "job.yaml:2", "not valid YAML", "fix the syntax", rows({"text": "a"}, {"text": "b"})
    ),
    "code in a tag": Bad(
        at("model"), "the tag !!python/object/apply:os.system is refused", "remove the tag",
        job_text(model=f"!!python/object/apply:os.system ['{CANARY}']"),
    ),
    "code in a key": Bad(
        "job.yaml:7", "a key must be a word", "write `name: value`",
        job_text() + f"? !!python/object/apply:os.system ['{CANARY}']\n: 1\n",
    ),
    "code in an override": Bad(
        "command line: train.steps", "the tag !!python/object/new:os.system", "remove the tag",
        arguments=(f"train.steps=!!python/object/new:os.system ['{CANARY}']",),
    ),
    "alias bomb": Bad("job.yaml:", "more than 20,000 values", "really a job file?", BOMB),
    "deep nesting": Bad(
        "job.yaml", "far more than 40 levels deep", "really a job file?", "[" * 10_000
    ),
    "endless alias": Bad("job.yaml:1", "more than 40 levels", "write it out", "a: &a [*a]\n"),
    "keys that drive the terminal": Bad(
        "job.yaml:7: \\x1b[2Jx", "unknown key", "known here: model, adapter",
        job_text() + '"\\e[2Jx": 1\n',
    ),
    "misspelt override": Bad(
        "command line: trian", "unknown key", "did you mean 'train'?",
        arguments=("trian.steps=3",),
    ),
    "override without a value": Bad(
        "command line", "'train.steps' is not key=value", "write train.steps=10",
        arguments=("train.steps",),
    ),
    "override of no list member": Bad(
        "command line: data.train.3.path", "is a list of 1", "use a number from 0 to 0",
        arguments=("data.train.3.path=x",),
    ),
    "steps and epochs": Bad(
        "command line: train.steps", "both steps (2) and epochs (1.0) are given", "keep one",
        arguments=("train.steps=2", "train.epochs=1"),
    ),
    "warmup longer than the run": Bad(
        at("train", ".warmup_steps"), "5 steps of warmup in a run of 5", "warm up for fewer steps",
        job_text(train="{steps: 5, warmup_steps: 5}"),
    ),
    "micro-batch too large": Bad(
        at("train", ".micro_batch"), "micro_batch(4) x processes(1) = 4 > global_batch(2)",
        "lower micro_batch", job_text(train="{global_batch: 2, micro_batch: 4}"),
    ),
    "more ranks than rows": Bad(
        at("launch", ".processes"), "5 processes share 2 rows a step", "start fewer processes",
        job_text(launch="{processes: 5}"),
    ),
    "one file on both sides": Bad(
        at("data", ".eval"), "good.jsonl is both trained on and held out", "a file of their own",
        job_text(data="{train: [{path: good.jsonl, format: completion}], "
                      "eval: [{path: good.jsonl, format: completion}]}"),
    ),
    "directory with a run in it": Bad(
        at("save", ".directory"), "runs/bad holds a run already", "--overwrite",
        files={
            "runs/bad/job.yaml": "model: {name: tiny}\n", "runs/bad/environment.json": ENVIRONMENT
        },
    ),
    "directory with somebody's files in it": Bad(
        at("save", ".directory"), "runs/bad holds job.yaml, thesis.txt, which no run of ours wrote",
        "a folder that is empty or doesn't exist yet",
        files={"runs/bad/job.yaml": "model: {name: tiny}\n", "runs/bad/thesis.txt": "x"},
    ),
    "directory of the data": Bad(
        at("save", ".directory"), ". is the folder of the data (good.jsonl)",
        "a folder of its own", job_text(save="{directory: .}"),
    ),
    "root of a repository": Bad(
        at("save", ".directory"), "runs/bad is the root of a repository", "a folder of its own",
        files={"runs/bad/.git": "gitdir: elsewhere"},
    ),
    "directory that is a file": Bad(
        at("save", ".directory"), "runs/bad is a file", "name a folder",
        files={"runs/bad": "a file"},
    ),
    "nothing to resume": Bad(
        "runs/bad", "is no run directory", "name the `save.directory` of a run",
        arguments=("--resume",),
    ),
    "resumed with another job": Bad(
        "train.global_batch", "is 2, but the run was begun with 4", "set it back",
        files={"runs/bad/job.yaml": job_text(train="{steps: 2, global_batch: 4}")},
        arguments=("--resume",),
    ),
    "unknown option": Bad(
        "shardtune train", "unknown option: --overwite", "`shardtune train --help`",
        arguments=("--overwite",),
    ),
}  # fmt: skip

# Jobs for which the model or the data has to be looked at ---------------------------------------


def with_json(file: str, **values: Any) -> Callable[[Path], None]:
    """Changes a JSON file of the model, and puts code beside it that nobody may run."""

    def change(model: Path) -> None:
        content = json.loads((model / file).read_text(encoding="utf-8"))
        (model / file).write_text(json.dumps(content | values), encoding="utf-8")
        (model / "evil.py").write_text(f"import os\nos.system({CANARY!r})\n", encoding="utf-8")

    return change


class Malicious:
    """Unpickling it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (CANARY,)


def only_a_pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))


def no_tokenizer(model: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).unlink()


def escaping_template(model: Path) -> None:
    text = "{{ cycler.__init__.__globals__.os.system('" + CANARY + "') }}"
    (model / "chat_template.jinja").write_text(text, encoding="utf-8")


FOLDER = job_text(model="{name: ./model}")
NONE_LEFT = "fix them: no usable row is left"

INPUTS = {
    "model that is misspelt": Bad(
        "model.name", "'tinny' is no built-in model", "did you mean tiny?",
        job_text(model="{name: tinny}"),
    ),
    "model that isn't there": Bad(
        "model.name", "there is no folder './modle'", "correct the path",
        job_text(model="{name: ./modle}"),
    ),
    "model that is no name": Bad(
        "model.name", "'a b' is neither a built-in model, nor", "a hub id like",
        job_text(model="{name: a b}"),
    ),
    "model that is a file": Bad(
        "model.name", "'./good.jsonl' is a file, not a folder", "that holds config.json",
        job_text(model="{name: ./good.jsonl}"),
    ),
    "model without a config": Bad(
        "model.name", "holds no config.json", "in Hugging Face's format",
        FOLDER, {"model/notes.txt": "nothing"},
    ),
    "adapter for a model": Bad(
        "model.name", "holds no config.json", "merge it into its model first",
        FOLDER, {"model/adapter_config.json": "{}"},
    ),
    "broken config": Bad(
        "model.name", "is not a valid JSON file", "name a built-in model",
        FOLDER, model=lambda model: (model / "config.json").write_text("{") and None,
    ),
    "model with code of its own": Bad(
        "model.name", "runs Python code of its own: ['AutoConfig']", "trust_remote_code: true",
        FOLDER,
        model=with_json("config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"}),
    ),
    "tokenizer with code of its own": Bad(
        "model.name", "custom code which must be executed", "fix: ",
        FOLDER,
        model=with_json(
            "tokenizer_config.json", tokenizer_class="Evil",
            auto_map={"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]},
        ),
    ),
    "chat template with code": Bad(
        "the chat template", "can't write a question and its answer: ", "data.chat_template",
        job_text(model="{name: ./model}", data="{train: [{path: a.jsonl, format: chat}]}"),
        {"a.jsonl": rows({"messages": [{"role": "assistant", "content": "x"}]})},
        model=escaping_template,
    ),
    "no tokenizer": Bad(
        "model.name", "the folder './model' has no tokenizer: no tokenizer.json",
        "tokenizer.save_pretrained", FOLDER, model=no_tokenizer,
    ),
    "new token that is there": Bad(
        "model.add_tokens.0", "'<|im_end|>' is a token of this model already (id 259)",
        "leave it out", job_text(model="{name: tiny, add_tokens: ['<|im_end|>']}"),
    ),
    "new tokens that nothing trains": Bad(
        "adapter.modules_to_save", "rows of new tokens (1) in embed_tokens would never be trained",
        "modules_to_save: [norm, embed_tokens]",
        job_text(
            model="{name: tiny, add_tokens: ['<|a|>']}",
            adapter="{type: lora, modules_to_save: [norm]}",
        ),
    ),
    "tokenizer of another model": Bad(
        "model.name", "the tokenizer has 260 tokens, the model embeds 100", "belongs to the model",
        FOLDER, model=with_json("config.json", vocab_size=100),
    ),
    "more stages than layers": Bad(
        "strategy", "stages(3) x chunks(4) = 12 > 2 layers", "use at most 2 stages in all",
        arguments=(
            "strategy={type: pipeline, stages: 3, schedule: interleaved, chunks: 4}",
            "launch.processes=3",
        ),
    ),
    "sequence longer than the model": Bad(
        "data.sequence_length", "5000 tokens a row, but the model has positions for 4096",
        "at most 4096", arguments=("data.sequence_length=5000",),
    ),
    "unknown stop token": Bad(
        "model.stop_tokens", "'<eos>' is not a single token", "its special tokens: <|im_end|>",
        job_text(model="{name: tiny, stop_tokens: ['<eos>']}"),
    ),
    "file that isn't there": Bad(
        "godo.jsonl", "there is no such file (looked for", "did you mean good.jsonl?",
        data("godo.jsonl", "completion"),
    ),
    "folder that isn't there": Bad(
        "nowhere/a.jsonl", "nor the folder nowhere", "correct the path",
        data("nowhere/a.jsonl", "completion"),
    ),
    "folder without data": Bad(
        "folder", "there is no data file in it", "name JSONL, JSON, CSV",
        data("folder", "completion"), {"folder/a.py": "pass"},
    ),
    "split of a file": Bad(
        "good.jsonl", "is a file, which has no split 'test'", "leave split out",
        data("good.jsonl", "completion", ", split: test"),
    ),
    "unknown kind of file": Bad(
        "a.dat", "its format isn't recognised", "give it as JSONL", data("a.dat", "completion"),
        {"a.dat": b"\0\1\2"},
    ),
    "no Parquet": Bad(
        "a.parquet", "is no Parquet file: it starts with b'id,text\\n1,a\\n'", "fetch it again",
        data("a.parquet", "completion"), {"a.parquet": "id,text\n1,a\n"},
    ),
    "empty Parquet": Bad(
        "a.parquet", "is no Parquet file: it is empty", "fetch it again",
        data("a.parquet", "completion"), {"a.parquet": b""},
    ),
    "note of Git LFS": Bad(
        "a.parquet", "is not the data but Git LFS's note", "git lfs pull",
        data("a.parquet", "completion"),
        {"a.parquet": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"},
    ),
    "broken Parquet": Bad(
        "a.parquet", "can't be read as Parquet", "write the file again",
        data("a.parquet", "completion"), {"a.parquet": b"PAR1 and no more"},
    ),
    "broken CSV": Bad(
        "a.csv:2", "broken CSV: unexpected end of data", NONE_LEFT,
        data("a.csv", "completion"), {"a.csv": 'text\n"never closed\n'},
    ),
    "broken JSON": Bad(
        "a.jsonl:2:10", "broken JSON: Expecting value", "data.bad_rows: skip",
        data("a.jsonl", "completion"), {"a.jsonl": '{"text": "a"}\n{"text": \n'},
    ),
    "only broken rows, skipped": Bad(
        "a.jsonl:1:2", "1 of 1 rows can't be used", NONE_LEFT,
        data("a.jsonl", "completion", section=", bad_rows: skip"), {"a.jsonl": "{\n"},
    ),
    "UTF-16": Bad(
        "a.jsonl", "is UTF-16 text", "save it as UTF-8",
        data("a.jsonl", "completion"), {"a.jsonl": rows({"text": "a"}).encode("utf-16")},
    ),
    "Latin-1": Bad(
        "a.jsonl:1:11", "not UTF-8 text (byte 0xe9)", "save the file as UTF-8 (iconv",
        data("a.jsonl", "completion"), {"a.jsonl": '{"text": "é"}'.encode("latin-1")},
    ),
    "empty data file": Bad(
        "a.jsonl", "is empty: it holds no rows", "name a file with data",
        data("a.jsonl", "completion"), {"a.jsonl": "\n\n"},
    ),
    "wrong columns": Bad(
        "a.jsonl", "no row has the column 'instruction', the column 'output'",
        "columns: {instruction: instructon, output: response}",
        data("a.jsonl", "instruction"), {"a.jsonl": rows({"instructon": "a", "response": "b"})},
    ),
    "wrong format": Bad(
        "good.jsonl", "no row has the column 'messages'", "format: completion",
        data("good.jsonl", "chat"),
    ),
    "wrong column map": Bad(
        "good.jsonl", "no row has the column 'txet'", "columns: {text: text}",
        data("good.jsonl", "completion", ", columns: {text: txet}"),
    ),
    "a column map beside the usual names": Bad(
        "a.jsonl", "no row has the column 'foo'", "columns: {instruction: instruction}",
        data("a.jsonl", "instruction", ", columns: {instruction: foo}"),
        {"a.jsonl": rows({"instruction": "a", "input": "c", "output": "b"})},
    ),
    "a number for an answer": Bad(
        "a.jsonl:1", "'output' is int 3, not text", NONE_LEFT,
        data("a.jsonl", "instruction"), {"a.jsonl": rows({"instruction": "a", "output": 3})},
    ),
    "no trained token": Bad(
        "a.jsonl", "no trained token is left of its 1 rows", "something to learn",
        data("a.jsonl", "pretokenized"),
        {"a.jsonl": rows({"input_ids": [1, 2], "labels": [-100, -100]})},
    ),
    "prompt longer than the sequence": Bad(
        "a.jsonl", "1 have no trained token in their first 64", "the longest row has 122 tokens",
        data("a.jsonl", "instruction"),
        {"a.jsonl": rows({"instruction": "x" * 100, "output": "y"})},
    ),
    "every row dropped": Bad(
        "a.jsonl", "1 are longer than data.sequence_length (64)", "the longest row has 101 tokens",
        data("a.jsonl", "completion", ", overflow: drop"), {"a.jsonl": rows({"text": "x" * 100})},
    ),
    "every answer cut off": Bad(
        "a.jsonl", "a stop token is never trained", "raise data.sequence_length",
        data("a.jsonl", "completion"), {"a.jsonl": rows({"text": "x" * 100})},
    ),
    "stop token never trained": Bad(
        "a.jsonl", "none of its 1 documents ends with '<|im_end|>'", "end each row's ids with",
        data("a.jsonl", "pretokenized"), {"a.jsonl": rows({"input_ids": [1, 2, 3]})},
    ),
    "token that isn't there": Bad(
        "a.jsonl:1", "'input_ids' holds 999, but token ids go from 0 to 259", NONE_LEFT,
        data("a.jsonl", "pretokenized"), {"a.jsonl": rows({"input_ids": [1, 999]})},
    ),
    "labels of another length": Bad(
        "a.jsonl:1", "3 input_ids, but 2 labels", NONE_LEFT, data("a.jsonl", "pretokenized"),
        {"a.jsonl": rows({"input_ids": [1, 2, 3], "labels": [1, 2]})},
    ),
    "chat without an assistant": Bad(
        "a.jsonl:1", "no assistant turn", NONE_LEFT,
        data("a.jsonl", "chat"),
        {"a.jsonl": rows({"messages": [{"role": "user", "content": "x"}]})},
    ),
    "misspelt role": Bad(
        "a.jsonl:1", "the unknown role 'asistant': did you mean 'assistant'?", NONE_LEFT,
        data("a.jsonl", "chat"),
        {"a.jsonl": rows({"messages": [{"role": "asistant", "content": "x"}]})},
    ),
    "rows on both sides": Bad(
        "a.jsonl", "1 of its 2 documents stand in the evaluation set b.jsonl too: a.jsonl:2 is "
        "b.jsonl:1", "take them out of one of the two",
        job_text(data="{train: [{path: a.jsonl, format: completion}], "
                      "eval: [{path: b.jsonl, format: completion}]}"),
        {"a.jsonl": rows({"text": "x"}, {"text": "y"}), "b.jsonl": rows({"text": "y"})},
    ),
    "bad data for a run to replace": Bad(
        "a.jsonl", "is empty", "name a file with data", data("a.jsonl", "completion"),
        {"a.jsonl": "", "runs/bad/job.yaml": "old", "runs/bad/metrics.jsonl": "{}\n",
         "runs/bad/environment.json": ENVIRONMENT},
        arguments=("--overwrite",),
    ),
}  # fmt: skip

# Models that would fail only when their weights are read.
WEIGHTS = {
    "unknown adapter target": Bad(
        "adapter.targets.0", "the model has no linear layer 'q_porj'", "did you mean 'q_proj'?",
        job_text(adapter="{type: lora, targets: [q_porj]}"),
    ),
    "weights that are a pickle": Bad(
        "model.name", "safetensors", "safetensors", FOLDER, model=only_a_pickle
    ),
    "directory inside of a file": Bad(
        at("save", ".directory"), "runs is a file", "name a folder", files={"runs": "a file"}
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tiny model is generated once, and nobody's own cache is touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # The log of transformers goes to whatever was stderr when it was first imported: within
        # pytest that may be closed by now, and `logging` would complain about it.
        patch.setattr(logging, "raiseExceptions", False)
        yield


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def assert_told(bad: Bad, code: int | str | None, told: str) -> None:
    assert "Traceback" not in told
    assert f"error: {bad.place}" in told
    assert bad.fact in told
    assert "    fix: " in told
    assert bad.fix in told
    assert code == 2


def run(bad: Bad) -> int | str | None:
    """Trains the job of the working directory; returns the exit code."""
    try:
        return main(["train", "job.yaml", *bad.arguments])
    except SystemExit as ended:  # argparse leaves in this way
        return ended.code


ALL = JOBS | INPUTS | WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_mistake_is_told_and_nothing_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = ALL[name]
    bad.lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    code = run(bad)
    assert contents(tmp_path) == before
    assert_told(bad, code, capsys.readouterr().err)


def test_every_row_is_one_of_its_own() -> None:
    assert len(ALL) == len(JOBS) + len(INPUTS) + len(WEIGHTS) >= 35


def test_the_job_is_good_but_for_the_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Bad("", "", "").lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["data", "job.yaml"]) == 0
    said = capsys.readouterr()
    assert "error" not in said.err
    assert "truncated rows" in said.out
    assert " object at " not in said.out  # of Python, where a table should be


# In processes of their own ----------------------------------------------------------------------


def start(bad: Bad, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardtune", "train", "job.yaml", *bad.arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


# A name of the hub, and a machine that must not ask it.
NOT_ON_THE_HUB = Bad(
    "model.name", "'nobody/nothing' can't be loaded", "a hub id that this machine can reach",
    job_text(model="{name: nobody/nothing}"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "environment"),
    [
        pytest.param(JOBS["misspelt key"], {}, id="misspelt key"),
        pytest.param(JOBS["code in a tag"], {}, id="code in a tag"),
        pytest.param(JOBS["unknown option"], {}, id="unknown option"),
        pytest.param(NOT_ON_THE_HUB, {"HF_HUB_OFFLINE": "1"}, id="model that isn't on the hub"),
        pytest.param(
            JOBS["directory with a run in it"],
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            id="directory with a run in it, under torchrun",
        ),
    ],
)
def test_the_program_ends_as_it_should(
    bad: Bad, environment: dict[str, str], tmp_path: Path
) -> None:
    bad.lay_out(tmp_path)
    before = contents(tmp_path)
    done = start(bad, tmp_path, **environment)
    assert contents(tmp_path) == before
    assert_told(bad, done.returncode, done.stderr)
    assert done.stdout == ""


LIGHT = """
import os, sys, tempfile
from pathlib import Path
from tests.config.test_bad_jobs import JOBS, run
for bad in JOBS.values():
    with tempfile.TemporaryDirectory() as folder:
        bad.lay_out(Path(folder))
        os.chdir(folder)
        assert run(bad) == 2
print(sorted({"torch", "transformers", "datasets", "peft"} & sys.modules.keys()))
"""


def test_a_wrong_job_is_refused_before_anything_heavy_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
