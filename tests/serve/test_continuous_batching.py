"""Rows of a running batch get the tokens that `transformers.generate` gives them alone."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from shardtune.engine.decode_graphs import DecodeGraphs
from shardtune.models.rope_by_document import rotate_by_document
from shardtune.serve.continuous_batching import ContinuousBatch
from shardtune.serve.lanes import EagerLane
from shardtune.serve.sampling import RequestSampling
from tests.models.families import CONFIGS, LONGROPE, config
from tests.serve.answers import Answer, ask, batched, generated, random_prompts

Make = Callable[..., ContinuousBatch]
QUICK = ("llama",)
LENGTHS = [3, 12, 7, 10, 1, 9, 6, 5, 11, 2, 4, 8, 6, 8, 4, 10, 3, 5, 7, 9]


def tiny(family: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(config(family, **changes))
    return made.eval()


def static(model: Any, **settings: Any) -> ContinuousBatch:
    """A batch with the steps that a GPU records. Here a recorded step is the step itself."""
    return ContinuousBatch(model, graphs=DecodeGraphs(lambda step: step), **settings)


@pytest.fixture(params=[ContinuousBatch, static], ids=["eager", "static"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama", vocab_size=211, max_position_embeddings=256)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.long)
        for name in sorted(CONFIGS)
    ],
)
def test_every_family_answers_as_generate_does(family: str) -> None:
    model = tiny(family)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = random_prompts(20, min(256, vocabulary), longest=24)
    alone = [generated(model, p, n) for p, n in zip(prompts, LENGTHS, strict=True)]
    assert batched(ContinuousBatch(model, max_rows=16), prompts, LENGTHS) == alone
    assert batched(ContinuousBatch(model, max_rows=1), prompts[:2], LENGTHS[:2]) == alone[:2]
    assert batched(static(model, max_rows=16), prompts, LENGTHS) == alone


def test_who_comes_later_joins_between_two_tokens(
    llama: Any, make: Callable[..., ContinuousBatch]
) -> None:
    batch = make(llama, max_rows=4)
    prompts = random_prompts(7, 200, longest=60)
    waiting = [ask(prompt, 4 + 4 * (n % 3)) for n, prompt in enumerate(prompts)]
    answers = [heard for _, heard in waiting]
    most = 0
    while waiting or batch.waiting or batch.running:
        if waiting:  # one with each step, so that all are at another token
            batch.submit(waiting.pop(0)[0])
        batch.step()
        most = max(most, batch.running)
    assert most == 4
    for n, prompt in enumerate(prompts):
        assert answers[n].tokens == generated(llama, prompt, 4 + 4 * (n % 3))
        assert answers[n].finish == "length"


def test_a_cancelled_request_frees_its_place(
    llama: Any, make: Callable[..., ContinuousBatch]
) -> None:
    batch = make(llama, max_rows=2)
    asked = [ask([7, 8, 9 + n], 20) for n in range(3)]
    for request, _ in asked:
        batch.submit(request)
    batch.step()
    assert (batch.running, batch.waiting) == (2, 1)
    batch.cancel(asked[0][0])
    batch.step()
    assert (batch.running, batch.waiting) == (2, 0)
    assert asked[0][1].finish == "cancelled"
    while batch.step():
        pass
    for n in (1, 2):
        assert asked[n][1].tokens == generated(llama, [7, 8, 9 + n], 20)


def test_a_stop_token_ends_an_answer_and_is_not_told(
    llama: Any, make: Callable[..., ContinuousBatch]
) -> None:
    full = generated(llama, [1, 2, 3], 12)
    stop = full[5]
    request, heard = ask([1, 2, 3], 12, stops=frozenset({stop}))
    batch = make(llama)
    batch.submit(request)
    while batch.step():
        pass
    assert heard.tokens == full[: full.index(stop)]
    assert heard.finish == "stop"


def test_a_seed_draws_the_same_alone_and_in_a_batch(
    llama: Any, make: Callable[..., ContinuousBatch]
) -> None:
    def drawn(others: int) -> Answer:
        batch = make(llama)
        request, heard = ask(
            [4, 5, 6], 15, sampling=RequestSampling(temperature=0.9, top_p=0.95, seed=3, logprobs=2)
        )
        for each in [ask([n + 1] * (n + 2), 20)[0] for n in range(others)] + [request]:
            batch.submit(each)
        while batch.step():
            pass
        return heard

    alone, together = drawn(0), drawn(5)
    assert alone.tokens == together.tokens
    assert alone.tokens != generated(llama, [4, 5, 6], 15)
    first = alone.pieces[0].tokens[0]
    with torch.no_grad():
        logits = llama(torch.tensor([[4, 5, 6]])).logits[0, -1].log_softmax(-1)
    assert first.logprob == pytest.approx(float(logits[first.token]), abs=1e-5)
    assert [token for token, _ in first.top] == logits.topk(2).indices.tolist()


def test_steps_that_cannot_be_recorded_give_the_same_answers(llama: Any) -> None:
    def fail(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("a layer waits for the GPU")

    graphs = DecodeGraphs(fail)
    batch = ContinuousBatch(llama, max_rows=2, graphs=graphs)
    prompts = random_prompts(3, 200, longest=20)
    alone = [generated(llama, prompt, 8) for prompt in prompts]
    assert batched(batch, prompts, [8, 8, 8]) == alone
    assert graphs.refused
    assert isinstance(batch._lanes[None], EagerLane)  # the third one came when both had left


def test_prompts_of_like_length_join_together(llama: Any) -> None:
    """Only those whose turn it is, and the first one always."""
    batch = ContinuousBatch(llama, max_rows=4)
    sizes = [1500, 40, 1400, 50, 1500]  # three long ones are more than a step reads
    asked = [ask([1] * size, 1)[0] for size in sizes]
    for request in asked:
        batch.submit(request)
    assert batch._next() == [asked[0], asked[2]]
    assert batch._next() == [asked[1], asked[3]]
    assert batch._next() == [asked[4]]


@pytest.mark.slow
def test_each_request_has_its_adapter(make: Make) -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny("llama")
    plain: dict[str | None, list[int]] = {None: generated(base, [9, 8, 7], 20)}
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base, settings, adapter_name="one").eval()
    model.add_adapter("two", settings)
    for name in ("one", "two"):
        model.set_adapter(name)
        plain[name] = generated(model.get_base_model(), [9, 8, 7], 20)
    batch = make(model)
    asked = {name: ask([9, 8, 7], 20, adapter=name) for name in plain}
    for request, _ in asked.values():
        batch.submit(request)
    while batch.step():
        pass
    assert {name: heard.tokens for name, (_, heard) in asked.items()} == plain
    assert len({tuple(tokens) for tokens in plain.values()}) == 3


def test_a_pass_that_fails_ends_its_requests_alone(
    llama: Any, make: Callable[..., ContinuousBatch]
) -> None:
    batch = make(llama)
    bad, heard = ask([10**6], 5)  # a token that the model doesn't have
    batch.submit(bad)
    assert not batch.step()
    assert heard.finish == "error"
    assert "IndexError" in heard.pieces[-1].error
    assert batched(batch, [[1, 2]], [5]) == [generated(llama, [1, 2], 5)]


def test_a_draw_that_fails_leaves_its_neighbours(
    llama: Any, make: Callable[..., ContinuousBatch]
) -> None:
    class Failing(RequestSampling):
        def choose(self, logits: Any) -> Any:
            return super().choose(logits * float("nan"))

    batch = make(llama)
    asked = [
        ask([1, 2], 5, sampling=how)
        for how in (
            None,
            Failing(),
            RequestSampling(temperature=1e-44, logprobs=1),  # the likeliest, though 1 / 1e-44 = inf
            RequestSampling(temperature=1.0, top_p=1e-300),
        )
    ]
    for request, _ in asked:
        batch.submit(request)
    while batch.step():
        pass
    greedy = generated(llama, [1, 2], 5)
    assert [heard.tokens for _, heard in asked] == [greedy, [], greedy, greedy]
    assert [heard.finish for _, heard in asked] == ["length", "error", "length", "length"]


def test_no_more_rows_than_the_cache_has_tokens_for(
    llama: Any, make: Callable[..., ContinuousBatch]
) -> None:
    batch = make(llama, max_cache_tokens=100)
    for n in range(4):
        batch.submit(ask([n + 1] * 10, 30)[0])  # 40 tokens each: two fit
    batch.step()
    assert (batch.running, batch.waiting) == (2, 2)


def test_who_outgrows_short_texts_is_read_anew(make: Make) -> None:
    """LongRoPE: above 12 tokens all are rotated otherwise, as `generate` does it for one row."""
    plain = tiny("phi3", **LONGROPE)
    for weight in plain.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    model = deepcopy(plain)
    rotate_by_document(model)
    prompts = [list(range(2, 2 + size)) for size in (3, 20, 12, 11, 13, 30, 7, 1)]
    alone = [generated(plain, prompt, 14) for prompt in prompts]
    for rows in (1, 3, 8):
        assert batched(make(model, max_rows=rows), prompts, [14] * 8) == alone
