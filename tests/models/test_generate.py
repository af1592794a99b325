"""Questions and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoTokenizer

from shardtune.checkpoint.export import probe_logits
from shardtune.config.job import LoRA, ModelSection, TrainSection
from shardtune.core.step import MicroBatch
from shardtune.errors import ModelError
from shardtune.models import tiny
from shardtune.models.batched_generation import Sampling, Stopping, complete
from shardtune.models.context_window import fit_answer
from shardtune.models.generate import (
    Prompt,
    generate_answers,
    held_out_prompt,
    prompt_ids,
    question_text,
    source_prompt,
)
from shardtune.models.load import load_base
from shardtune.models.materialize import decoder_layers
from shardtune.models.model_files import ModelFiles
from tests.models import encoder_decoder
from tests.synthetic import load_model

SMOLLM2 = Path(__file__).parents[3] / "shared" / "tokenizers" / "smollm2"
PROMPTS = ["Say it.", "Count from one to ten, and then back again.", "?"]


@pytest.fixture(params=["tiny", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "tiny":
        return tiny.tokens()
    if not SMOLLM2.is_dir():
        pytest.skip("needs ../shared/tokenizers")
    return AutoTokenizer.from_pretrained(SMOLLM2)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_base(ModelFiles(ModelSection(name="tiny")), "fp32")


# The prompts of a held-out set -------------------------------------------------------------------


def test_what_stands_before_the_first_trained_token_is_the_question() -> None:
    ids, trained = [5, 6, 7, 8, 9, 10], [False, False, False, False, True, True]
    assert held_out_prompt(ids, trained) == Prompt((5, 6, 7, 8), (9, 10))


def test_a_conversation_is_asked_up_to_its_first_answer() -> None:
    ids = list(range(12))
    trained = [n in (5, 6, 10) for n in ids]
    assert held_out_prompt(ids, trained) == Prompt((0, 1, 2, 3, 4), (5, 6, 10))


def test_of_a_plain_text_the_first_quarter_is_the_question() -> None:
    ids = list(range(100, 120))
    trained = [False] + [True] * 19
    assert held_out_prompt(ids, trained) == Prompt(tuple(range(100, 105)), tuple(range(105, 120)))


def test_there_is_always_something_to_ask() -> None:
    assert held_out_prompt([7, 8], [False, True]) == Prompt((7,), (8,))
    assert held_out_prompt([7, 8, 9, 10, 11], [False] * 5) == Prompt((7, 8, 9, 10, 11), ())


# Questions as text -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Add 2 and 3.", "größer als\n\n  zwei?", "Is QUESTION a word?"])
def test_the_scaffolding_is_taken_off_a_question(tokenizer: Any, text: str) -> None:
    ids = prompt_ids(tokenizer, text, chat=True)
    rendered = tokenizer.decode(ids)
    assert "<|im_start|>user\n" in rendered
    assert rendered.endswith("<|im_start|>assistant\n")
    assert question_text(tokenizer, ids) == text


def test_a_question_in_another_scaffolding_is_shown_without_special_tokens(tokenizer: Any) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    shown = question_text(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert "Be brief." in shown
    assert "Why?" in shown
    assert "<|" not in shown


def test_a_tokenizer_without_a_template_shows_the_text(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    ids = prompt_ids(tokenizer, "Once upon a time", chat=False)
    assert question_text(tokenizer, ids) == "Once upon a time"


# Answers -----------------------------------------------------------------------------------------


def greedy(model: Any, ids: list[int], stops: frozenset[int], count: int) -> list[int]:
    """The likeliest token again and again, each time over the whole text: no cache, no padding."""
    written: list[int] = []
    with torch.no_grad():
        while len(written) < count and not (written and written[-1] in stops):
            logits = model(input_ids=torch.tensor([ids + written]), use_cache=False).logits
            written.append(int(logits[0, -1].argmax()))
    return written


def text_of(ids: list[int]) -> str:
    return str(tiny.tokens().decode(ids, skip_special_tokens=True)).strip()


def test_a_batch_gives_the_same_answers_as_one_by_one(model: Any) -> None:
    tokenizer = tiny.tokens()
    asked = [prompt_ids(tokenizer, prompt, chat=True) for prompt in PROMPTS]
    assert len({len(ids) for ids in asked}) == 3, "or nothing would have to be padded"
    stops = frozenset({tiny.END})
    together = generate_answers(model, tokenizer, asked, stops=stops, max_new_tokens=16)
    apart = [
        generate_answers(model, tokenizer, [ids], stops=stops, max_new_tokens=16)[0]
        for ids in asked
    ]
    assert together == apart == [text_of(greedy(model, ids, stops, 16)) for ids in asked]
    assert len(set(together)) > 1, "the control: the question matters"


def test_an_answer_ends_at_a_stop_token(model: Any) -> None:
    tokenizer = tiny.tokens()
    ids = prompt_ids(tokenizer, PROMPTS[0], chat=True)
    whole = greedy(model, ids, frozenset(), 16)
    stop = next(token for n, token in enumerate(whole) if n >= 3 and token not in whole[:n])
    stops = frozenset({tiny.END, stop})
    short = generate_answers(model, tokenizer, [ids], stops=stops, max_new_tokens=16)[0]
    assert short == text_of(whole[: whole.index(stop) + 1])
    assert len(short) < len(text_of(whole))


def test_an_answer_that_never_stops_ends_too(model: Any) -> None:
    """A job may name no stop token, and a tokenizer have none."""
    tokenizer = tiny.tokens()
    ids = prompt_ids(tokenizer, PROMPTS[0], chat=True)
    found = generate_answers(model, tokenizer, [ids], stops=frozenset(), max_new_tokens=5)
    assert found == [text_of(greedy(model, ids, frozenset(), 5))]


def test_a_tokenizer_without_padding_is_padded_with_a_stop_token(model: Any) -> None:
    tokenizer = tiny.tokens()
    asked = [prompt_ids(tokenizer, prompt, chat=True) for prompt in PROMPTS]
    expected = generate_answers(
        model, tokenizer, asked, stops=frozenset({tiny.END}), max_new_tokens=8
    )
    tokenizer.pad_token = None
    found = generate_answers(model, tokenizer, asked, stops=frozenset({tiny.END}), max_new_tokens=8)
    assert found == expected


def test_a_temperature_draws(model: Any) -> None:
    tokenizer = tiny.tokens()
    asked = [prompt_ids(tokenizer, PROMPTS[0], chat=True)]

    def draw(seed: int) -> str:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            stops = frozenset({tiny.END})
            settings: Any = {"stops": stops, "max_new_tokens": 12, "temperature": 1.0}
            return generate_answers(model, tokenizer, asked, **settings)[0]

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch tells of what its compiler does itself
def test_nothing_is_compiled_for_an_answer_or_a_probe(model: Any) -> None:
    """Layers that are compiled for training answer as they are: else it would be 3 graphs for each
    of them, and minutes on a GPU."""
    counters.clear()
    tokenizer = tiny.tokens()
    ids = prompt_ids(tokenizer, PROMPTS[0], chat=True)
    told: Any = {"stops": frozenset({tiny.END}), "max_new_tokens": 4}
    right = generate_answers(model, tokenizer, [ids], **told)
    quick = load_base(ModelFiles(ModelSection(name="tiny")), "fp32")
    for layer in decoder_layers(quick):
        layer.compile(backend="eager")
    assert generate_answers(quick, tokenizer, [ids], **told) == right
    row = torch.tensor([ids])
    probe_logits(quick, MicroBatch(row, torch.arange(len(ids))[None], row, (), 0, 0))
    assert not counters["stats"]["unique_graphs"]
    quick(input_ids=row)
    assert counters["stats"]["unique_graphs"], "they are compiled otherwise"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_asking_leaves_a_model_in_training_as_it_was(precision: Any, training: bool) -> None:
    train = TrainSection(precision=precision, gradient_checkpointing="full")
    adapted = load_model(ModelSection(name="tiny"), LoRA(rank=2), train, device="cpu")
    adapted.train(training)
    tokenizer = tiny.tokens()
    ids = prompt_ids(tokenizer, PROMPTS[0], chat=True)
    state = torch.get_rng_state()
    found = generate_answers(
        adapted, tokenizer, [ids], stops=frozenset({tiny.END}), max_new_tokens=4
    )
    assert found[0]
    assert adapted.training is training
    assert torch.equal(torch.get_rng_state(), state)


# Models with an encoder ---------------------------------------------------------------------------


def test_of_a_pair_the_source_is_the_question() -> None:
    assert source_prompt([5, 6, 7], [False, True, True]) == Prompt((5,), (6, 7))


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_reads_prompts_of_any_length_as_alone(family: str, tmp_path: Path) -> None:
    """Beside transformers' own `generate`, one prompt at a time."""
    model = encoder_decoder.write(tmp_path, family).eval()
    tokens, stops = encoder_decoder.tokenizer(family), frozenset({encoder_decoder.END})
    asked = [prompt_ids(tokens, text, chat=False) for text in PROMPTS]
    expected = [
        tokens.decode(
            model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0],
            skip_special_tokens=True,
        ).strip()
        for ids in asked
    ]
    assert generate_answers(model, tokens, asked, stops=stops, max_new_tokens=6) == expected


