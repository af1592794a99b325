"""Mixtures of experts train as plain transformers and peft train them: losses and gradient norms.

The reference sees each document alone, without padding, and divides one sum by the labels of the
step (`family_runs.py`). Where routers have losses of their own it sees all documents of a step at
once, as transformers' own loss has to.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from shardtune.config.job import Job
from shardtune.core.world import World
from tests.models.family_runs import (
    ADAPTERS,
    RATE,
    STEPS,
    Outcome,
    documents,
    family_job,
    loader,
    plain_model,
    plain_outcome,
    run,
    write_family,
)
from tests.ranks import on_ranks

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "mixtral",
    "olmoe",
    "qwen3_moe",
)
SAME = 1e-5  # relative, fp32
QUICK = ("gpt_oss", "qwen3_moe")


def rows(families: tuple[str, ...]) -> list[Any]:
    """The others take a minute together."""
    slow = [pytest.mark.long]
    return [pytest.param(name, marks=() if name in QUICK else slow) for name in families]


pytestmark = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not"  # plain peft's, of experts
)


def require_same(found: Outcome, expected: Outcome) -> None:
    assert not found.refused
    figures = (*found.losses, *found.norms)
    assert all(math.isfinite(figure) for figure in figures)
    assert figures == pytest.approx((*expected.losses, *expected.norms), rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", rows(FAMILIES))
def test_one_process(family: str, adapter: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    job = family_job(tmp_path, family, adapter, "ddp", 1)
    require_same(run(World(), job), plain_outcome(job))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "router"),
    [
        ("qwen3_moe", "gate"),
        ("gpt_oss", "router"),
        pytest.param("deepseek_v3", "gate", marks=pytest.mark.long),
    ],
)
def test_a_router_that_is_trained_beside_the_adapters(
    family: str, router: str, tmp_path: Path
) -> None:
    write_family(tmp_path, family)
    job = family_job(tmp_path, family, "lora", "ddp", 1)
    frozen = run(World(), job)
    asked = job.adapter.model_copy(update={"modules_to_save": (router,)})
    job = job.model_copy(update={"adapter": asked})
    found = run(World(), job)
    require_same(found, plain_outcome(job))
    assert found.norms != pytest.approx(frozen.norms, rel=5 * SAME), "the router must be felt"


BALANCED = ("gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen3_moe")
"""Those whose code in transformers has a load-balancing loss."""
AUX, Z = 0.3, 0.05


def with_router_losses(job: Job, micro_batch: int, aux: float = AUX) -> Job:
    more = {"router_aux_loss_coef": aux, "router_z_loss_coef": Z, "micro_batch": micro_batch}
    return job.model_copy(update={"train": job.train.model_copy(update=more)})


def plain_router_losses(job: Job) -> Outcome:
    """All documents of a step in one padded batch: transformers' own auxiliary loss, and the z-loss
    of its Switch Transformer on the same logits."""
    model, trained = plain_model(job)
    aux = float(job.train.router_aux_loss_coef)
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=0.9)
    rows, data, losses, norms = documents(), loader(job, 0, 1), [], []
    for step in range(STEPS):
        chosen = [rows[int(name.split(":")[1])] for name in data.samples(step)]
        ids = pad_sequence([torch.tensor(tokens) for tokens, _ in chosen], batch_first=True)
        flags = pad_sequence([torch.tensor(each) for _, each in chosen], batch_first=True)
        mask = pad_sequence([torch.ones(len(t)).long() for t, _ in chosen], batch_first=True)
        found = model(
            input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True
        )
        targets = ids.masked_fill(~flags, -100)[:, 1:]
        loss = functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), targets.flatten())
        real = mask.flatten().bool()
        z = torch.stack([router_z_loss_func(each[real][None]) for each in found.router_logits])
        optimizer.zero_grad()
        (loss + aux * found.aux_loss + Z * z.mean()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return Outcome(tuple(losses), tuple(norms))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", rows(BALANCED))
def test_router_losses(family: str, adapter: str, micro_batch: int, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    job = with_router_losses(family_job(tmp_path, family, adapter, "ddp", 1), micro_batch)
    found, plain = run(World(), job), plain_outcome(job)
    require_same(found, plain_router_losses(job))
    assert found.norms != pytest.approx(plain.norms, rel=1e-3), "the losses must be felt"


@pytest.mark.process
@pytest.mark.parametrize("aux", [AUX, 0.0])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_router_losses_over_ranks(strategy: str, aux: float, tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral")
    job = with_router_losses(family_job(tmp_path, "mixtral", "lora", strategy, 2), 1, aux)
    require_same(on_ranks(2, run, job)[0], plain_router_losses(job))
