"""A server over tiny models, in this process, for tests with real clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardtune.config.job import ModelSection
from shardtune.models.load import load_base
from shardtune.models.model_files import ModelFiles
from shardtune.serve.continuous_batching import ContinuousBatch
from shardtune.serve.http_app import OpenAIServer, ServerLimits
from shardtune.serve.served_model import ServedModel, template_renderer
from shardtune.web.http_guard import AccessRules
from tests.web_server import behind_socket


@dataclass
class Running:
    """A server that listens."""

    server: OpenAIServer
    url: str
    models: dict[str, ServedModel]
    plain: Any
    """The same model, for plain transformers and peft."""

    def client(self, **settings: Any) -> Any:
        from openai import OpenAI

        key = settings.pop("api_key", "none")
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **settings)


def tiny_models(**limits: Any) -> tuple[list[ServedModel], Any]:
    """`tuned` and its base `tiny`: one model with an adapter of random weights."""
    from peft import LoraConfig, get_peft_model

    files = ModelFiles(ModelSection(name="tiny"))
    base = load_base(files, "fp32")
    with torch.no_grad():  # it reads bytes; it shall write letters, which are text by themselves
        rows = base.get_output_embeddings().weight
        rows[:32], rows[127:256] = 0, 0
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = get_peft_model(base, settings, adapter_name="one")
    batch = ContinuousBatch(deepcopy(model), **limits)
    tokenizer = files.tokenizer
    render = template_renderer(tokenizer)
    return [
        ServedModel(name, batch, adapter, tokenizer, files.stop_ids, 512, render, name, "tiny")
        for name, adapter in (("tuned", "one"), ("tiny", None))
    ], model.eval()


@contextmanager
def serving(
    folder: Path,
    *,
    limits: ServerLimits | None = None,
    access: AccessRules | None = None,
    **batch: Any,
) -> Iterator[Running]:
    """The tiny models behind a real socket."""
    models, plain = tiny_models(**batch)
    server = OpenAIServer(
        models,
        limits=limits or ServerLimits(),
        access=access or AccessRules(),
        votes=folder / "votes.jsonl",
    )
    with behind_socket(server.app) as url:
        yield Running(server, url, {each.name: each for each in models}, plain)


def eventually(holds: Any, seconds: float = 10) -> bool:
    """Whether it comes to hold."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return bool(holds())
