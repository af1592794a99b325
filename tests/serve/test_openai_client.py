"""The server as the real `openai` client sees it, over a tiny random model."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

openai = pytest.importorskip("openai", reason="the client comes with the extra dev")
pytest.importorskip("starlette", reason="the server comes with the extra serve")

import httpx2 as httpx  # noqa: E402  what the client itself brings

from shardtune.core.host import render_limit  # noqa: E402
from shardtune.serve.http_app import ServerLimits  # noqa: E402
from shardtune.serve.openai_requests import ChatBody  # noqa: E402
from shardtune.web.http_guard import AccessRules  # noqa: E402
from tests.serve.answers import generated  # noqa: E402
from tests.serve.served import Running, eventually, serving  # noqa: E402

COUNT = 32
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("serve")) as running:
        yield running


def greedy(client: Any, **settings: Any) -> Any:
    settings = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 12} | settings
    return client.chat.completions.create(**settings)


def expected(here: Running, name: str, messages: list[Any], length: int) -> str:
    """By plain transformers and peft."""
    served = here.models[name]
    ids = served.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    base = here.plain.base_model
    base.disable_adapter_layers() if served.adapter is None else base.enable_adapter_layers()
    tokens = generated(here.plain.get_base_model(), ids, length)
    cut = next((n for n, token in enumerate(tokens) if token in served.stops), length)
    return str(served.tokenizer.decode(tokens[:cut], skip_special_tokens=True))


def test_models_are_listed_and_chosen_by_name(here: Running) -> None:
    client = here.client()
    assert [each.id for each in client.models.list()] == ["tuned", "tiny"]
    assert client.models.retrieve("tuned").owned_by == "shardtune"
    said = {name: greedy(client, model=name).choices[0].message.content for name in here.models}
    for name, text in said.items():
        assert text == expected(here, name, HELLO, 12)
    assert said["tuned"] != said["tiny"]


def test_a_stream_has_the_same_text_and_its_usage(here: Running) -> None:
    client = here.client()
    whole = greedy(client)
    chunks = list(greedy(client, stream=True, stream_options={"include_usage": True}))
    parts = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 5
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_stop_strings_end_an_answer_before_them(here: Running) -> None:
    client = here.client()
    text = greedy(client, max_tokens=40).choices[0].message.content
    stop = text[6:9]
    cut = text[: text.index(stop)]
    choice = greedy(client, max_tokens=40, stop=[stop, "never there"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (cut, "stop")
    chunks = list(greedy(client, max_tokens=40, stop=stop, stream=True))
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == cut


def test_seeds_repeat_and_logprobs_are_told(here: Running) -> None:
    client = here.client()

    def draw(seed: int) -> Any:
        return greedy(
            client, temperature=1.0, top_p=0.9, seed=seed, logprobs=True, top_logprobs=3
        ).choices[0]

    one, same, other = draw(1), draw(1), draw(2)
    assert one.message.content == same.message.content != other.message.content
    assert one.logprobs == same.logprobs
    assert len(one.logprobs.content) == 12
    entry = one.logprobs.content[0]
    assert entry.logprob <= 0
    assert len(entry.top_logprobs) == 3
    assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_completions_take_texts_and_tokens(here: Running) -> None:
    client, tokenizer = here.client(), here.models["tiny"].tokenizer
    ids = tokenizer("Once")["input_ids"]
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    one = client.completions.create(prompt="Once", **asked).choices[0]
    several = client.completions.create(prompt=["Once", "Twice"], **asked).choices
    assert client.completions.create(prompt=ids, **asked).choices[0].text == one.text
    assert [choice.index for choice in several] == [0, 1]
    assert several[0].text == one.text
    assert len(one.logprobs.token_logprobs) == 6
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=["Once", "Twice"], stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in several]


@pytest.mark.slow
def test_several_answers_to_a_prompt_have_draws_of_their_own(here: Running) -> None:
    client, how = here.client(), {"temperature": 1.0, "seed": 5}
    alone = [greedy(client, **how | {"seed": seed}) for seed in (5, 6, 7)]
    texts = [each.choices[0].message.content for each in alone]
    assert len(set(texts)) == 3
    several = greedy(client, n=3, **how)
    assert [each.index for each in several.choices] == [0, 1, 2]
    assert [each.message.content for each in several.choices] == texts
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert several.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
    streamed, speakers = ["", "", ""], [0, 0, 0]
    for chunk in greedy(client, n=3, stream=True, **how):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        speakers[chunk.choices[0].index] += chunk.choices[0].delta.role == "assistant"
    assert (streamed, speakers) == (texts, [1, 1, 1])
    asked = {"model": "tiny", "prompt": ["Once", "Twice"], "max_tokens": 6}
    pairs = client.completions.create(n=2, temperature=0, **asked).choices
    once, twice = client.completions.create(temperature=0, **asked).choices
    assert [each.text for each in pairs] == [once.text, once.text, twice.text, twice.text]


def test_32_at_once_get_what_they_get_alone(here: Running) -> None:
    client = here.client()
    dialogues = [[{"role": "user", "content": "word " * n + str(n)}] for n in range(COUNT)]

    def ask(n: int) -> str:
        name = ("tiny", "tuned")[n % 2]
        return str(
            greedy(client, model=name, messages=dialogues[n], max_tokens=5).choices[0]
            .message.content
        )  # fmt: skip

    with ThreadPoolExecutor(COUNT) as pool:
        together = list(pool.map(ask, range(COUNT)))
    assert together == [ask(n) for n in range(COUNT)]


def test_who_goes_away_frees_the_place(here: Running) -> None:
    stream = greedy(here.client(), stream=True, max_tokens=400)
    assert [each for _, each in zip(range(3), stream, strict=False)][-1].choices[0].delta.content
    assert here.server.engine.running == 1
    stream.close()
    assert eventually(lambda: here.server.engine.running == 0)
    with pytest.raises(openai.APITimeoutError):  # of those that don't stream, too
        greedy(here.client(timeout=0.05), max_tokens=400)
    assert eventually(lambda: here.server.engine.running == 0)


def test_tokenize_tells_prompt_and_stops(here: Running) -> None:
    served = here.models["tuned"]
    told = httpx.post(f"{here.url}/tokenize", json={"model": "tuned", "messages": HELLO}).json()
    text = served.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    assert served.tokenizer.decode(told["tokens"]) == text
    assert told["stop_token_ids"] == sorted(served.stops)
    told = httpx.post(f"{here.url}/tokenize", json={"model": "tuned", "prompt": "ab"}).json()
    assert told["tokens"] == served.tokenizer("ab")["input_ids"]
    for body, given, status in (
        ({"prompt": "ab"}, True, 200), ({"prompt": "ab"}, False, 400),
        ({"messages": HELLO}, False, 200), ({"messages": HELLO}, True, 400),
    ):  # fmt: skip
        asked = {"model": "tuned", "add_special_tokens": given} | body
        assert httpx.post(f"{here.url}/tokenize", json=asked).status_code == status


def test_fields_that_change_nothing_are_taken(here: Running) -> None:
    """As vLLM's clients send them where nobody has chosen otherwise."""
    plain: dict[str, Any] = {
        "n": None,
        "stream": None,
        "best_of": 1,
        "logit_bias": {},
        "frequency_penalty": 0.0,
    }
    vllm = {"min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "stop_token_ids": []}
    extra = plain | vllm | {"min_tokens": 0, "skip_special_tokens": True}
    client = here.client()
    assert greedy(client, extra_body=extra).choices == greedy(client).choices


def test_a_template_gets_no_more_turns_than_it_can_loop_over() -> None:
    assert len(ChatBody(model="tiny", messages=HELLO * 2048).messages) == 2048
    with pytest.raises(ValidationError, match="at most 2048"):
        ChatBody(model="tiny", messages=HELLO * 2049)


@pytest.mark.slow
def test_others_are_answered_while_a_template_takes_its_time(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_limit, "RENDER_SECONDS", 1.4)
    slow = "{% for a in range(99999) if slow %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = here.models["tiny"].tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", slow + tokenizer.chat_template)
    settings = {"chat_template_kwargs": {"slow": True}}
    client, begun = here.client(), time.monotonic()
    with ThreadPoolExecutor(1) as pool, httpx.Client() as other:
        stuck = pool.submit(greedy, client, extra_body=settings)
        time.sleep(0.2)
        assert other.get(f"{here.url}/health").status_code == 200
        assert not stuck.done()
        with pytest.raises(openai.BadRequestError, match="the chat template: took more than 1 s"):
            stuck.result(10)
    assert time.monotonic() - begun >= 1.4


