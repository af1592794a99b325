"""A few steps of the default job on a tiny model of any family: by us, and by plain transformers.

The reference is transformers, peft and torch.optim: each document by itself, one sum over all
labels of the step, one division. It is handed our documents, and the values that our adapters start
from (they are drawn by name, which peft doesn't do).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from shardtune.config.auto import resolve
from shardtune.config.job import Job, LoRA
from shardtune.core.host.machine import Machine
from shardtune.core.world import World
from shardtune.data.dataset import PreparedData
from shardtune.data.loader import Loader
from shardtune.errors import ShardtuneError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from shardtune.models.packing_check import require_document_isolation
from shardtune.training.engine_setup import make_plan
from tests.jobs import make_job
from tests.models.families import MULTIMODAL, config, transformers_class, write
from tests.synthetic import Tokens, prepared

STEPS, BATCH, LENGTH = 3, 4, 24
FIGURES = ("loss", "grad_norm")
RATE = 0.05
MAMBA = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
"""Their kernels multiply with the weight of `out_proj` themselves, past an adapter."""
OWN_NAMES = (*MAMBA, "lfm2_moe", "qwen3_5_moe_text")
"""Mixtures in which peft takes no names of MLPs for the experts'."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"type": "lora", "rank": 4, "alpha": 8},
    "full": {"type": "none"},
}


@dataclass(frozen=True)
class Outcome:
    """What came of a job: its losses, or why it was refused."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    """Of the gradients, before they are clipped."""
    packing: bool = False
    refused: str = ""


def write_family(folder: Path, family: str) -> None:
    """A model without dropout, whose random numbers depend on how a batch is cut."""
    shape = config(family).to_dict()
    dropouts = {key: 0.0 for key, value in shape.items() if "drop" in key and value}
    write(folder / family, family, **dropouts)


def family_job(
    folder: Path,
    family: str,
    adapter: str,
    strategy: str,
    ranks: int,
    *,
    quantization: str = "none",
) -> Job:
    """The default job, as small as it goes, with every `auto` resolved on a CPU."""
    job = make_job(
        model={"name": str(folder / family), "quantization": quantization},
        adapter=ADAPTERS[adapter],
        data={"sequence_length": LENGTH},
        train={
            "steps": STEPS,
            "global_batch": BATCH,
            "micro_batch": 2,
            "precision": "fp32",
            "learning_rate": RATE,
            "schedule": "constant",
            "optimizer": {"type": "sgd", "momentum": 0.9},  # shows what is scaled wrongly
        },
        strategy={"type": strategy},
        launch={"processes": ranks},
    )
    return resolve(job, Machine(cores=2, gpus=0)).job


def documents() -> list[Tokens]:
    """Of 5 to 20 tokens; the first third of each is a prompt."""
    draw = np.random.default_rng(3)
    lengths = draw.integers(5, 20, 40)
    return [
        (draw.integers(3, 67, n).tolist(), [False] * (n // 3 + 1) + [True] * (n - n // 3 - 1))
        for n in lengths.tolist()
    ]


def loader(job: Job, rank: int, ranks: int) -> Loader:
    data = PreparedData((prepared("d", documents()),), ())
    micro_batch = int(job.train.micro_batch)
    return Loader(
        data, job.data, seed=0, global_batch=BATCH, micro_batch=micro_batch, rank=rank,
        ranks=ranks, pad_id=0,
    )  # fmt: skip


def run(world: World, job: Job, rows: int | None = None) -> Outcome:
    """The steps of `job` on this rank, of as many as have `rows` of their own (all of them)."""
    try:
        plan = make_plan(job, world.size, STEPS)
        builder = PretrainedModelBuilder(ModelFiles(job.model), job.adapter, job.train)
        with plan.strategy.build(builder, plan.setup, world) as engine:
            if job.data.packs:
                require_document_isolation(engine.module(), rows=2)
            ranks = rows or world.size
            batches = loader(job, world.rank % ranks, ranks).steps(0, STEPS)
            steps = [engine.step(batch) for batch in batches]
        losses, norms = (tuple(getattr(step, name) for step in steps) for name in FIGURES)
        return Outcome(losses, norms, job.data.packs)
    except ShardtuneError as error:
        return Outcome(refused="; ".join(problem.fact for problem in error.problems))


def run_all(
    world: World, folder: Path, cases: Iterable[tuple[str, str, str]]
) -> dict[tuple[str, str, str], Outcome]:
    """All cases (family, adapter, strategy) on the same ranks."""
    return {case: run(world, family_job(folder, *case, world.size)) for case in cases}


def plain_losses(job: Job) -> list[float]:
    """The losses of the same job by transformers, peft and torch alone."""
    return list(plain_outcome(job).losses)


def plain_outcome(job: Job) -> Outcome:
    """The same job by transformers, peft and torch alone."""
    model, trained = plain_model(job)
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=0.9)
    rows, data, losses, norms = documents(), loader(job, 0, 1), [], []
    for step in range(STEPS):
        chosen = [rows[int(name.split(":")[1])] for name in data.samples(step)]
        labels = sum(sum(flags) for _, flags in chosen)
        total = 0.0
        optimizer.zero_grad()
        for ids, flags in chosen:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            places = [n - 1 for n, trained_here in enumerate(flags) if trained_here]
            targets = torch.tensor(ids)[[n + 1 for n in places]]
            loss = functional.cross_entropy(logits[places], targets, reduction="sum") / labels
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
        losses.append(total)
    return Outcome(tuple(losses), tuple(norms))


def plain_model(job: Job) -> tuple[Any, list[torch.nn.Parameter]]:
    """The job's model by transformers and peft, and what of it is trained."""
    from peft import get_peft_model

    made_by = transformers_class(Path(job.model.name).name)
    model: Any = made_by.from_pretrained(job.model.name, dtype=torch.float32)
    if isinstance(job.adapter, LoRA):
        settings = plain_lora(model)
        settings.modules_to_save = list(job.adapter.modules_to_save) or None
        model = get_peft_model(model, settings)
        ours = PretrainedModelBuilder(ModelFiles(job.model), job.adapter, job.train).whole("cpu")
        model.load_state_dict(ours.state_dict())
    model.train()
    return model, [each for each in model.parameters() if each.requires_grad]


