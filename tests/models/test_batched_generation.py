"""Batched answers are those of `transformers.generate`, token by token."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from shardtune.config.job import ModelSection
from shardtune.core.model.document_boundaries import VARLEN_SINKS
from shardtune.engine.decode_graphs import DecodeGraphs
from shardtune.errors import ModelError
from shardtune.models import tiny
from shardtune.models.batched_generation import Completion, Sampling, Stopping, complete, nucleus
from shardtune.models.generate import generate_answers
from shardtune.models.load import load_base
from shardtune.models.log_likelihood import score_continuations, split_pair
from shardtune.models.model_files import ModelFiles
from shardtune.models.packed_attention import register
from tests.models import families

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
TEXTS = ["Once", "Once upon a time there was a dog", "A", "The cat said: what is it? It is", "Tom"]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_base(ModelFiles(ModelSection(name="tiny")), "fp32")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.tokens()


def by_transformers(model: Any, prompt: list[int], tokens: int, stops: set[int]) -> list[int]:
    ids = torch.tensor([prompt])
    written = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens,
        do_sample=False, eos_token_id=sorted(stops) or None, pad_token_id=0,
    )  # fmt: skip
    return list(written[0, len(prompt) :].tolist())


def static_steps() -> DecodeGraphs:
    """The steps that a GPU records. Here a recorded step is the step itself."""
    return DecodeGraphs(lambda step: step)


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [list(tokenizer(text)["input_ids"]) for text in texts]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_a_batch_of_different_lengths_is_answered_as_each_alone(
    model: Any, tokenizer: Any, batch_size: int
) -> None:
    prompts = encode(tokenizer, TEXTS)
    # A stop token that some rows meet early, so that rows leave the batch at different times.
    likely = by_transformers(model, prompts[1], 6, set())[5]
    stopping = Stopping(24, frozenset({likely}))
    found = complete(model, tokenizer, prompts, stopping=stopping, batch_size=batch_size)
    assert [list(each.ids) for each in found] == [
        by_transformers(model, prompt, 24, {likely}) for prompt in prompts
    ]
    assert {each.reason for each in found} == {"stop", "length"}
    static = complete(
        model, tokenizer, prompts, stopping=stopping, batch_size=batch_size, graphs=static_steps()
    )
    assert static == found


def test_a_beginning_that_all_share_is_computed_once(model: Any, tokenizer: Any) -> None:
    shared = "These are examples which every prompt begins with. "
    prompts = encode(tokenizer, [shared + text for text in TEXTS])
    seen: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, named: seen.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    found = complete(model, tokenizer, prompts, stopping=Stopping(8))
    hook.remove()
    assert seen[0] == (1, len(shared))
    assert seen[1] == (5, max(map(len, prompts)) - len(shared))
    for each, prompt in zip(found, prompts, strict=True):
        assert list(each.ids) == by_transformers(model, prompt, 8, set())
    static = complete(model, tokenizer, prompts, stopping=Stopping(8), graphs=static_steps())
    assert static == found


def test_a_sliding_window_keeps_its_own_cache(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=8,
        initializer_range=0.3,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    prompts = encode(tokenizer, ["The same forty bytes at the beginning: " + t for t in TEXTS])
    found = complete(model, tokenizer, prompts, stopping=Stopping(12))
    for each, prompt in zip(found, prompts, strict=True):
        assert list(each.ids) == by_transformers(model, prompt, 12, set())
    static = complete(model, tokenizer, prompts, stopping=Stopping(12), graphs=static_steps())
    assert static == found


@pytest.mark.parametrize("attention", ["eager", VARLEN_SINKS])
def test_sinks_take_their_share_in_every_step(tokenizer: Any, attention: str) -> None:
    """As a model has them that was just trained: SDPA, which steps use elsewhere, has none."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=8,
        num_local_experts=4, num_experts_per_tok=2, initializer_range=0.3,
    )  # fmt: skip
    model: Any = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=2.0)
    prompts = encode(tokenizer, TEXTS[:2])
    expected = complete(model, tokenizer, prompts, stopping=Stopping(8))
    register()
    model.set_attn_implementation(attention)
    for graphs in (None, static_steps()):
        found = complete(model, tokenizer, prompts, stopping=Stopping(8), graphs=graphs)
        assert found == expected


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/models")
def test_a_mixture_whose_config_asks_for_the_routers_logits(tokenizer: Any) -> None:
    """transformers' own `generate` fails on it: it computes a loss of balance from the mask."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=4, num_experts_per_tok=2, initializer_range=0.3,
    )  # fmt: skip
    model: Any = Qwen3MoeForCausalLM(config).eval()
    prompts = encode(tokenizer, TEXTS[:3])
    expected = complete(model, tokenizer, prompts, stopping=Stopping(8))
    told = {"stops": frozenset({319}), "max_new_tokens": 8}
    written = generate_answers(model, tokenizer, prompts, **told)
    model.config.output_router_logits = True
    for graphs in (None, static_steps()):
        assert complete(model, tokenizer, prompts, stopping=Stopping(8), graphs=graphs) == expected
    assert generate_answers(model, tokenizer, prompts, **told) == written


def test_a_stop_string_ends_a_row_and_is_cut_off() -> None:
    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    prompts = encode(tokenizer, ["Once upon a time", "Tom had a big red ball. One day"])
    whole = complete(model, tokenizer, prompts, stopping=Stopping(60))
    assert all("." in each.text for each in whole)
    cut = complete(model, tokenizer, prompts, stopping=Stopping(60, stop_strings=(".", "!")))
    for each, one in zip(cut, whole, strict=True):
        assert each.reason == "stop"
        assert each.text == one.text.partition(".")[0]
        assert len(each.ids) < len(one.ids)
        assert each.ids == one.ids[: len(each.ids)]


def test_a_sampled_row_does_not_depend_on_its_neighbours(model: Any, tokenizer: Any) -> None:
    prompts = encode(tokenizer, TEXTS)
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=3)
    stopping = Stopping(12)

    def drawn(batch_size: int, sampling: Sampling = sampling) -> list[Completion]:
        return complete(
            model, tokenizer, prompts, stopping=stopping, sampling=sampling, batch_size=batch_size
        )

    assert drawn(5) == drawn(1)
    assert drawn(5) != drawn(5, Sampling(temperature=1.0, seed=4))


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    odds = nucleus(logits, Sampling(temperature=1.0, top_p=0.7))
    assert torch.allclose(odds, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    odds = nucleus(logits, Sampling(temperature=1.0, top_k=1))
    assert torch.allclose(odds, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


def test_what_does_not_fit_is_tried_in_smaller_batches(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = encode(tokenizer, TEXTS)
    plain = model.forward

    def narrow(*args: Any, **named: Any) -> Any:
        if len(named["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*args, **named)

    expected = complete(model, tokenizer, prompts, stopping=Stopping(4))
    monkeypatch.setattr(model, "forward", narrow)
    assert complete(model, tokenizer, prompts, stopping=Stopping(4)) == expected


def test_slots_for_fewer_rows_take_less_memory(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = encode(tokenizer, TEXTS)
    plain = model.forward

    @wraps(plain)  # whoever asks what it takes
    def narrow(*args: Any, **named: Any) -> Any:
        slots = getattr(named["past_key_values"].layers[0], "_all", None)
        if slots and len(slots[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*args, **named)

    expected = complete(model, tokenizer, prompts, stopping=Stopping(4))
    monkeypatch.setattr(model, "forward", narrow)
    found = complete(model, tokenizer, prompts, stopping=Stopping(4), graphs=static_steps())
    assert found == expected


def test_prompts_are_not_kept_beside_their_slots(model: Any, tokenizer: Any) -> None:
    caches: list[ref[Any]] = []
    alive: list[bool] = []

    def look(_: Any, __: Any, named: dict[str, Any]) -> None:
        caches.append(ref(named["past_key_values"]))
        alive.append(caches[0]() is not None)

    hook = model.register_forward_pre_hook(look, with_kwargs=True)
    complete(
        model, tokenizer, encode(tokenizer, TEXTS), stopping=Stopping(4), graphs=static_steps()
    )
    hook.remove()
    assert alive == [True, False, False, False]


def test_progress_counts_rows_and_tokens(model: Any, tokenizer: Any) -> None:
    told: list[tuple[int, int, int]] = []
    complete(
        model, tokenizer, encode(tokenizer, TEXTS), stopping=Stopping(3), batch_size=2,
        progress=lambda *figures: told.append(figures),
    )  # fmt: skip
    assert told == [(n, 5, 3 * n) for n in range(1, 6)]


def test_log_likelihoods_are_those_of_a_plain_forward_pass(model: Any, tokenizer: Any) -> None:
    pairs = [
        split_pair(tokenizer, context, continuation)
        for context, continuation in [("Two and two is", " four"), ("A ", "b"), ("Yes or", " no")]
    ]
    scores = score_continuations(model, pairs, batch_size=2)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        logits = model(torch.tensor([context + continuation])).logits[0].detach().log_softmax(-1)
        each = [float(logits[len(context) + n - 1, t]) for n, t in enumerate(continuation)]
        assert score.log_likelihood == pytest.approx(sum(each), abs=1e-4)
        assert score.tokens == len(continuation)


def test_spaces_at_the_end_belong_to_the_continuation(tokenizer: Any) -> None:
    context, continuation = split_pair(tokenizer, "A ", "b")
    assert tokenizer.decode(context) == "A"
    assert tokenizer.decode(continuation) == " b"


def test_what_is_longer_than_the_positions_loses_its_beginning(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=320, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    long, short = encode(tokenizer, ["x" * 40 + "Once upon a time there was a dog", "Tom"])
    found = complete(model, tokenizer, [long, short], stopping=Stopping(8))
    assert found == complete(model, tokenizer, [long[-24:], short], stopping=Stopping(8))
    with pytest.raises(ModelError, match="32 positions, and 32 new tokens leave none"):
        complete(model, tokenizer, [short], stopping=Stopping(32))
    pairs = [(long, short), (short, long[-4:])]
    cut = [(long[-30:], short), (short, long[-4:])]
    assert score_continuations(model, pairs) == score_continuations(model, cut)
    with pytest.raises(ModelError, match="72 tokens, the model 32 positions"):
        score_continuations(model, [(short, long)])


def test_encoder_decoders_have_no_log_likelihood_here() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_ff=8, num_layers=1))
    with pytest.raises(ModelError, match="has an encoder"):
        score_continuations(model, [([1], [2])])


@pytest.mark.parametrize("graphs", [None, static_steps()], ids=["eager", "static"])
def test_rows_that_outgrow_short_texts_are_read_anew(
    tokenizer: Any, tmp_path: Path, graphs: DecodeGraphs | None
) -> None:
    """LongRoPE: above 12 tokens all are rotated otherwise, as `generate` does it for one row."""
    plain = families.write(tmp_path, "phi3", vocab_size=260, **families.LONGROPE).eval()
    model = load_base(ModelFiles(ModelSection(name=str(tmp_path))), "fp32")
    shared = [5, 9] * 20  # more than SHARED_PREFIX
    prompts = [list(range(2, 2 + size)) for size in (3, 20, 12, 11, 13, 7, 1)]
    for asked in (prompts, [[*shared[:40], n] for n in (3, 4)]):
        found = complete(model, tokenizer, asked, stopping=Stopping(14), graphs=graphs)
        expected = [by_transformers(plain, prompt, 14, set()) for prompt in asked]
        assert [list(each.ids) for each in found] == expected


def test_log_likelihoods_do_not_depend_on_longer_neighbours(tmp_path: Path) -> None:
    plain = families.write(tmp_path, "phi3", vocab_size=260, **families.LONGROPE).eval()
    model = load_base(ModelFiles(ModelSection(name=str(tmp_path))), "fp32")
    pairs = [(list(range(2, 2 + size)), [7, 8]) for size in (3, 30, 9)]
    found = score_continuations(model, pairs)
    for (context, _), each in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([[*context, 7]])).logits[0, -2:].log_softmax(-1)
        assert each.log_likelihood == pytest.approx(float(logits[0, 7] + logits[1, 8]), abs=1e-4)