@pytest.mark.parametrize(
    ("settings", "status", "told"),
    [
        ({"model": "tinny"}, 404, "did you mean tiny?"),
        ({"temperature": 3}, 400, "temperature"),
        ({"n": 17}, 400, "n: Input should be less than or equal to 16"),
        ({"extra_body": {"best_of": 2}}, 400, "best_of=2 isn't served"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"top_logprobs": 3}, 400, "top_logprobs=3 requires logprobs to be true"),
        ({"top_logprobs": 3, "logprobs": False}, 400, "top_logprobs=3 requires logprobs"),
        ({"extra_body": {"min_p": 0.1}}, 400, "min_p=0.1 isn't served"),
        ({"extra_body": {"ignore_eos": True}}, 400, "ignore_eos=true isn't served"),
        ({"extra_body": {"chat_template": "{{ 6*7 }}"}}, 400, "chat_template="),
        ({"max_tokens": 10_000}, 400, "takes 512 together"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "takes 512 together"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, 400, "template refuses"),
        ({"messages": []}, 400, "messages"),
        ({"stop": ["a"] * 17}, 400, "stop: List should have at most 16 items"),
        ({"stop": ["a", ""]}, 400, "stop.1: String should have at least 1 character"),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "PWNED{{ 6*7 }}"}}},
            400,
            "chat_template is no variable of the template",
        ),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, 400, "tokenize is no var"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "only parts of type text",
        ),
    ],
)
def test_refusals_say_why(here: Running, settings: Any, status: int, told: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        greedy(here.client(), **settings)
    assert caught.value.status_code == status
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{bad", {}, 400, "invalid_json"),
        (b"[]", {}, 400, "invalid_json"),
        (b'{"model": "tiny", "messages": [{"role": "user"}], "echo": true}', {}, 400, None),
        (b'"' + b"x" * 10_000_000 + b'"', {}, 413, "request_too_large"),
        (b"{}", {"Host": "evil.example"}, 403, "host_not_allowed"),
        (b"{}", {"Origin": "http://evil.example"}, 403, "origin_not_allowed"),
        (b"{}", {"Origin": "http://["}, 403, "origin_not_allowed"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
    ],
)
def test_bad_bodies_and_strangers(
    here: Running, body: bytes, headers: dict[str, str], status: int, code: str | None
) -> None:
    sent = {"Content-Type": "application/json"} | headers
    reply = httpx.post(f"{here.url}/v1/chat/completions", content=body, headers=sent)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert greedy(here.client(), max_tokens=1).choices  # and goes on


def test_other_paths_and_methods_are_refused_in_the_same_form(here: Running) -> None:
    assert httpx.get(f"{here.url}/v1/nothing").json()["error"]["code"] == "not_found"
    reply = httpx.get(f"{here.url}/v1/completions")
    assert (reply.status_code, "error" in reply.json()) == (405, True)
    assert httpx.get(f"{here.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_a_vote_is_a_line_of_the_file(here: Running) -> None:
    vote = {"left": "tuned", "right": "tiny", "choice": "tie", "prompt": HELLO,
            "answers": ["a", "b"]}  # fmt: skip
    written = httpx.post(f"{here.url}/votes", json=vote).json()["written"]
    line = json.loads(Path(written).read_text(encoding="utf-8").splitlines()[-1])
    assert line.pop("time") > 0
    assert line == vote
    assert httpx.post(f"{here.url}/votes", json=vote | {"choice": "?"}).status_code == 400
    Path(written).unlink()
    Path(written).mkdir()
    refused = httpx.post(f"{here.url}/votes", json=vote)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "vote_not_written")
    assert refused.json()["error"]["message"].endswith("votes.jsonl: Is a directory")
    Path(written).rmdir()
    assert httpx.post(f"{here.url}/votes", json=vote).status_code == 200


@pytest.mark.slow
def test_a_key_a_full_queue_and_a_slow_answer(tmp_path: Any) -> None:
    limits = ServerLimits(waiting=1, seconds=0.6)
    with serving(tmp_path, limits=limits, access=AccessRules("secret"), max_rows=1) as here:
        for key in ("wrong", ""):
            with pytest.raises(openai.AuthenticationError):
                greedy(here.client(api_key=key or "none"))
        assert httpx.get(f"{here.url}/v1/models").status_code == 401
        trick = {"Host": "localhost/health?x="}  # a path and a query before those of the request
        assert httpx.get(f"{here.url}/v1/models", headers=trick).status_code == 401
        assert httpx.get(f"{here.url}/").status_code == 200
        client = here.client(api_key="secret")
        slow = {"max_tokens": 440}
        streams = [greedy(client, stream=True, **slow) for _ in range(1)]
        eventually(lambda: here.server.engine.running == 1)
        with ThreadPoolExecutor(4) as pool:
            rest = [pool.submit(greedy, client, **slow) for _ in range(4)]
            errors = [each.exception() for each in rest]
        statuses = {error.status_code for error in errors if isinstance(error, openai.APIError)}
        assert 429 in statuses
        streams[0].close()
        assert eventually(lambda: here.server.engine.running == 0)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["_lanes", "_waiting"])
