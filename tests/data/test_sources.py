"""Folders, patterns, configurations and slices: what a path means besides one file."""

from __future__ import annotations

import json
import os
from time import monotonic

import datasets
import pytest

from shardtune.config.job import DataSection, Source, TrainSource
from shardtune.data.prepare import prepare
from shardtune.data.sources import open_source
from shardtune.errors import DataError
from shardtune.models import tiny
from tests.no_hub import lose_hub

STOPS = frozenset({tiny.END})
CARD = """---
configs:
- config_name: en
  data_files: [{split: train, path: en/train.jsonl}, {split: test, path: en/test.jsonl}]
- config_name: de
  data_files: [{split: train, path: de/train.jsonl}]
---
"""


def write(path, *words):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    return path


def texts(path, **settings):
    opened = open_source(Source(path=str(path), format="completion", **settings))
    return [row.value["text"] for part in opened.parts for row in part.rows()]


def refused(path, **settings):
    with pytest.raises(DataError) as caught:
        texts(path, **settings)
    (problem,) = caught.value.problems
    return problem.fact, problem.fix


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """What `datasets` writes goes to a folder of the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        datasets.disable_progress_bars()
        yield


@pytest.fixture(scope="module")
def languages(tmp_path_factory, library):
    """A folder that is laid out as a data set of the hub, with two configurations."""
    folder = tmp_path_factory.mktemp("hub") / "languages"
    write(folder / "en/train.jsonl", *(f"train {n}" for n in range(10)))
    write(folder / "en/test.jsonl", "test 0", "test 1", "test 2")
    write(folder / "de/train.jsonl", "Zug 0", "Zug 1")
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.mark.parametrize(
    ("config", "split", "expected"),
    [
        ("de", "train", ["Zug 0", "Zug 1"]),
        ("en", "test", ["test 0", "test 1", "test 2"]),
        ("en", "train[:20%]", ["train 0", "train 1"]),
        ("en", "train[-1:]+test[:1]", ["train 9", "test 0"]),
    ],
)
def test_a_configuration_and_a_slice(languages, config, split, expected):
    assert texts(languages, config=config, split=split) == expected


@pytest.mark.parametrize(
    ("settings", "fact", "fix"),
    [
        ({}, "it has several configurations: en, de", "config: en, beside its path"),
        ({"config": "dee"}, "it has no configuration 'dee'; it has en, de", "config: de, beside"),
        ({"config": "en", "split": "tests"}, "has no split 'tests'; it has train", "split: test"),
        ({"config": "en", "split": "train[:5"}, "split 'train[:5' is no split", "train[:1%]"),
    ],
)  # fmt: skip
def test_what_isn_t_there_is_answered_with_what_is(languages, settings, fact, fix):
    told = refused(languages, **settings)
    assert told[0].startswith(fact)
    assert fix in told[1]


def fill_cache(cache, *words):
    """What `datasets` leaves of a hub's data set `org/words` that it has loaded once."""
    rows = str(write(cache / "words.jsonl", *words))
    datasets.load_dataset("json", data_files=rows, split="train", cache_dir=str(cache))
    (info,) = (cache / "json").glob("*/*/*/dataset_info.json")
    hub = cache / "org___words" / "default" / info.parts[-3] / info.parts[-2]
    hub.parent.mkdir(parents=True)
    info.parent.rename(hub)
    (hub / "json-train.arrow").rename(hub / "words-train.arrow")


