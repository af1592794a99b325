"""One method of `benchmarks.serving` on one model, in a process of its own.

Whatever the method, it gets the same prompts and answers each with so many tokens, greedily. It
writes a line a number of requests, as soon as that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

SHORTEST, LONGEST, NEW = 32, 512, 128  # tokens of a prompt, and of each answer
MEASURED, ENOUGH = 3, 10.0  # rounds, and the seconds after which there are no more
TINY = (4, 24, 6)
"""The same three for a toy on the CPU."""

Prompts = list[list[int]]
Answer = Callable[[Prompts], Prompts]
"""Requests that come all at once; the new tokens of each."""
Method = Callable[[Any, Prompts, int], AbstractContextManager[Answer]]
"""From a model, prompts of the sizes that are to come, and how many tokens each answer has."""


def prompts_of(requests: int, vocabulary: int, *, round_: int, tiny: bool) -> Prompts:
    """The same lengths in each round and other tokens: no round finds another's prefixes."""
    shortest, longest, _ = TINY if tiny else (SHORTEST, LONGEST, NEW)
    lengths, tokens = random.Random(requests), random.Random(f"{requests} {round_}")
    return [
        [tokens.randrange(vocabulary) for _ in range(lengths.randint(shortest, longest))]
        for _ in range(requests)
    ]


@contextmanager
def engine(model: Any, prompts: Prompts, new: int) -> Iterator[Answer]:
    """Our continuous batching, by the thread that `shardtune serve` has, with detokenization."""
    from shardtune.serve.continuous_batching import ContinuousBatch
    from shardtune.serve.engine_thread import EngineThread
    from shardtune.serve.sampling import RequestSampling
    from shardtune.serve.served_model import ServedModel

    tokens = max(map(len, prompts)) + new
    batch = ContinuousBatch(model, max_rows=len(prompts), max_cache_tokens=len(prompts) * tokens)
    served = ServedModel(
        "model", batch, None, _tokenizer(model), frozenset(), tokens, None, "model", "model"
    )
    thread = EngineThread([batch], max_waiting=len(prompts), seconds=3600)

    async def one(prompt: list[int]) -> list[int]:
        asked = thread.open(served, prompt, new, RequestSampling(temperature=0), ())
        return [each.token async for piece in asked.pieces() for each in piece.tokens]

    async def all_of(given: Prompts) -> Prompts:
        return list(await asyncio.gather(*map(one, given)))

    thread.start()
    yield lambda given: asyncio.run(all_of(given))
    thread.stop()


@contextmanager
def evaluation(model: Any, prompts: Prompts, new: int) -> Iterator[Answer]:
    """What `shardtune evaluate` answers with: one batch that begins together."""
    from shardtune.models.batched_generation import Stopping, complete

    tokenizer, device = _tokenizer(model), str(model.device)

    def answer(given: Prompts) -> Prompts:
        found = complete(
            model,
            tokenizer,
            given,
            stopping=Stopping(new),
            batch_size=len(given),
            device=device,
        )
        return [list(each.ids) for each in found]

    yield answer


def padded_generate(**settings: Any) -> Method:
    """`transformers.generate` with left padding."""

    @contextmanager
    def method(model: Any, prompts: Prompts, new: int) -> Iterator[Answer]:
        import torch

        def answer(given: Prompts) -> Prompts:
            longest = max(map(len, given))
            ids = torch.tensor([[0] * (longest - len(each)) + each for each in given])
            mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in given])
            written = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=new,
                **settings,
            )
            rows: Prompts = written[:, longest:].tolist()
            return rows

        yield answer

    return method


def paged(**settings: Any) -> Method:
    """transformers' continuous batching. By itself it takes FlashAttention 2 or 3 where there is
    one, else `sdpa` over its pages; with settings it is that in any case."""

    @contextmanager
    def method(model: Any, prompts: Prompts, new: int) -> Iterator[Answer]:
        from transformers import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        given = dict(settings)
        if settings:
            model.set_attn_implementation("paged|sdpa")
            given["num_blocks"] = _blocks(prompts, new)
        hints = WorkloadHints(max(map(len, prompts)), new, len(prompts))
        with model.continuous_batching_context_manager(
            generation_config=model.generation_config,
            continuous_batching_config=ContinuousBatchingConfig(**given),
            workload_hints=hints,
            timeout=5,
        ) as manager:

            def answer(given: Prompts) -> Prompts:
                names = manager.add_requests(inputs=given, max_new_tokens=new)
                found: dict[str, list[int]] = {}
                while len(found) < len(given):
                    result = manager.get_result(timeout=1)
                    if result is None and not manager.is_running():
                        raise RuntimeError("transformers' continuous batching has ended by itself")
                    if result is not None and result.error:
                        raise RuntimeError(result.error)
                    if result is not None and result.is_finished():
                        found[result.request_id] = list(result.generated_tokens)
                return [found[name] for name in names]

            yield answer

    return method


