"""Random jobs for `benchmarks.gpu --sample N --seed S`: drawn from families, sizes, adapters,
ranks, dropout, rows, lengths and levels of recomputation, so that nobody chose what is measured.

A drawn job has a name that says how it was drawn (`sample 7.3`: the third of seed 7), so that a
process of its own can draw it once more.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.gpu_cases import ATTENTION, CASES, MLP, WITHOUT_LIGER, Case, our_job
from shardtune.config.job import Job
from shardtune.core.model.known_models import find_model, known_model
from shardtune.core.units import GIB
from shardtune.plan.cluster import parse_cluster
from shardtune.plan.forecast import Forecast, forecast

MODELS = (
    "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B",
    "HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM3-3B",
    "mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3",
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B",
    "google/gemma-2-2b", "google/gemma-3-270m", "google/gemma-3-1b-pt", "gemma-3-4b-text",
    "microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4", "ibm-granite/granite-3.1-8b-base",
    "allenai/OLMo-2-1124-7B", "tiiuae/falcon-7b", "EleutherAI/pythia-1.4b",
    "EleutherAI/pythia-6.9b", "bigcode/starcoder2-3b", "bigcode/starcoder2-7b",
)  # fmt: skip
NAMED = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "granite"})
"""Families whose linear layers have Llama's names, and none of which has a bias in its MLP: jobs
with adapters on some of them, and with a 4-bit base."""
WHOLE = 3.3e9
"""Weights up to which all of them are trained."""
MOST_GIB = 120.0
"""That a job may take by its forecast: peers take more."""
NAME = re.compile(r"sample (\d+)\.(\d+)")


def is_drawn(name: str) -> bool:
    """Whether a row's name is that of a drawn job."""
    return NAME.fullmatch(name) is not None


def case_of(name: str) -> Case:
    """The row of that name, of the table or drawn; KeyError if there is none."""
    found = NAME.fullmatch(name)
    return CASES[name] if found is None else sample(int(found[1]), int(found[2]))


def forecast_of(case: Case, method: str, card: str = "H200") -> Forecast:
    """What `shardtune estimate` says of one of our methods."""
    job = Job.model_validate_json(json.dumps(our_job(case, method)))
    return forecast(job, known_model(case.model), parse_cluster(f"1x{card}"))


@cache
def sample(seed: int, number: int) -> Case:
    """The job of that number, from one on, that fits a card of 139 GiB by its forecast."""
    source = random.Random(f"{seed}/{number}")
    while True:
        case = replace(_drawn(source), name=f"sample {seed}.{number}")
        found = forecast_of(case, "shardtune")
        if found.memory.required < MOST_GIB * GIB:
            return case


def _drawn(source: random.Random) -> Case:
    model = source.choice(MODELS)
    family = str(find_model(model).config["model_type"])
    length = source.choice((512, 1024, 2048, 4096))
    rows = source.choice([n for n in (1, 2, 4, 8, 16) if n * length <= 16_384])
    level = source.choice(("none", "none", "most"))
    given: dict[str, Any] = {"level": level}
    if find_model(model).parameters <= WHOLE and source.random() < 0.3:
        given["lora"] = False
    else:
        named = family in NAMED
        given["rank"] = source.choice((8, 16, 32, 64, 128))
        given["dropout"] = source.choice((0.0, 0.0, 0.05, 0.1))
        given["targets"] = source.choice(((), (), (), ATTENTION, MLP)) if named else ()
        given["base"] = source.choice(("bf16", "bf16", "nf4")) if named else "bf16"
    return Case("", model, rows, length, _peers(family, given), asked=1.0, **given)


def _peers(family: str, given: dict[str, Any]) -> tuple[str, ...]:
    """The two that have been the fastest on jobs of this kind."""
    if given["level"] == "none":
        compiled, liger, plain = "compile + Liger loss", "Liger", "HF"
    else:
        compiled = "compile + Liger loss, checkpointing"
        liger, plain = "Liger, checkpointing", "HF, checkpointing"
    if family in WITHOUT_LIGER:
        return (plain, "compile" if given["level"] == "none" else "compile, checkpointing")
    if given.get("base") == "nf4":
        return (liger, plain)
    if family == "granite":
        return (liger, "compile" if given["level"] == "none" else "compile, checkpointing")
    return (compiled, liger)


def described(case: Case) -> str:
    """A drawn job in words."""
    if case.lora:
        where = {(): "all layers", ATTENTION: "attention", MLP: "MLP"}[case.targets]
        what = f"LoRA of rank {case.rank} on {where}"
        what += f", dropout {case.dropout:g}" if case.dropout else ""
        what += ", NF4" if case.base == "nf4" else ""
    else:
        what = "all weights"
    again = ", recomputed" if case.level != "none" else ""
    return f"{case.model}, {what}, {case.rows}x{case.length}{again}"
