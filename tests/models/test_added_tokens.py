"""New tokens: the tokenizer knows them, the model has rows for them, and something trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardtune.config.job import IA3, Adapter, LoRA, ModelSection, NoAdapter, TrainSection
from shardtune.data.prepared_cache import fingerprint
from shardtune.errors import ModelError
from shardtune.models import tiny
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.load import (
    check_fits_data,
    check_weights,
    load_base,
)
from shardtune.models.model_files import ModelFiles
from tests.models.families import write

NEW = ("<|tool|>", "<|answer|>", "<|end|>")
SAVED = LoRA(rank=2, modules_to_save=("embed_tokens", "lm_head"))


def folder(path: Path, family: str, rows: int = tiny.VOCABULARY, **changes: Any) -> str:
    """A model of `family` with tiny's tokenizer, and `rows` rows in its embedding."""
    write(path, family, vocab_size=rows, **changes)
    tiny.tokens().save_pretrained(path)
    return str(path)


def plan(name: str, adapter: Adapter, **changes: Any) -> PretrainedModelBuilder:
    train = TrainSection(precision=changes.pop("precision", "fp32"))
    return PretrainedModelBuilder(
        ModelFiles(ModelSection(name=name, add_tokens=NEW, **changes)), adapter, train
    )


# The tokenizer -----------------------------------------------------------------------------------


def test_the_tokenizer_has_them_as_special_tokens() -> None:
    tokenizer = ModelFiles(ModelSection(name="tiny", add_tokens=NEW)).tokenizer
    assert tokenizer("a<|end|>b")["input_ids"] == [97, 262, 98]
    assert tokenizer.decode([97, 262, 98], skip_special_tokens=True) == "ab"
    plain = ModelFiles(ModelSection(name="tiny")).tokenizer
    assert fingerprint(tokenizer) != fingerprint(plain), "or prepared data would be taken for new"


def test_an_answer_may_end_with_one() -> None:
    section = ModelSection(name="tiny", add_tokens=NEW, stop_tokens=("<|end|>",))
    assert ModelFiles(section).stop_ids == {262}


def test_tokens_that_are_there_or_named_twice_are_refused() -> None:
    section = ModelSection(name="tiny", add_tokens=("<|im_end|>", "<|new|>", "<|new|>"))
    with pytest.raises(ModelError) as caught:
        _ = ModelFiles(section).tokenizer
    first, second = caught.value.problems
    assert first.place == "model.add_tokens.0"
    assert first.fact == "'<|im_end|>' is a token of this model already (id 259)"
    assert second.place == "model.add_tokens.2"
    assert second.fact == "'<|new|>' is named twice"


# The model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_rows_grow_and_start_as_the_mean(tmp_path: Path, family: str) -> None:
    section = ModelSection(name=folder(tmp_path, family), add_tokens=NEW)
    state = torch.get_rng_state()
    model = load_base(ModelFiles(section), "fp32")
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"
    own = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == ModelFiles(section).config.vocab_size == 263
    pairs = [
        (model.get_input_embeddings().weight, own.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, own.get_output_embeddings().weight),
    ]
    for ours, theirs in pairs:
        assert torch.equal(ours[:260], theirs)
        expected = theirs.detach().double().mean(0).float()
        assert torch.equal(ours[260:], expected.expand(3, -1))
    assert (pairs[0][0] is pairs[1][0]) == (pairs[0][1] is pairs[1][1]), "tied as before"


@torch.no_grad()
def test_a_new_token_takes_no_probability_from_the_others(tmp_path: Path) -> None:
    section = ModelSection(name=folder(tmp_path, "llama"), add_tokens=NEW)
    ids = torch.arange(40).unsqueeze(0)
    new = load_base(ModelFiles(section), "fp32")(ids).logits.softmax(-1)[..., 260:]
    # The mean of the logits never gives more than the mean of the probabilities, 1/260.
    assert 0 < new.max() <= 1 / 260