def test_an_engine_that_fails_answers_all_who_wait_and_refuses_the_rest(
    broken: str, tmp_path: Any
) -> None:
    """What a step counts on is spoilt: its rows, or, before a message is heeded, its queue."""
    logger, log = logging.getLogger("shardtune"), StringIO()
    logger.addHandler(handler := logging.StreamHandler(log))
    with (
        serving(tmp_path, limits=ServerLimits(seconds=300), max_rows=1) as here,
        here.client() as client,
    ):
        engine = here.server.engine
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(greedy, client, max_tokens=440) for _ in range(3)]
            assert eventually(lambda: (engine.running, engine.waiting) == (1, 2))
            setattr(here.models["tiny"].batch, broken, None)
            errors = [each.exception(timeout=20) for each in asked]
        assert {type(error) for error in errors} == {openai.InternalServerError}
        assert all("the model failed: " in str(error) for error in errors)
        with pytest.raises(openai.InternalServerError, match="answers nothing more") as refused:
            greedy(client)
        assert refused.value.status_code == 503
        reply = httpx.get(f"{here.url}/health")
        told = reply.json()
        assert (reply.status_code, told["status"], told["running"]) == (503, "failed", 0)
        assert "NoneType" in told["error"]
    logger.removeHandler(handler)
    assert "the engine has ended" in log.getvalue()
