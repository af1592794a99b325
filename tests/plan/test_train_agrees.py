"""One truth: what `estimate` and `plan` accept `train` accepts, and the other way round.

`train` is asked as it asks itself before it starts a rank: the model's files are opened, its
modules are built without memory, and the adapter is looked for in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from shardtune import forecast, rank_strategies
from shardtune.config.auto import resolve
from shardtune.config.job import Job
from shardtune.config.rules import check
from shardtune.core.files.yaml_document import dotted
from shardtune.core.host.machine import Machine
from shardtune.core.model.architectures import SHAPE_READERS
from shardtune.core.model.family_support import FAMILY_SUPPORT
from shardtune.core.model.known_models import find_model
from shardtune.core.pipeline_schedule import Pipelining
from shardtune.errors import ModelError, ShardtuneError
from shardtune.models.materialize import decoder_layers, without_memory
from shardtune.models.quantization.swap import quantizable
from shardtune.parallel.pipeline.stage import Anatomy, Division
from shardtune.plan.estimate.rank_share import stage_layers
from shardtune.training.inputs import open_model
from tests.jobs import make_job
from tests.models.families import CONFIGS, write
from tests.models.family_runs import write_family

QUICK = ("bloom", "gpt2", "llama", "mixtral", "opt")
FAMILIES = sorted(CONFIGS.keys() & SHAPE_READERS.keys())
ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({"type": "none"}, "none"),
    "lora": ({"type": "lora", "rank": 4}, "none"),
    "dora": ({"type": "lora", "rank": 4, "variant": "dora"}, "none"),
    "ia3": ({"type": "ia3"}, "none"),
    "qlora": ({"type": "lora", "rank": 4}, "nf4"),
    "int8": ({"type": "lora", "rank": 4}, "int8"),
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed": ({"packing": True}, {}),
    "padded": ({"packing": False}, {}),
    "too long": ({"sequence_length": 4096}, {}),
    "sdpa": ({}, {"attention": "sdpa"}),
    "flex": ({}, {"attention": "flex_attention"}),
}
"""Changes of the sections `data` and `model`."""


def rows(families: Collection[str] = FAMILIES) -> list[Any]:
    slow = [pytest.mark.long]
    return [pytest.param(name, marks=() if name in QUICK else slow) for name in families]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a tiny model of a family with a tokenizer, once."""
    base = tmp_path_factory.mktemp("families")

    def written(family: str) -> Path:
        if not (base / family).is_dir():
            write_family(base, family)
            write_tokenizer(base / family)
        return base / family

    return written


def write_tokenizer(folder: Path) -> None:
    words = {f"w{number}": number for number in range(67)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="w1", pad_token="w0", unk_token="w3"
    )
    fast.save_pretrained(folder)


def family_job(
    path: Path, adapter: str, data: dict[str, Any], model: dict[str, Any], **strategy: Any
) -> Job:
    chosen, quantization = ADAPTERS[adapter]
    return make_job(
        model={"name": str(path), "quantization": quantization, **model},
        adapter=chosen,
        data={"sequence_length": 24, **data},
        train={"steps": 3, "global_batch": 4, "micro_batch": 2},
        strategy={"type": "ddp"} | strategy,
        launch={"processes": 2},
    )


def by_train(job: Job) -> None:
    """What `train` refuses before the first step."""
    resolved = resolve(job, Machine(cores=2, gpus=0)).job
    check(resolved, dotted)
    files = open_model(resolved)
    if job.model.quantization != "none":
        model = without_memory(files.config, job.model, torch.float32)
        quantizable(decoder_layers(model), (), job.model.quantization)


def refused(attempt: Callable[[], object]) -> str:
    """Which keys are at fault; nothing for what is accepted. Some facts name the model, others call
    it so."""
    try:
        attempt()
    except ShardtuneError as error:
        return "; ".join(each.place for each in error.problems)
    return ""


def verdicts(job: Job) -> dict[str, str]:
    return {
        "train": refused(lambda: by_train(job)),
        "estimate": refused(lambda: forecast(job, "2xA100-80GB")),
        "plan": refused(lambda: rank_strategies(job, "2xA100-80GB")),
    }


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", rows())
def test_every_adapter(family: str, adapter: str, folder: Callable[[str], Path]) -> None:
    found = verdicts(family_job(folder(family), adapter, {}, {}))
    assert found["estimate"] == found["train"]
    assert bool(found["plan"]) == bool(found["train"])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", rows())
def test_every_setting(family: str, setting: str, folder: Callable[[str], Path]) -> None:
    found = verdicts(family_job(folder(family), "lora", *SETTINGS[setting]))
    assert found["estimate"] == found["train"]
    assert bool(found["plan"]) == bool(found["train"])
    support = FAMILY_SUPPORT.get(family)
    if setting == "packed" and support is not None:
        assert bool(found["train"]) == bool(support.mixes_documents)


def test_there_are_enough_families() -> None:
    assert len(FAMILIES) >= 30


@pytest.mark.parametrize("kind", ["bert", "vit", "mamba", "whisper"])
def test_a_family_that_is_not_trained_is_refused_by_all(kind: str, tmp_path: Path) -> None:
    """By its config alone: no weight is there."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    found = verdicts(family_job(tmp_path, "lora", {}, {}))
    assert all(found.values()), found


@pytest.mark.parametrize(
    "strategy", [{"type": "expert", "degree": 2}, {"type": "fsdp", "expert": 2}]
)
def test_experts_in_nf4_that_ranks_cannot_divide_are_refused_in_the_same_words(
    strategy: dict[str, Any], tmp_path: Path
) -> None:
    """A matrix of 31 x 32 weights has fifteen blocks of 64 and a half."""
    write(tmp_path, "mixtral", intermediate_size=31)
    write_tokenizer(tmp_path)
    job = family_job(tmp_path, "qlora", {}, {}, **strategy)
    said = []
    for attempt in (lambda: by_train(job), lambda: forecast(job, "2xA100-80GB")):
        with pytest.raises(ModelError, match="64 weights together, and 992 of an expert") as caught:
            attempt()
        said.append(str(caught.value))
    assert said[0] == said[1]
    whole = family_job(tmp_path, "qlora", {}, {})  # nobody divides them
    assert verdicts(whole) == {"train": "", "estimate": "", "plan": ""}


ORDERS = {
    "1f1b": Pipelining("1f1b"),
    "interleaved": Pipelining("interleaved", 2),
    "zero_bubble": Pipelining("zero_bubble", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "olmoe-1b-7b-0924", "qwen3-0.6b"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_stages_have_as_many_layers_as_the_trainer_gives_them(name: str, order: Pipelining) -> None:
    known = find_model(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known.config))
    division = Division.of(Anatomy.of(model), order, 4)
    counts = [sum(len(division.layers[stage]) for stage in division.mine(n)) for n in range(4)]
    assert stage_layers(known.shape, order, 4) == tuple(counts)
