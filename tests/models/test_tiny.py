"""The built-in tiny model: the same bits everywhere, and an ordinary Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from shardtune.models import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return tiny.make()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_the_weights_never_change() -> None:
    """If this fails the recipe changed: give `TINY_FOLDER` a new number, then put the new sum here.

    The sum is that of the first version, from torch 2.13 on x86-64.
    """
    digest = hashlib.sha256()
    for name, tensor in tiny.weights().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert tiny.TINY_FOLDER == "tiny-v1"
    assert digest.hexdigest() == "42d50b4309f789fc9094d501a311648062e0f74a2be5f4dc37885b1c08087daf"


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    tiny.weights()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_weights_are_real_whatever_the_default_device_and_dtype() -> None:
    expected = tiny.weights()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = tiny.weights()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_transformers_finds_every_weight(folder: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    # 260·64 embeddings, 2 layers of 46,208 (attention 12,288, MLP 33,792, norms 128), norm 64.
    assert sum(p.numel() for p in model.parameters()) == 260 * 64 + 2 * 46_208 + 64 == 109_120
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    written = tiny.weights()
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(tensor, written[name]), name


def test_it_starts_from_an_even_guess_that_depends_on_the_context(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = torch.tensor([list(b"The first letter of a text changes the last logits.")])
    other = text.clone()
    other[0, 0] = ord("A")
    with torch.no_grad():
        loss = model(text, labels=text).loss.item()
        moved = (model(text).logits - model(other).logits)[0, -1].abs().max().item()
    assert loss == pytest.approx(5.56, abs=0.2)  # ln 260 is 5.56: no byte is preferred
    assert moved > 0.01  # 0.17 was seen; a leak of this size can't hide in a tolerance


def test_the_folder_holds_what_other_tools_look_for(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 4096
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.eos_token_id, generation.pad_token_id) == (259, 256)
    weights_mode = (folder / "model.safetensors").stat().st_mode
    assert weights_mode == (folder / "config.json").stat().st_mode


def test_the_second_call_writes_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[2]))
    before = (folder / "config.json").stat().st_mtime_ns
    assert tiny.make() == folder
    assert (folder / "config.json").stat().st_mtime_ns == before


def test_the_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == 260
    special = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(special) == [256, 257, 258, 259]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|im_end|>")
    assert tokenizer.encode("a<|im_end|>b") == [97, 259, 98]
    assert tokenizer.decode([97, 258, 259, 98], skip_special_tokens=True) == "ab"


@settings(deadline=None)  # a busy machine is no failure
@given(st.text())
def test_a_token_is_a_byte(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    if not any(token in text for token in tiny.SPECIAL_TOKENS):
        assert ids == list(text.encode())


def test_every_byte_has_its_token(tokenizer: Any) -> None:
    text = "".join(chr(point) for point in range(0x800)) + "  12 .\r\n\t日本🙂\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(list(range(256))) == tiny._byte_symbols()
    assert len(set(tiny._byte_symbols())) == 256


def test_the_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Yes?"},
    ]
    written = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n Hi\n<|im_end|>\n"
        "<|im_start|>assistant\nYes?<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == written
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == written + "<|im_start|>assistant\n"


def test_the_chat_template_refuses_a_role_that_it_does_not_know(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="system, user and assistant, not sytem"):
        tokenizer.apply_chat_template([{"role": "sytem", "content": "x"}], tokenize=False)