# What can't be answered as it is asked -----------------------------------------------------------


def test_a_temperature_next_to_0_takes_the_likeliest(model: Any) -> None:
    """Logits divided by it would be infinite."""
    ids = prompt_ids(tiny.tokens(), PROMPTS[0], chat=True)
    stops = ModelFiles(ModelSection(name="tiny")).stop_ids
    how: Any = {"stops": stops, "max_new_tokens": 4}
    likeliest = generate_answers(model, tiny.tokens(), [ids], **how)
    assert generate_answers(model, tiny.tokens(), [ids], temperature=1e-300, **how) == likeliest
    found = [
        complete(model, tiny.tokens(), [ids], stopping=Stopping(4, stops), sampling=Sampling(t))
        for t in (0.0, 1e-300)
    ]
    assert found[0] == found[1]


def test_an_answer_has_the_positions_that_its_prompt_leaves(model: Any) -> None:
    most = tiny.POSITIONS
    sizes = (1, most - 100, most - 12, most - 1)
    assert [fit_answer(model, [5] * size, 100) for size in sizes] == [100, 100, 12, 1]
    with pytest.raises(ModelError, match=f"has {most} tokens, and the model {most} positions"):
        fit_answer(model, [5] * most, 1)
    with pytest.raises(ModelError, match="the prompt is empty"):
        fit_answer(model, [], 1)