CASES: dict[str, tuple[str, Adapter, dict[str, Any]]] = {
    "all": ("llama", NoAdapter(), {}),
    "all-tied": ("qwen2", NoAdapter(), {}),
    "lora": ("llama", SAVED, {}),
    "lora-bf16": ("llama", SAVED, {"precision": "bf16"}),
    "lora-tied": ("qwen2", LoRA(rank=2, modules_to_save=("embed_tokens",)), {}),
    "lora-tied-both": ("qwen2", SAVED, {}),
    "int8": ("llama", SAVED, {"quantization": "int8"}),
    "nf4-bf16": ("qwen2", SAVED, {"quantization": "nf4", "precision": "bf16"}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_whole_and_in_parts_are_the_same_bit_for_bit(tmp_path: Path, case: str) -> None:
    family, adapter, changes = CASES[case]
    if changes.get("quantization") == "nf4":
        pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    chosen = plan(folder(tmp_path, family), adapter, **changes)
    whole: Any = chosen.whole("cpu")
    parts: Any = chosen.in_parts("cpu", lambda part: None)
    one, other = dict(whole.named_parameters()), dict(parts.named_parameters())
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert weight.dtype == other[name].dtype, name
        assert torch.equal(weight, other[name]), name
        assert weight.requires_grad == other[name].requires_grad, name
    trained = {name for name, weight in one.items() if weight.requires_grad and len(weight) == 263}
    assert len(trained) == (1 if family == "qwen2" else 2), "tied ones are one"


def test_spare_rows_are_used_first(tmp_path: Path) -> None:
    section = ModelSection(name=folder(tmp_path, "llama", rows=263), add_tokens=NEW)
    assert ModelFiles(section).config.vocab_size == 263
    own = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(load_base(ModelFiles(section), "fp32").lm_head.weight, own.lm_head.weight)
    said = str(ModelFiles(section).growth)
    assert said == "3 new of 263 tokens; the embedding has 263 rows, so it stays as it is"
    more = section.model_copy(update={"add_tokens": (*NEW, "<|more|>")})
    assert load_base(ModelFiles(more), "fp32").lm_head.weight.shape[0] == 264
    assert "grows from 263 to 264 rows" in str(ModelFiles(more).growth)


def test_growth_does_not_hide_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    section = ModelSection(name=folder(tmp_path, "llama", rows=200), add_tokens=NEW)
    with pytest.raises(ModelError, match="the tokenizer has 263 tokens, the model embeds 200"):
        check_fits_data(ModelFiles(section), 32)


# What trains them --------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, Adapter, str]] = {
    "untied": ("llama", LoRA(modules_to_save=("embed_tokens",)), "[embed_tokens, lm_head]"),
    "another": ("llama", LoRA(modules_to_save=("norm",)), "[norm, embed_tokens, lm_head]"),
    "tied": ("qwen2", LoRA(modules_to_save=("norm",)), "[norm, embed_tokens]"),
    "gpt2": ("gpt2", LoRA(targets=("c_attn",), modules_to_save=("ln_f",)), "[ln_f, wte]"),
    "ia3": ("llama", IA3(), "[embed_tokens, lm_head]"),
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_nothing_trains_are_refused(tmp_path: Path, case: str) -> None:
    family, adapter, fix = REFUSED[case]
    section = ModelSection(name=folder(tmp_path, family), add_tokens=NEW)
    with pytest.raises(ModelError) as caught:
        check_weights(ModelFiles(section), adapter)
    (problem,) = caught.value.problems
    assert problem.place == "adapter.modules_to_save"
    assert "rows of new tokens (3) in " in problem.fact
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("llama", SAVED),
        ("llama", NoAdapter()),
        ("qwen2", LoRA(modules_to_save=("model.embed_tokens",))),
        ("qwen2", LoRA(modules_to_save=("lm_head",))),
    ],
)
def test_rows_that_are_trained_are_not(tmp_path: Path, family: str, adapter: Adapter) -> None:
    section = ModelSection(name=folder(tmp_path, family), add_tokens=NEW)
    check_weights(ModelFiles(section), adapter)
