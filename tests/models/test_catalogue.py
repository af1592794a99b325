"""What a model's name means, and what is said when it means nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shardtune.errors import ModelError
from shardtune.models.catalogue import BUILT_IN, pull, resolve


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_built_in_name_is_made_once_in_the_cache(tmp_path: Path) -> None:
    assert BUILT_IN["tiny"].cached is None
    folder = Path(resolve("tiny"))
    assert folder.is_relative_to(tmp_path / "cache" / "shardtune")
    assert (folder / "config.json").is_file()
    assert BUILT_IN["tiny"].cached == folder == Path(resolve("tiny"))


def test_a_built_in_name_comes_before_a_folder(tmp_path: Path) -> None:
    model_folder(tmp_path / "tiny")
    assert resolve("tiny") != str(tmp_path / "tiny")
    assert resolve("./tiny") == str(tmp_path / "tiny")


def test_a_folder_becomes_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "models" / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("models/mine", "./models/mine/", str(folder), "~/models/mine"):
        assert resolve(name) == str(folder)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "bert-base-uncased",
        "org/model-1.5_B",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "someone/tiny",
    ],
)
def test_a_hub_id_stays_as_it_is(name: str) -> None:
    assert resolve(name) == name


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("gemma-2-9b-it", "google/gemma-2-9b-it"),
        ("vicuna-7b-v1.5", "lmsys/vicuna-7b-v1.5"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
    ],
)
def test_a_shape_is_not_taken_for_a_model(name: str, full: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(name)
    (problem,) = caught.value.problems
    assert problem.fix == f"write its hub id, {full}, or a folder"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Tiny", "tiny"),
        ("tinny", "tiny"),
        ("smollm2-135m-instuct", "smollm2-135m-instruct"),
        ("SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("smollm2-135m", "smollm2-135m-instruct"),
    ],
)
def test_a_misspelt_built_in_name_is_not_taken_for_a_hub_id(name: str, near: str) -> None:
    for refuse in (resolve, pull):
        with pytest.raises(ModelError) as caught:
            refuse(name)
        (problem,) = caught.value.problems
        assert name in problem.fact
        assert f"did you mean {near}?" in problem.fix


@pytest.mark.parametrize(
    "name", ["./nothing", "/nothing/here", "~/nothing", "~nobody-at-all/x", "a/b/c", "../x", "x/"]
)
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="there is no folder") as caught:
        resolve(name)
    assert caught.value.problems[0].place == "model.name"
    assert repr(name) in str(caught.value)


def test_a_path_with_a_typo_names_its_neighbour(tmp_path: Path) -> None:
    model_folder(tmp_path / "models" / "llama")
    with pytest.raises(ModelError, match=r"did you mean models/llama\?"):
        resolve("./models/lama")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"'empty' holds no config\.json"):
        resolve("empty")


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge it into its model first"):
        resolve("adapter")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match=r"'model\.gguf' is a file"):
        resolve("model.gguf")


@pytest.mark.parametrize("name", ["my model", "org/name:tag", "", "naïve", "a\0b", "x" * 5000])
def test_a_name_that_can_mean_nothing(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(name)
    (problem,) = caught.value.problems
    assert problem.place == "model.name"
    assert problem.fix


def test_pull_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the built-in models are tiny, smollm2-135m-instruct"):
        pull("gpt2")
    with pytest.raises(ModelError, match="tiny is not made from a file"):
        pull("tiny", tmp_path / "x.whl")


def test_pull_makes_what_is_made_without_a_download() -> None:
    assert pull("tiny") == BUILT_IN["tiny"].cached


def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"file/shardtune.*can't be written") as caught:
        resolve("tiny")
    assert "XDG_CACHE_HOME" in caught.value.problems[0].fix


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # the weights take 438,544 bytes
    try:
        with pytest.raises(ModelError, match=r"tiny-v1: can't be written: .*File too large"):
            resolve("tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path for path in tmp_path.glob("cache/shardtune/models/*") if path.is_dir()] == []
    assert Path(resolve("tiny")).is_dir()


def test_every_built_in_model_says_what_it_is() -> None:
    for name, model in BUILT_IN.items():
        assert model.name == name
        assert all((model.description, model.size, model.licence, model.source))
        assert "\n" not in model.description


def test_the_catalogue_answers_without_torch() -> None:
    code = (
        "import sys; from shardtune.models.catalogue import BUILT_IN, resolve\n"
        "assert resolve('org/model') == 'org/model' and not BUILT_IN['tiny'].cached\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'gguf', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_pipe_among_the_files_of_a_model_is_named(tmp_path: Path) -> None:
    model_folder(tmp_path / "piped")
    os.mkfifo(tmp_path / "piped" / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is a named pipe"):
        resolve(str(tmp_path / "piped"))
