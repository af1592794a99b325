"""Loads what `chat` and `serve` answer with: runs and models, each base once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardtune.cli.model_source import (
    ModelSource,
    model_source,
    read_source,
    require_own_names,
    tokenizer_and_stops,
)
from shardtune.errors import ModelError, Problem

if TYPE_CHECKING:
    from shardtune.config.job import Job, ModelSection
    from shardtune.core.setup import Precision
    from shardtune.models.model_files import ModelFiles
    from shardtune.serve.continuous_batching import ContinuousBatch
    from shardtune.serve.served_model import RenderChat, ServedModel

LoadAs = Literal["auto", "4bit", "8bit"]
_QUANTIZATIONS = {"4bit": "nf4", "8bit": "int8"}


@dataclass(frozen=True)
class ServingMemory:
    """How weights are held, and how many requests run at once."""

    load: LoadAs = "auto"
    dtype: Precision | None = None
    max_rows: int = 16
    max_cache_tokens: int = 65_536


def load_served(sources: Sequence[str], memory: ServingMemory) -> list[ServedModel]:
    """The models of the command line in its order, then the bases of adapters: they are there, so
    they can be asked as well."""
    from shardtune.kernels.measure_matmul import widen_slow_products

    widen_slow_products()
    found = [read_source(source) for source in sources]
    require_own_names(found)
    served: list[ServedModel] = []
    bases: list[ServedModel] = []
    for group in _by_base(found, memory):
        ours, base = _load_group(group, memory)
        served += ours
        bases += base
    order = {each.name: place for place, each in enumerate(found)}
    served.sort(key=lambda each: order[each.name])
    return served + _with_own_names(bases, order)


def load_before(after: ServedModel, memory: ServingMemory) -> ServedModel:
    """The model that a run began with, where it isn't there already: as the run's job says (its
    revision, its own code), in the precision that the run's result has here."""
    from shardtune.checkpoint.run_dir import RunDir
    from shardtune.config.job_file import load_job

    job = load_job(RunDir(Path(after.source).expanduser()).job).job
    trained = ModelSource(after.name, after.source, job.model, job)
    group = [model_source(job.model)]
    (base,), _ = _load_group(group, replace(memory, dtype=_precision(trained, memory)))
    return _asked_as(base, after)


def _with_own_names(bases: Iterable[ServedModel], taken: Iterable[str]) -> list[ServedModel]:
    """Nobody named them: folders with one name, or revisions of one model, get a number."""
    named: list[ServedModel] = []
    names = set(taken)
    for base in bases:
        numbered = (f"{base.name}-{number}" for number in count(2))
        name = next(each for each in chain([base.name], numbered) if each not in names)
        names.add(name)
        named.append(replace(base, name=name))
    return named


def _asked_as(base: ServedModel, tuned: ServedModel) -> ServedModel:
    """A base without a template is asked as it was before training: with the run's."""
    if base.render is not None:
        return base
    return replace(base, tokenizer=tuned.tokenizer, stops=tuned.stops, render=tuned.render)


def _by_base(found: Iterable[ModelSource], memory: ServingMemory) -> list[list[ModelSource]]:
    """Those together that need the same weights under their adapters."""
    groups: dict[tuple[object, ...], list[ModelSource]] = {}
    for each in found:
        section = _stored(each.section, memory)
        key = (section.name, section.revision, section.add_tokens, section.quantization)
        groups.setdefault((*key, _precision(each, memory)), []).append(each)
    return list(groups.values())


def _stored(section: ModelSection, memory: ServingMemory) -> ModelSection:
    if memory.load == "auto" or section.quantization not in ("none", "fp8"):
        return section
    return section.model_copy(update={"quantization": _QUANTIZATIONS[memory.load]})


def _precision(source: ModelSource, memory: ServingMemory) -> Precision:
    """What is computed in: as trained or as stored, unless this machine is slow in it."""
    import torch

    from shardtune.core.host.matmul_speed import cpu_matmul_speed
    from shardtune.kernels.measure_matmul import DTYPES, measure_cpu_matmul
    from shardtune.models.model_files import ModelFiles

    if memory.dtype is not None:
        return memory.dtype
    if source.job is not None:
        wanted = source.job.train.compute_precision
    else:
        dtype = ModelFiles(source.section).dtype
        wanted = next((name for name, each in DTYPES.items() if each == dtype), "fp32")
    if torch.cuda.is_available() or wanted == "fp32":
        return wanted
    return wanted if wanted in cpu_matmul_speed(measure_cpu_matmul).fast else "fp32"


