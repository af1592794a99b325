"""Decoding by CUDA graphs gives the tokens that `transformers.generate` gives each prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardtune.engine.decode_graphs import DecodeGraphs, cuda_recorder
from shardtune.models.batched_generation import Stopping, complete
from shardtune.serve.continuous_batching import ContinuousBatch
from shardtune.serve.sampling import RequestSampling
from tests.models.families import config
from tests.serve.answers import NoText, ask, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [40, 90, 60, 150, 20, 70, 130, 30]


def tiny(family: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(
        config(family, max_position_embeddings=512, **changes), dtype=torch.float32
    )
    return made.cuda().eval()


def graphs() -> DecodeGraphs:
    return DecodeGraphs(cuda_recorder(torch.device("cuda")))


def generated(model: Any, prompt: Sequence[int], length: int) -> list[int]:
    ids = torch.tensor([list(prompt)], device="cuda")
    with torch.no_grad():
        written = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return [int(token) for token in written[0, len(prompt) :]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral", "gpt2"])
def test_rows_that_come_and_go(family: str) -> None:
    model = tiny(family) if family != "gpt2" else tiny(family, n_positions=512)
    prompts = random_prompts(len(LENGTHS), 60, longest=24)
    recorded = graphs()
    batch = ContinuousBatch(model, max_rows=4, graphs=recorded)
    asked = [ask(prompt, length) for prompt, length in zip(prompts, LENGTHS, strict=True)]
    for request, _ in asked:
        batch.submit(request)
    while batch.step():
        pass
    assert recorded.refused == ""
    assert len(recorded._recorded) >= 2
    for (_, heard), prompt, length in zip(asked, prompts, LENGTHS, strict=True):
        assert heard.tokens == generated(model, prompt, length)


def test_graphs_are_recorded_again_after_all_were_forgotten() -> None:
    """A row more than there was room for moves the cache: no graph of before is left then."""
    model = tiny("llama")
    prompts = random_prompts(6, 60, longest=24)
    recorded = graphs()
    batch = ContinuousBatch(model, max_rows=8, graphs=recorded)
    asked = [ask(prompt, 40) for prompt in prompts]
    for request, _ in asked:
        batch.submit(request)
        for _ in range(6):
            batch.step()
    while batch.step():
        pass
    assert recorded.refused == ""
    for (_, heard), prompt in zip(asked, prompts, strict=True):
        assert heard.tokens == generated(model, prompt, 40)


def test_adapters_have_graphs_of_their_own() -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny("llama")
    plain = {None: generated(base, [9, 8, 7], 60)}
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base, settings, adapter_name="one").eval()
    model.add_adapter("two", settings)
    for name in ("one", "two"):
        model.set_adapter(name)
        plain[name] = generated(model.get_base_model(), [9, 8, 7], 60)
    recorded = graphs()
    batch = ContinuousBatch(model, graphs=recorded)
    asked = {name: ask([9, 8, 7], 60, adapter=name) for name in plain}
    for request, _ in asked.values():
        batch.submit(request)
    while batch.step():
        pass
    assert recorded.refused == ""
    assert {name: heard.tokens for name, (_, heard) in asked.items()} == plain
    assert len({tuple(tokens) for tokens in plain.values()}) == 3


def test_drawn_rows_leave_greedy_ones_as_they_are() -> None:
    model = tiny("llama")
    batch = ContinuousBatch(model, graphs=graphs())
    greedy, heard = ask([4, 5, 6], 50)
    drawn, other = ask([7, 8], 50, sampling=RequestSampling(temperature=0.9, seed=3, logprobs=2))
    batch.submit(greedy)
    batch.submit(drawn)
    while batch.step():
        pass
    assert heard.tokens == generated(model, [4, 5, 6], 50)
    assert len(other.tokens) == 50


def test_batched_generation_of_an_evaluation() -> None:
    model = tiny("llama")
    prompts = random_prompts(6, 60, longest=24)
    recorded = graphs()
    tokenizer = NoText()
    tokenizer.pad_token_id = 0  # type: ignore[attr-defined]
    found = complete(
        model, tokenizer, prompts, stopping=Stopping(140), batch_size=4, device="cuda",
        graphs=recorded,
    )  # fmt: skip
    assert recorded.refused == ""
    assert len(recorded._recorded) >= 1
    assert [list(each.ids) for each in found] == [generated(model, p, 140) for p in prompts]
