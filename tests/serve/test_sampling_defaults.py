"""What a model's generation_config.json says of sampling: it holds where a request says nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="the client comes with the extra dev")
pytest.importorskip("starlette", reason="the server comes with the extra serve")

from shardtune.cli.load_served import ServingMemory, load_served  # noqa: E402
from shardtune.config.job import ModelSection  # noqa: E402
from shardtune.models.model_files import ModelFiles  # noqa: E402
from shardtune.serve.http_app import OpenAIServer, ServerLimits  # noqa: E402
from shardtune.serve.sampling_defaults import SamplingDefaults, sampling_defaults  # noqa: E402
from shardtune.web.http_guard import AccessRules  # noqa: E402
from tests.serve.terminal import Terminal  # noqa: E402
from tests.web_server import behind_socket  # noqa: E402

LIKELIEST = {"do_sample": True, "temperature": 1.5, "top_k": 1, "repetition_penalty": 1.05}
"""Of one token there is one draw: whoever takes the file's `top_k` says what greedy says."""


def with_file(folder: Path, said: dict[str, Any]) -> Path:
    """The built-in tiny model, with what its file says besides its stop tokens."""
    shutil.copytree(ModelFiles(ModelSection(name="tiny")).path, folder)
    file = folder / "generation_config.json"
    own = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(own | said), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("defaults")
    models = load_served([str(with_file(folder / "own", LIKELIEST)), "tiny"], ServingMemory())
    server = OpenAIServer(
        models, limits=ServerLimits(), access=AccessRules(), votes=folder / "votes.jsonl"
    )
    with behind_socket(server.app) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def said(client: Any, model: str = "own", seed: int = 1, **settings: Any) -> str:
    hello = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(
        model=model, messages=hello, max_tokens=16, seed=seed, logprobs=True, **settings
    )
    return "".join(repr(each.bytes) for each in answer.choices[0].logprobs.content)


def test_the_file_holds_where_a_request_says_nothing(client: Any) -> None:
    greedy = said(client, temperature=0)
    assert [said(client, seed=seed) for seed in (1, 2)] == [greedy, greedy]
    drawn = [said(client, "tiny", seed=seed) for seed in (1, 2)]
    assert len({*drawn, greedy}) == 3, "the other model has no such file"


def test_what_a_request_says_wins(client: Any) -> None:
    free = {"extra_body": {"top_k": -1}}
    assert len({said(client, seed=seed, **free) for seed in (1, 2, 3)}) == 3
    # With the file's temperature, and with that of the request.
    assert said(client, **free) == said(client, temperature=1.5, **free)
    assert said(client, **free) != said(client, temperature=0.3, **free)
    own = said(client, "tiny", temperature=1.5)
    assert own == said(client, **free), "the same draws of the same weights"


def test_texts_are_continued_by_the_file_too(client: Any) -> None:
    asked = {"model": "own", "prompt": "Once", "max_tokens": 12, "logprobs": 1}
    one, other, greedy = (
        client.completions.create(**asked, **how).choices[0].logprobs.token_logprobs
        for how in ({"seed": 1}, {"seed": 2}, {"temperature": 0})
    )
    assert one == other == greedy


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, SamplingDefaults(0.6, 0.95, 20)),
        ({"top_k": -1, "min_p": 0.0}, SamplingDefaults(top_k=0)),
        (
            {"top_p": 0.8, "repetition_penalty": 1.1, "typical_p": 1.0},
            SamplingDefaults(top_p=0.8, left_out={"repetition_penalty": 1.1}),
        ),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults()),
        (
            {"temperature": 5, "top_k": math.inf, "top_p": True, "max_new_tokens": 64},
            SamplingDefaults(
                left_out={"temperature": 5, "top_p": True, "top_k": math.inf, "max_new_tokens": 64}
            ),
        ),
    ],
)
def test_what_is_taken_from_a_file(
    file: dict[str, Any], found: SamplingDefaults, tmp_path: Path
) -> None:
    folder = with_file(tmp_path / "own", file)
    assert sampling_defaults(ModelFiles(ModelSection(name=str(folder))).generation_config) == found


TOLD = "by its generation_config.json: temperature 1.5, top_k 1; not applied: repetition_penalty"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("choice", "told"), [("auto", True), ("none", False)])
def test_serve_says_what_it_takes(choice: str, told: bool, tmp_path: Path) -> None:
    folder = with_file(tmp_path / "own", LIKELIEST)
    terminal = Terminal("serve", str(folder), "--port", "0", "--generation-config", choice)
    shown = " ".join(terminal.until("Ctrl-C ends it").split())
    terminal.process.send_signal(signal.SIGINT)
    terminal.process.wait(60)
    os.close(terminal.fd)
    assert (TOLD in shown) is told


@pytest.mark.process
@pytest.mark.slow
def test_chat_takes_it_and_its_options_win(tmp_path: Path) -> None:
    folder = with_file(tmp_path / "own", LIKELIEST)
    terminal = Terminal("chat", str(folder), "--temperature", "0.5")
    assert TOLD in " ".join(terminal.until("> ").split())
    terminal.type("/set")
    assert "temperature 0.5, top_p 1.0, top_k 1" in terminal.until("\n> ")
    assert terminal.end() == 0