def plain_lora(model: Any) -> Any:
    """Rank 4 on all linear layers, and 4 / 2 on each of the experts, of which a token meets two.

    peft takes names of MLPs in most mixtures for the experts', which have got a place of their own.
    """
    from peft import LoraConfig

    named = [(name.split("."), each) for name, each in model.named_parameters()]
    stacks = [words[-2:] for words, each in named if each.ndim == 3]
    experts = {".".join(words) for words in stacks if words[0] == "experts"}
    if not experts and model.config.model_type not in MAMBA:
        conv1d = any(type(module).__name__ == "Conv1D" for module in model.modules())
        encoders = r".*\.(vision_tower|embed_vision|multi_modal_projector|visual)\..*"
        unseen = encoders if model.config.model_type in MULTIMODAL else None
        return LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules="all-linear",
            exclude_modules=unseen,
            fan_in_fan_out=conv1d,
        )
    linear = (n for n, each in model.named_modules() if isinstance(each, torch.nn.Linear))
    names = {name.rpartition(".")[2] for name in linear} - {"lm_head"}
    if model.config.model_type not in ("qwen2_moe", *OWN_NAMES):
        names -= {"gate_proj", "up_proj", "down_proj"}
    if model.config.model_type in MAMBA:
        names -= {"out_proj"}
    return LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=sorted(names),
        target_parameters=sorted(experts) or None,
        rank_pattern=dict.fromkeys(experts, 2),
    )