def _blocks(prompts: Prompts, new: int) -> int:
    """Pages of 256 tokens for all of them, and as many again, that it holds nobody back. A step of
    the most tokens has room beside as many that were read before."""
    pages = sum(-(-(len(each) + new) // 256) + 1 for each in prompts)
    return 2 * max(pages, GRAPHS["max_batch_tokens"] // 256)


GRAPHS = {
    "use_cuda_graph": True,
    "use_async_batching": True,
    "max_batch_tokens": 4096,
    "kv_padding_interval_size": 4096,
}
"""By itself it has CUDA graphs only with FlashAttention. Graphs of `sdpa` are padded: narrower
steps than its 16,384 tokens leave less to attend to in vain."""
SERVE, EVALUATE = "shardtune serve", "shardtune evaluate"
PAGED = "HF continuous batching"
METHODS: dict[str, Method] = {
    SERVE: engine,
    EVALUATE: evaluation,
    PAGED: paged(),
    f"{PAGED}, sdpa, CUDA graphs": paged(**GRAPHS),
    f"{PAGED}, sdpa, CUDA graphs, compiled": paged(**GRAPHS, default_compile_level=1),
    "HF generate": padded_generate(),
    "HF generate, static cache, compiled": padded_generate(cache_implementation="static"),
}
"""What is measured; transformers' own begin with HF."""


def build(name: str, *, tiny: bool) -> Any:
    """Random weights of a model's shape, the same for every method: bf16, a toy's in fp32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from benchmarks.gpu_cases import TINY_SIZES
    from shardtune.core.model.known_models import find_model

    known = dict(find_model(name).config)
    if tiny:
        known |= TINY_SIZES
    known |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**known), dtype=torch.float32 if tiny else torch.bfloat16
        )
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW
    )
    return model.eval()


def _tokenizer(model: Any) -> Any:
    """One with a word for each token: an answer's text is written as it is for a client."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(model.config.vocab_size)}
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", pad_token="w0")


def measure(
    model: Any, method: Method, sizes: Sequence[int], *, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Output tokens per second of rounds, prompts included, after a round of the same lengths."""
    new = TINY[2] if tiny else NEW
    for requests in sizes:
        rounds = [
            prompts_of(requests, model.config.vocab_size, round_=number, tiny=tiny)
            for number in range(1 + MEASURED)
        ]
        seconds: list[float] = []
        with method(model, rounds[0], new) as answer:
            _require(answer(rounds[0]), new)
            for prompts in rounds[1:]:
                if sum(seconds) > ENOUGH:
                    break
                begun = time.perf_counter()
                answers = answer(prompts)
                seconds.append(time.perf_counter() - begun)
                _require(answers, new)
        yield {
            "requests": requests,
            "tokens_per_second": requests * new / median(seconds),
            "seconds": seconds,
            "answers": answers if tiny else [each[:4] for each in answers],
        }


def _require(answers: Prompts, new: int) -> None:
    short = [len(each) for each in answers if len(each) != new]
    if short:
        raise RuntimeError(f"{len(short)} answers have {short[0]} tokens and not {new}")


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("out", type=Path, help="a file for the lines")
    parser.add_argument("--requests", type=int, nargs="+", required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(given)
    import transformers.models.llama.modeling_llama  # noqa: F401  before the card is ours

    if not sys.stdin.readline():  # whoever started us says when it is
        return 1
    model = build(options.model, tiny=options.tiny)
    with options.out.open("a", encoding="utf-8") as out:
        found = measure(model, METHODS[options.method], options.requests, tiny=options.tiny)
        for each in found:
            out.write(json.dumps(each) + "\n")
            out.flush()
    print("{}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
