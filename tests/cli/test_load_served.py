"""What `chat` and `serve` load: runs and models by name, each base once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardtune.cli.load_served import (
    ServingMemory,
    load_before,
    load_served,
    require_served_parity,
)
from shardtune.cli.result_command import ask
from shardtune.config.job import LoRA, ModelSection, NoAdapter
from shardtune.config.job_file import load_job
from shardtune.core.setup import Precision
from shardtune.errors import ModelError, RunError
from shardtune.models import load_result, tiny
from shardtune.models.model_files import ModelFiles
from shardtune.serve.http_app import OpenAIServer, ServerLimits
from shardtune.serve.served_model import ChatPrompt, template_renderer
from shardtune.web.http_guard import AccessRules
from tests.checkpoint.test_merge import STOPS, finished_run
from tests.models.test_template_defaults import OFF, OPENS, with_template
from tests.serve.answers import ask as request
from tests.serve.served import ServedModel

MEMORY = ServingMemory()
TINY = ModelSection(
    name="tiny", stop_tokens=tuple(tiny.tokens().convert_ids_to_tokens(sorted(STOPS)))
)


def said(model: ServedModel, text: str) -> str:
    assert model.render is not None
    prompt = model.render(ChatPrompt([{"role": "user", "content": text}]))
    asked, heard = request(prompt, 12, adapter=model.adapter, stops=model.stops)
    model.batch.submit(asked)
    while model.batch.step():
        pass
    return str(model.tokenizer.decode(heard.tokens, skip_special_tokens=True)).strip()


@pytest.mark.slow
def test_adapters_share_their_base(tmp_path: Path) -> None:
    finished_run(tmp_path / "one", LoRA(rank=4), TINY)
    finished_run(tmp_path / "two", LoRA(rank=2, targets=("q_proj",)), TINY)
    finished_run(tmp_path / "whole", NoAdapter(), TINY)
    sources = [str(tmp_path / "one"), f"second={tmp_path / 'two'}", str(tmp_path / "whole")]
    one, two, whole, base = load_served(sources, MEMORY)
    assert [each.name for each in (one, two, whole, base)] == ["one", "second", "whole", "tiny"]
    assert one.batch is two.batch is base.batch is not whole.batch
    assert one.stops == two.stops == whole.stops == STOPS
    found = {each.name: said(each, "Hello") for each in (one, two, whole, base)}
    for name in ("one", "two", "whole"):  # as `shardtune generate` says it
        alone = ask(tmp_path / name, "Hello", max_new_tokens=12, temperature=0, raw=False)
        assert found["second" if name == "two" else name] == alone
    assert len(set(found.values())) >= 3


def test_a_model_needs_no_run() -> None:
    (model,) = load_served(["plain=tiny"], MEMORY)
    assert (model.name, model.adapter, model.base) == ("plain", None, "tiny")
    assert model.context == 4096


def test_names_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="two models are called 'tiny'"):
        load_served(["tiny", "tiny"], MEMORY)
    finished_run(tmp_path / "run", LoRA(rank=4), TINY)
    with pytest.raises(ModelError, match="folder of an adapter"):
        load_served([str(tmp_path / "run" / "result")], MEMORY)


@pytest.mark.slow
def test_bases_of_one_name_get_numbers(tmp_path: Path) -> None:
    for place in "ab":
        finished_run(tmp_path / place / "tiny", NoAdapter(), TINY)
        section = TINY.model_copy(update={"name": str(tmp_path / place / "tiny" / "result")})
        finished_run(tmp_path / f"on_{place}", LoRA(rank=4), section)
    served = load_served([str(tmp_path / "on_a"), str(tmp_path / "on_b")], MEMORY)
    assert [each.name for each in served] == ["on_a", "on_b", "result", "result-2"]
    assert [each.batch is served[1].batch for each in served] == [False, True, False, True]
    with pytest.raises(ValueError, match="two models have one name"):
        OpenAIServer(
            [served[2], replace(served[3], name="result")],
            limits=ServerLimits(), access=AccessRules(), votes=tmp_path / "votes.jsonl",
        )  # fmt: skip


def test_before_a_full_fine_tune_is_the_model_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = TINY.model_copy(update={"revision": "main", "trust_remote_code": True})
    run = finished_run(tmp_path / "run", NoAdapter(), section)
    (after,) = load_served([str(run.path)], MEMORY)
    read: list[ModelSection] = []
    load = load_result.load_stored

    def noted(files: ModelFiles, precision: Precision) -> object:
        read.append(files.section)
        return load(files, precision)

    monkeypatch.setattr(load_result, "load_stored", noted)
    before = load_before(after, MEMORY)
    assert (before.name, before.batch is after.batch) == ("tiny", False)
    assert [(each.name, each.revision, each.trust_remote_code) for each in read] == [
        ("tiny", "main", True)
    ]
    assert said(before, "Hello") == said(load_served(["tiny"], MEMORY)[0], "Hello")


def test_other_stops_or_another_template_than_in_training_are_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", LoRA(rank=4))
    with pytest.raises(RunError, match="training ends answers at"):  # not at a line break
        load_served([str(run.path)], MEMORY)
    run = finished_run(tmp_path / "other", LoRA(rank=4), TINY)
    served = load_served([str(run.path)], MEMORY)[0]
    other = tiny.tokens()
    other.chat_template = other.chat_template.replace("<|im_end|>", "<|endoftext|>")
    changed = replace(served, render=template_renderer(other))
    with pytest.raises(RunError, match=r"token \d+ of 'question' is 259"):
        require_served_parity(load_job(run.job).job, changed)


def test_a_server_asks_with_the_values_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "opens.jinja").write_text(OPENS)
    run = finished_run(tmp_path / "run", LoRA(rank=4), TINY)
    served = load_served([str(run.path)], MEMORY)[0]
    job = load_job(run.job).job
    own = {"chat_template": str(tmp_path / "opens.jinja"), "chat_template_kwargs": OFF}
    job = job.model_copy(update={"data": job.data.model_copy(update=own)})
    require_served_parity(job, replace(served, render=template_renderer(with_template(OPENS, OFF))))
    plain = replace(served, render=template_renderer(with_template(OPENS)))
    with pytest.raises(RunError, match=r"token \d+ of the prompt of 'question' is"):
        require_served_parity(job, plain)