def _load_group(
    group: Sequence[ModelSource], memory: ServingMemory
) -> tuple[list[ServedModel], list[ServedModel]]:
    """One base with its adapters: what was asked for, and the base where nobody asked for it."""
    import torch

    from shardtune.models.load_result import attach_adapter, load_stored
    from shardtune.models.model_files import ModelFiles
    from shardtune.serve.continuous_batching import ContinuousBatch

    section = _stored(group[0].section, memory)
    files = ModelFiles(section)
    if files.kind == "encoder_decoder":
        fact = "is an encoder-decoder model, which reads a source and holds no dialogue"
        fix = "ask it with: shardtune generate RUN --prompt TEXT"
        raise ModelError(Problem(group[0].source, fact, fix))
    model = load_stored(files, _precision(group[0], memory))
    adapters: dict[str, str] = {}
    for place, each in enumerate(group):
        if each.adapter is not None:
            adapters[each.name] = f"adapter{place}"
            model = attach_adapter(model, str(each.adapter), adapters[each.name])
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    batch = ContinuousBatch(
        model, max_rows=memory.max_rows, max_cache_tokens=memory.max_cache_tokens
    )
    served = [_served(each, files, batch, adapters.get(each.name)) for each in group]
    if not adapters or any(each.adapter is None for each in group):
        return served, []
    base = _served(model_source(section), files, batch, None)
    return served, [_asked_as(base, served[0])]


def _served(
    source: ModelSource, files: ModelFiles, batch: ContinuousBatch, adapter: str | None
) -> ServedModel:
    from shardtune.serve.sampling_defaults import sampling_defaults
    from shardtune.serve.served_model import ServedModel, template_renderer

    tokenizer, stops = tokenizer_and_stops(source, files)
    longest = getattr(files.config.get_text_config(), "max_position_embeddings", None)
    served = ServedModel(
        name=source.name,
        batch=batch,
        adapter=adapter,
        tokenizer=tokenizer,
        stops=stops,
        context=min(longest or batch.max_cache_tokens, batch.max_cache_tokens),
        render=_plain_renderer(source.job, tokenizer) or template_renderer(tokenizer),
        source=source.source,
        base=source.job.model.name if source.job else source.source,
        defaults=sampling_defaults(files.generation_config),
    )
    if source.job is not None and served.render is not None:
        require_served_parity(source.job, served)
    return served


def _plain_renderer(job: Job | None, tokenizer: Any) -> RenderChat | None:
    """Under the plain headings that a run learnt its instructions with; None where it has not."""
    from shardtune.data.formats import learnt_plain, plain_dialogue
    from shardtune.models.generate import prompt_ids
    from shardtune.serve.served_model import ChatPrompt

    if job is None or not learnt_plain(job.data, tokenizer):
        return None

    def render(chat: ChatPrompt) -> list[int]:
        text = plain_dialogue(chat.turns)
        if not chat.asks:
            text += [str(turn["content"]) for turn in chat.turns if turn["role"] == "assistant"][-1]
        return prompt_ids(tokenizer, text, chat=False)

    return render


def require_served_parity(job: Job, served: ServedModel) -> None:
    """Refuses a run that would be asked otherwise than it was trained, by 20 dialogues that go the
    way of a request."""
    from shardtune.data.conversation import Conversation
    from shardtune.data.formats import learnt_plain
    from shardtune.data.template_parity import ChatReader, require_parity, training_reader
    from shardtune.models.model_files import ModelFiles
    from shardtune.serve.openai_requests import tokenized

    if learnt_plain(job.data, served.tokenizer) and served.tokenizer.chat_template:
        return  # it has a template that it wasn't trained with

    def tokenize(conversation: Conversation, prompt: bool) -> list[int]:
        return tokenized(served, conversation.messages, conversation.tools, asks=prompt)

    files = ModelFiles.of_job(job)
    trained = training_reader(files.tokenizer, files.stop_ids)
    reader = ChatReader(f"the server of {served.name}", tokenize, served.stops)
    require_parity(trained, [reader], files.tokenizer)