def test_a_hub_that_can_t_be_reached_is_not_waited_for(tmp_path, monkeypatch):
    """Its own client would retry for 24 s; what was loaded before is in the cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    fill_cache(tmp_path, "a", "b", "c")
    lose_hub(monkeypatch)
    begun = monotonic()
    assert texts("org/words") == ["a", "b", "c"]
    assert texts("org/words", split="train[:2]") == ["a", "b"]
    fact, fix = refused("nobody/nothing")
    assert fact.endswith("https://hub.invalid has no address here, and it isn't in the cache")
    assert "check the network" in fix
    fact, fix = refused("org/words", config="de")
    assert fact == "the cache has no configuration 'de'; it has default"
    assert fix.startswith("config: default, beside its path")
    assert monotonic() - begun < 12
    assert datasets.config.HF_HUB_OFFLINE is False, "the next hub may be there"


def test_the_hub_s_offline_mode_reads_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    fill_cache(tmp_path, "a", "b")
    lose_hub(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert texts("org/words") == ["a", "b"]
    assert "neither a file here nor" in refused("nobody/nothing")[0]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(10)),
        ("train[:3]", range(3)),
        ("train[4:6]", range(4, 6)),
        ("train[-2:]", range(8, 10)),
        ("train[:20%]", range(2)),
        ("train[:1]+train[9:]", (0, 9)),
    ],
)
def test_a_slice_of_a_file(tmp_path, split, expected):
    write(tmp_path / "a.jsonl", *(f"row {n}" for n in range(10)))
    assert texts(tmp_path / "a.jsonl", split=split) == [f"row {n}" for n in expected]


def test_a_slice_of_files_by_a_pattern(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", *(f"{name} {n}" for n in range(3)))
    assert texts(tmp_path / "*.jsonl", split="train[2:5]") == ["a 2", "b 0", "b 1"]
    told = refused(tmp_path / "*.jsonl", split="test")
    assert told[0] == "names files, which have no split 'test'"


@pytest.mark.parametrize(
    ("split", "fact", "fix"),
    [
        ("test[:3]", "is a file, which has no split 'test'", "leave split out"),
        ("train[20:]", "split 'train[20:]' holds none of its 10 rows", "take more rows"),
        ("train[5:5]", "split 'train[5:5]' holds none of its 10 rows", "take more rows"),
        ("train[5:3]", "split 'train[5:3]' holds none of its 10 rows", "take more rows"),
        ("train[:x]", "split 'train[:x]' is no slice of its 10 rows", "write it as train[:1%]"),
    ],
)
def test_no_slice_of_a_file(tmp_path, split, fact, fix):
    write(tmp_path / "a.jsonl", *(f"row {n}" for n in range(10)))
    told = refused(tmp_path / "a.jsonl", split=split)
    assert told[0].startswith(fact)
    assert fix in told[1]


def test_slices_of_a_saved_folder(tmp_path):
    both = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {n}" for n in range(count)]})
        for name, count in (("train", 10), ("test", 3))
    }
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "both"))
    both["train"].save_to_disk(str(tmp_path / "one"))
    assert texts(tmp_path / "both", split="train[:20%]") == ["train 0", "train 1"]
    assert texts(tmp_path / "both", split="test[1:]+train[9:]") == ["test 1", "test 2", "train 9"]
    assert texts(tmp_path / "one", split="train[8:]") == ["train 8", "train 9"]
    assert refused(tmp_path / "both", split="tset[:1]")[1] == "split: test"


def test_a_folder_of_files_is_read_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "b.jsonl", "three")
    write(tmp_path / "a" / "x.jsonl", "one", "two")
    (tmp_path / "notes.log").write_text("not data")
    assert texts(tmp_path) == ["one", "two", "three"]
    assert texts(f"{tmp_path}/*.jsonl") == ["three"]
    assert texts(f"{tmp_path}/**/*.jsonl") == ["one", "two", "three"]


def test_hidden_files_of_a_folder_are_left_alone(tmp_path):
    write(tmp_path / "a.jsonl", "one")
    write(tmp_path / ".ipynb_checkpoints" / "a-checkpoint.jsonl", "one")
    (tmp_path / "._a.jsonl").write_bytes(b"\0\5\x16\7")
    assert texts(tmp_path) == texts(f"{tmp_path}/**/*.jsonl") == ["one"]
    assert texts(f"{tmp_path}/.ipynb_checkpoints/*.jsonl") == ["one"]


def test_a_folder_with_a_test_file_trains_on_the_others(tmp_path, library):
    write(tmp_path / "train.jsonl", "one", "two")
    write(tmp_path / "test.jsonl", "held out")
    assert texts(tmp_path) == ["one", "two"]
    assert texts(tmp_path, split="test") == ["held out"]


def test_each_text_file_of_a_folder_is_a_document(tmp_path, tokenizer):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"{name}\n\nmore of {name}\n")
    source = TrainSource(path=str(folder), format="completion")
    section = DataSection(train=(source,))
    (prepared,) = prepare(section, tokenizer, STOPS, cache=tmp_path / "c", quiet=True).train
    assert prepared.report.documents == 2
    assert prepared.report.notes[0].startswith("each of its 2 files is a document")
    assert texts(folder, documents="line") == ["a", "more of a", "b", "more of b"]


def test_a_bad_row_of_a_folder_is_told_by_its_file(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", "one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": \n')
    section = DataSection(train=(TrainSource(path=str(tmp_path), format="completion"),))
    with pytest.raises(DataError) as caught:
        prepare(section, tokenizer, STOPS, cache=tmp_path / "c", quiet=True)
    assert caught.value.problems[0].place == f"{tmp_path}/b.jsonl:2:10"


def test_a_file_has_no_configuration(tmp_path):
    fact, _ = refused(write(tmp_path / "a.jsonl", "one"), config="en")
    assert fact == "is a file, which has no config 'en'"


def test_what_is_neither_a_file_nor_a_folder_is_called_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    fact, fix = refused(tmp_path / "pipe.jsonl")
    assert fact == "is a named pipe (FIFO), not a file"
    assert "did you mean" not in fix
    assert refused(tmp_path / "loop.jsonl")[0].startswith("is a link that leads nowhere")
    assert "no such file" in refused(tmp_path / "a\0b.jsonl")[0]
    assert "File name too long" in refused(tmp_path / ("x" * 300 + ".jsonl"))[0]
