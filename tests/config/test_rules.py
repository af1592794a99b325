"""Each rule is broken once, by a job that breaks no other."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from shardtune.config.auto import resolve
from shardtune.config.job import Job
from shardtune.config.rules import RULES, check
from shardtune.core.capabilities import Capabilities, Support
from shardtune.core.files.yaml_document import dotted
from shardtune.core.host.machine import Machine
from shardtune.errors import JobError, Problem
from shardtune.parallel.ddp.strategy import DDP
from tests.jobs import make_job


def source(path: str, **more: Any) -> dict[str, Any]:
    return {"path": path, "format": "completion", **more}


def zero(**settings: Any) -> dict[str, Any]:
    return {"type": "deepspeed", "zero_optimization": settings}


# Of each rule: the sections that break it, and the problem that is told.
BROKEN: dict[str, tuple[dict[str, dict[str, Any]], Problem]] = {
    "steps-or-epochs": (
        {"train": {"steps": 3, "epochs": 2.5}},
        Problem("train.steps", "both steps (3) and epochs (2.5) are given", "keep one of the two"),
    ),
    "warmup-within-steps": (
        {"train": {"steps": 10, "warmup_steps": 10}},
        Problem(
            "train.warmup_steps",
            "10 steps of warmup in a run of 10: the learning rate would never reach its peak",
            "warm up for fewer steps, or train for more",
        ),
    ),
    "template-variables-are-free": (
        {"data": {"chat_template_kwargs": {"tools": None, "is thinking": True}}},
        Problem(
            "data.chat_template_kwargs",
            "tools is given to every template, and can't be set, "
            "'is thinking' is no name that a template can read",
            "leave it out; set variables of the template, such as {enable_thinking: false}",
        ),
    ),
    "warmup-once": (
        {"train": {"steps": 10, "warmup_steps": 2, "warmup_ratio": 0.1}},
        Problem(
            "train.warmup_ratio",
            "both warmup_ratio (0.1) and warmup_steps (2) are given",
            "keep one of the two",
        ),
    ),
    "schedule-within-steps": (
        {"train": {"steps": 10, "schedule_start": 10}},
        Problem(
            "train.schedule_start",
            "the schedule begins after step 10 of 10",
            "train for more steps, or set train.schedule_start: 0",
        ),
    ),
    "router-losses-read-layers-as-written": (
        {"train": {"kernels": "compiled", "router_z_loss_coef": 0.001}},
        Problem(
            "train.kernels",
            "is compiled, and router losses need hooks that compiled layers bypass",
            "set train.kernels: eager, or train.router_aux_loss_coef: 0 and "
            "train.router_z_loss_coef: 0",
        ),
    ),
    "one-cycle-has-its-own-warmup": (
        {"train": {"steps": 10, "schedule": "one_cycle", "warmup_steps": 2}},
        Problem(
            "train.warmup_steps",
            "2 steps of warmup, and schedule: one_cycle, which begins with a rise over 30% of the "
            "run",
            "leave warmup_steps out; train.one_cycle.pct_start says how long the rate rises",
        ),
    ),
    "one-cycle-is-the-schedule": (
        {"train": {"one_cycle": {"pct_start": 0.1}}},
        Problem(
            "train.one_cycle",
            "is set, but train.schedule is cosine",
            "set train.schedule: one_cycle, or leave it out",
        ),
    ),
    "micro-batch-within-global": (
        {"train": {"global_batch": 6, "micro_batch": 4}, "launch": {"processes": 2}},
        Problem(
            "train.micro_batch",
            "micro_batch(4) x processes(2) = 8 > global_batch(6)",
            "lower micro_batch or raise global_batch; `micro_batch: auto` always fits",
        ),
    ),
    "flash-attention-packs-one-row": (
        {"model": {"name": "m", "attention": "flash_attention_2"}, "train": {"micro_batch": 2}},
        Problem(
            "train.micro_batch",
            "is 2, but flash_attention_2 isolates packed documents only in micro-batches of one "
            "row",
            "set train.micro_batch: 1, data.packing: false, or model.attention: sdpa",
        ),
    ),
    "every-rank-has-rows": (
        {"train": {"global_batch": 2}, "launch": {"processes": 5}},
        Problem(
            "launch.processes",
            "5 processes share 2 rows a step: 3 would always be idle",
            "raise train.global_batch or start fewer processes",
        ),
    ),
    "unique-names": (
        {"data": {"train": [source("a/x.jsonl"), source("b/x.jsonl"), source("c.jsonl")]}},
        Problem("data", "two data sets are called x", "give one of them a `name:` of its own"),
    ),
    "prefix-before-a-source": (
        {"data": {"train": [source("x.jsonl", prefix="summarize: ")]}},
        Problem(
            "data",
            "x: prefix is put before a source, and format: completion has none",
            "leave prefix out, or use format: source_target",
        ),
    ),
    "train-is-not-eval": (
        {"data": {"train": [source("a.jsonl")], "eval": [source("a.jsonl")]}},
        Problem(
            "data.eval",
            "a.jsonl is both trained on and held out",
            "hold out rows that are not trained on, in a file of their own",
        ),
    ),
    "quantized-needs-adapter": (
        {"model": {"name": "m", "quantization": "nf4"}, "adapter": {"type": "none"}},
        Problem(
            "model.quantization",
            "is nf4, and adapter.type is none: a full fine-tune can't update quantized weights, as "
            "an update is far smaller than the spacing of their values",
            "train an adapter (`adapter: {type: lora}`), or set model.quantization: none",
        ),
    ),
    "pissa-needs-all-digits": (
        {
            "model": {"name": "m", "quantization": "nf4"},
            "adapter": {"type": "lora", "variant": "pissa"},
        },
        Problem(
            "adapter.variant",
            "pissa moves the top singular components of each weight into the adapter and keeps the "
            "rest as the base; a tool that loads the adapter quantizes (nf4) another base",
            "use variant: plain, dora or rslora, or set model.quantization: none",
        ),
    ),
    "fp8-computes-in-bf16": (
        {
            "model": {"name": "m", "quantization": "fp8"},
            "adapter": {"type": "lora"},
            "train": {"precision": "fp32"},
        },
        Problem(
            "train.precision",
            "is fp32, but matmuls with fp8 weights give bf16: GPUs' row-wise scaled FP8 matmul has "
            "no other output",
            "set train.precision: bf16, or model.quantization: none",
        ),
    ),
    "new-tokens-are-trained": (
        {"model": {"name": "m", "add_tokens": ["<|a|>", "<|b|>"]}, "adapter": {"type": "lora"}},
        Problem(
            "model.add_tokens",
            "the embeddings of <|a|>, <|b|> would stay untrained: an adapter (lora) alone doesn't "
            "train the embedding",
            "use adapter: {type: lora, modules_to_save: [embed_tokens, lm_head]}, or {type: none}",
        ),
    ),
    "paged-where-one-gpu-trains-all": (
        {
            "adapter": {"type": "lora"},
            "strategy": {"type": "fsdp"},
            "launch": {"processes": 2},
            "train": {"optimizer": {"type": "adamw", "bits": 8, "paged": True}},
        },
        Problem(
            "train.optimizer.paged",
            "needs a full fine-tune on one GPU, in bf16 with 32-bit moments; here an adapter "
            "(lora) is trained and moments have 8 bits and strategy is fsdp and there are 2 ranks",
            "leave paged out; with several GPUs use strategy: {type: fsdp, offload: cpu}",
        ),
    ),
    "kept-layers-are-of-those-recomputed": (
        {"train": {"keep_layers": 4}},
        Problem(
            "train.keep_layers",
            "is 4, but gradient_checkpointing: none treats all layers alike",
            "set train.gradient_checkpointing: mlp or most, or leave keep_layers out",
        ),
    ),
    "checkpoint-interval": (
        {"train": {"steps": 10}, "save": {"every": 11}},
        Problem(
            "save.every",
            "a checkpoint every 11 steps of a run of 10",
            "save more often, or 0 to save at the end only",
        ),
    ),
}


def resolved(**sections: dict[str, Any]) -> Job:
    return resolve(make_job(**sections), Machine(cores=4, gpus=0)).job


def problems(job: Job) -> tuple[Problem, ...]:
    with pytest.raises(JobError) as caught:
        check(job, dotted)
    return caught.value.problems


def test_one_row_is_no_rows() -> None:
    (problem,) = problems(resolved(train={"global_batch": 1}, launch={"processes": 7}))
    assert problem.fact == "7 processes share 1 row a step: 6 would always be idle"


def test_every_rule_is_in_a_table() -> None:
    of_strategies = {rule for rule, *_ in REFUSED.values()} | {*GENERIC}
    assert {rule.name for rule in RULES} == {*BROKEN} | of_strategies
    assert not {*BROKEN} & of_strategies


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_that_is_broken_says_so(name: str) -> None:
    sections, told = BROKEN[name]
    job = resolved(**sections)
    assert {rule.name for rule in RULES if rule.broken(job)} == {name}
    assert told in problems(job)


def test_a_share_that_is_held_out_breaks_no_rule() -> None:
    check(resolved(data={"eval": {"share": 0.1}}), dotted)


# What a strategy can't do: the rule that says so, the sections, and the problem that is told.
REFUSED: dict[str, tuple[str, dict[str, dict[str, Any]], Problem]] = {
    "tensor has no loss scale": (
        "strategy-takes-precision",
        {
            "strategy": {"type": "tensor", "degree": 2},
            "launch": {"processes": 2},
            "train": {"precision": "fp16"},
        },
        Problem(
            "train.precision",
            "fp16 needs a loss scale shared by all tensor-parallel ranks, which isn't implemented",
            "set train.precision: fp32 or bf16, or use strategy: {type: ddp}, {type: deepspeed} or "
            "{type: fsdp}",
        ),
    ),
    "pipeline has no loss scale": (
        "strategy-takes-precision",
        {
            "strategy": {"type": "pipeline", "stages": 2},
            "launch": {"processes": 2},
            "train": {"precision": "fp16"},
        },
        Problem(
            "train.precision",
            "fp16 needs a loss scale shared by all stages, which isn't implemented",
            "set train.precision: fp32 or bf16, or use strategy: {type: ddp}, {type: deepspeed} or "
            "{type: fsdp}",
        ),
    ),
    "fp8 needs whole weights": (
        "strategy-takes-quantization",
        {
            "model": {"name": "m", "quantization": "fp8"},
            "adapter": {"type": "lora"},
            "strategy": {"type": "fsdp"},
        },
        Problem(
            "model.quantization",
            "fp8 needs every linear layer whole, with row-wise scales; fsdp doesn't support it",
            "set model.quantization: none, nf4 or int8, or use strategy: {type: ddp}",
        ),
    ),
    "quantised weights stay in memory": (
        "strategy-takes-quantization",
        {
            "model": {"name": "m", "quantization": "nf4"},
            "adapter": {"type": "lora"},
            "strategy": zero(stage=3, offload_param={"device": "nvme", "nvme_path": "swap"}),
        },
        Problem(
            "model.quantization",
            "nf4 weights can't be offloaded to NVMe (zero_optimization.offload_param): DeepSpeed "
            "reads their packed bytes back as numbers in the model's dtype",
            "set offload_param.device: cpu, or set model.quantization: none",
        ),
    ),
    "tensor slices plain weights": (
        "strategy-takes-quantization",
        {
            "model": {"name": "m", "quantization": "nf4"},
            "adapter": {"type": "lora"},
            "strategy": {"type": "fsdp", "tensor": 2},
            "launch": {"processes": 4},
        },
        Problem(
            "model.quantization",
            "nf4 packs weights in blocks that cross the borders of tensor(2)'s shards",
            "set model.quantization: none, or use strategy: {type: ddp}, {type: deepspeed} or"
            " {type: fsdp}",
        ),
    ),
    "8-bit moments stay on the device": (
        "strategy-takes-bits",
        {
            "strategy": zero(stage=2, offload_optimizer={"device": "cpu"}),
            "train": {"optimizer": {"type": "adamw", "bits": 8}},
        },
        Problem(
            "train.optimizer.bits",
            "8-bit moments can't be offloaded (zero_optimization.offload_optimizer): on the CPU "
            "each update would unpack a rank's whole shard to 32 bits",
            "set offload_optimizer.device: none, or set train.optimizer.bits: 32",
        ),
    ),
    "tensor has no dora": (
        "strategy-takes-variant",
        {
            "adapter": {"type": "lora", "variant": "dora"},
            "strategy": {"type": "tensor", "degree": 2},
            "launch": {"processes": 2},
        },
        Problem(
            "adapter.variant",
            "dora needs the norms of whole weight rows in every forward pass; under tensor(2) a "
            "rank has shards of them",
            "set adapter.variant: plain, rslora or pissa, or use strategy: {type: ddp}, "
            "{type: deepspeed} or {type: fsdp}",
        ),
    ),
    "compiled layers are whole": (
        "strategy-takes-compiled-layers",
        {
            "strategy": {"type": "tensor", "degree": 2},
            "launch": {"processes": 2},
            "train": {"kernels": "compiled"},
        },
        Problem(
            "train.kernels",
            "tensor hooks into the modules inside each layer, which compiled layers bypass",
            "set train.kernels: eager, or use strategy: {type: ddp} or {type: fsdp}",
        ),
    ),
    "slices have no losses of routers": (
        "strategy-has-router-losses",
        {
            "strategy": {"type": "tensor", "degree": 2},
            "launch": {"processes": 2},
            "train": {"router_z_loss_coef": 0.001},
        },
        Problem(
            "train.router_aux_loss_coef",
            "router losses are read from whole layers; tensor(2) shards them",
            "set train.router_aux_loss_coef: 0 and train.router_z_loss_coef: 0, or use strategy: "
            "{type: ddp} or {type: fsdp}",
        ),
    ),
    "recomputed layers are whole": (
        "strategy-takes-checkpointing",
        {
            "strategy": {"type": "fsdp", "tensor": 2},
            "launch": {"processes": 4},
            "train": {"gradient_checkpointing": "mlp"},
        },
        Problem(
            "train.gradient_checkpointing",
            "mlp recomputes part of a layer, and fsdp with tensor: 2 hooks into the modules inside "
            "of it",
            "set train.gradient_checkpointing: none or full, or use strategy: {type: ddp} or "
            "{type: fsdp}",
        ),
    ),
    "routers have losses where all micro-batches are seen": (
        "strategy-has-router-losses",
        {
            "strategy": {"type": "pipeline", "stages": 2},
            "launch": {"processes": 2},
            "train": {"router_z_loss_coef": 0.001},
        },
        Problem(
            "train.router_aux_loss_coef",
            "pipeline starts backward passes before it has counted where all tokens of a step go",
            "set train.router_aux_loss_coef: 0 and train.router_z_loss_coef: 0, or use strategy: "
            "{type: ddp} or {type: fsdp}",
        ),
    ),
    "activations wait under ddp": (
        "strategy-offloads-activations",
        {"strategy": {"type": "fsdp"}, "train": {"offload_activations": True}},
        Problem(
            "train.offload_activations",
            "activation offload needs the whole model on each rank; fsdp saves gathered weights or "
            "communication buffers too",
            "leave it out: gradient_checkpointing: full saves most, or use strategy: {type: ddp}",
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_strategy_can_not_do_is_refused_in_its_own_words(name: str) -> None:
    rule, sections, told = REFUSED[name]
    job = resolved(**sections)
    assert {each.name for each in RULES if each.broken(job)} == {rule}
    assert told in problems(job)


class Poor(DDP):
    """A strategy that can do next to nothing and says nothing about it."""

    type: Literal["poor"] = "poor"  # type: ignore[assignment]

    @property
    def capabilities(self) -> Capabilities:
        little = {"precisions": "bf16", "quantizations": "none", "adapters": "none"}
        little |= {"variants": "plain", "optimizer_bits": "32", "checkpointing": "none"}
        supports = {name: Support((value,)) for name, value in little.items()}
        return Capabilities(**supports, resumes=False)  # type: ignore[arg-type]


# Of each rule the sections that break it, and the problem in words that fit any strategy.
GENERIC: dict[str, tuple[dict[str, dict[str, Any]], Problem]] = {
    "strategy-takes-precision": (
        {"train": {"precision": "fp32"}},
        Problem(
            "train.precision",
            "is fp32, and strategy poor takes bf16",
            "set train.precision: bf16, or use strategy: {type: ddp}, {type: deepspeed} or "
            "{type: fsdp}",
        ),
    ),
    "strategy-takes-adapter": (
        {"adapter": {"type": "ia3"}},
        Problem(
            "adapter.type",
            "is ia3, and strategy poor takes none",
            "set adapter.type: none, or use strategy: {type: ddp}, {type: deepspeed} or "
            "{type: fsdp}",
        ),
    ),
    "strategy-takes-compiled-layers": (
        {"train": {"kernels": "compiled"}},
        Problem(
            "train.kernels",
            "strategy poor doesn't support compiled layers",
            "set train.kernels: eager, or use strategy: {type: ddp} or {type: fsdp}",
        ),
    ),
    "strategy-resumes": (
        {"save": {"every": 5}},
        Problem(
            "save.every",
            "strategy poor writes no checkpoints to resume from",
            "set save.every: 0, which writes the result alone, or use strategy: {type: ddp}, "
            "{type: deepspeed} or {type: fsdp}",
        ),
    ),
    "strategy-resumes-from-the-best": (
        {"save": {"best": {"metric": "loss"}}},
        Problem(
            "save.best",
            "strategy poor writes no checkpoints that a result could be written from",
            "leave save.best out, which writes the result from the last step, or use strategy: "
            "{type: ddp}, {type: deepspeed} or {type: fsdp}",
        ),
    ),
}


@pytest.mark.parametrize("name", GENERIC)
def test_a_strategy_that_gives_no_reason_is_refused_all_the_same(name: str) -> None:
    sections, told = GENERIC[name]
    job = resolved(**sections).model_copy(update={"strategy": Poor()})
    assert {each.name for each in RULES if each.broken(job)} == {name}
    assert problems(job) == (told,)


# What is wrong with a strategy's own fields, which it says itself.
OWN: dict[str, tuple[dict[str, dict[str, Any]], Problem]] = {
    "replicas are hybrid": (
        {"strategy": {"type": "fsdp", "replicas": 2}, "launch": {"processes": 4}},
        Problem(
            "strategy.replicas",
            "sharding: full has one group of ranks, not 2",
            "set sharding: hybrid, or leave replicas out",
        ),
    ),
    "schedule has stages": (
        {"strategy": {"type": "fsdp", "schedule": "gpipe"}},
        Problem(
            "strategy.schedule",
            "gpipe is a pipeline schedule, and pipeline: 1 has only one stage",
            "set pipeline to the number of stages, or leave schedule out",
        ),
    ),
    "chunks are interleaved": (
        {"strategy": {"type": "pipeline", "stages": 2, "chunks": 4}, "launch": {"processes": 2}},
        Problem(
            "strategy.chunks",
            "is 4, the number of stages of a rank under schedule: interleaved only",
            "set schedule: interleaved, or leave chunks out",
        ),
    ),
    "experts and groups of shares": (
        {
            "strategy": {"type": "fsdp", "expert": 2, "sharding": "hybrid", "replicas": 2},
            "launch": {"processes": 4},
        },
        Problem(
            "strategy.sharding",
            "is hybrid together with expert: 2, and replicated shards of experts are not "
            "implemented",
            "set sharding: full; or use type: expert, which replicates all weights but experts",
        ),
    ),
    "experts and stages": (
        {"strategy": {"type": "fsdp", "expert": 2, "pipeline": 2}, "launch": {"processes": 4}},
        Problem(
            "strategy.pipeline",
            "is 2 together with expert: 2, and no pipeline schedule here waits for tokens of other "
            "ranks",
            "set pipeline: 1, or expert: 1",
        ),
    ),
    "experts and slices": (
        {"strategy": {"type": "fsdp", "expert": 2, "tensor": 2}, "launch": {"processes": 4}},
        Problem(
            "strategy.tensor",
            "is 2 together with expert: 2, and tensor parallelism of layers with experts is not "
            "implemented",
            "set tensor: 1",
        ),
    ),
    "experts in CPU memory": (
        {"strategy": {"type": "fsdp", "expert": 2, "offload": "cpu"}, "launch": {"processes": 2}},
        Problem(
            "strategy.offload",
            "is cpu together with expert: 2, which has not been verified to compute the same",
            "set offload: none, or expert: 1",
        ),
    ),
    "zero bubble needs whole weights": (
        {
            "strategy": {"type": "pipeline", "stages": 2, "schedule": "zero_bubble", "tensor": 2},
            "launch": {"processes": 4},
        },
        Problem(
            "strategy.tensor",
            "zero_bubble computes weight gradients separately from input gradients, which torch "
            "can't do for weights sharded by tensor(2)",
            "use schedule: interleaved, whose bubble is small too, or tensor: 1",
        ),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_strategy_says_what_is_wrong_with_its_own_fields(name: str) -> None:
    sections, told = OWN[name]
    assert problems(resolved(**sections)) == (told,)


def test_all_that_is_broken_is_told_at_once() -> None:
    job = resolved(train={"steps": 3, "epochs": 1.0, "warmup_steps": 9}, save={"every": 4})
    assert [problem.place for problem in problems(job)] == [
        "train.steps",
        "train.warmup_steps",
        "save.every",
    ]


def test_a_mesh_that_does_not_multiply_out_is_told_with_the_rest() -> None:
    job = resolved(
        strategy={"type": "fsdp", "tensor": 2},
        launch={"processes": 5},
        train={"steps": 3, "epochs": 1.0},
    )
    first, second = problems(job)
    assert first.place == "train.steps"
    assert second.place == "strategy"
    assert second.fact == "shard(3) x tensor(2) = 6 != 5 ranks"
    assert "4 or 6 processes" in second.fix


GOOD: dict[str, dict[str, dict[str, Any]]] = {
    "the smallest": {},
    "a rate that peaks in the last step": {"train": {"steps": 10, "warmup_steps": 9}},
    "exactly one micro-batch a step": {
        "train": {"global_batch": 8, "micro_batch": 4},
        "launch": {"processes": 2},
    },
    "a row for each rank": {"train": {"global_batch": 5}, "launch": {"processes": 5}},
    "a checkpoint at the end": {"train": {"steps": 10}, "save": {"every": 10}},
    "checkpoints in a run of unknown length": {"train": {"epochs": 1.0}, "save": {"every": 10}},
    "new tokens, trained with all weights": {
        "model": {"name": "m", "add_tokens": ["<|a|>"]},
        "adapter": {"type": "none"},
    },
    "new tokens, trained beside an adapter": {
        "model": {"name": "m", "add_tokens": ["<|a|>"]},
        "adapter": {"type": "lora", "modules_to_save": ["embed_tokens"]},
    },
    "8-bit weights below LoRA": {
        "model": {"name": "m", "quantization": "fp8"},
        "adapter": {"type": "lora"},
        "train": {"gradient_checkpointing": "most"},
    },
    "8-bit weights below IA3": {
        "model": {"name": "m", "quantization": "fp8"},
        "adapter": {"type": "ia3"},
    },
    "some recomputation of divided weights": {
        "strategy": {"type": "fsdp"},
        "train": {"gradient_checkpointing": "mlp"},
    },
    "one name on both sides": {
        "data": {"train": [source("a.jsonl", name="x")], "eval": [source("b.jsonl", name="x")]}
    },
    "two splits of one data set": {
        "data": {
            "train": [source("org/set")],
            "eval": [source("org/set", split="test")],
        }
    },
}


@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_recomputes_all_or_nothing(stage: int) -> None:
    job = resolved(strategy=zero(stage=stage), train={"gradient_checkpointing": "most"})
    assert [problem.place for problem in problems(job)] == ["train.gradient_checkpointing"]


def test_what_pissa_leaves_is_not_held_in_8_bits() -> None:
    adapter = {"type": "lora", "variant": "pissa"}
    job = resolved(model={"name": "m", "quantization": "fp8"}, adapter=adapter)
    (problem,) = problems(job)
    assert problem.place == "adapter.variant"
    assert "quantizes (fp8)" in problem.fact


@pytest.mark.parametrize("name", GOOD)
def test_what_is_allowed_is_not_refused(name: str) -> None:
    check(resolved(**GOOD[name]), dotted)


# What depends on the machine ---------------------------------------------------------------------

GPU = Machine(cores=4, gpus=1)
NO_GPU = Machine(cores=4, gpus=0)
EVERYTHING = {
    "train": {"optimizer": {"type": "adamw", "bits": 8}},
    "model": {"name": "m", "quantization": "nf4"},
    "adapter": {"type": "lora"},
    "strategy": zero(stage=3, zero_quantized_weights=True),
}


def told(job: Job, machine: Machine | None) -> list[tuple[str, str]]:
    try:
        check(job, dotted, machine)
    except JobError as error:
        return [(problem.place, problem.fact) for problem in error.problems]
    return []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.config.rules.find_spec", lambda name: name)
    monkeypatch.setattr("shardtune.parallel.deepspeed.limits.find_library", lambda name: name)


@pytest.mark.usefixtures("installed")
def test_quantized_collectives_are_refused_where_there_is_no_gpu() -> None:
    job = resolved(**EVERYTHING)
    assert told(job, NO_GPU) == [
        (
            "strategy.zero_optimization.zero_quantized_weights",
            "DeepSpeed's quantized collectives are written for GPUs, and there is none here",
        )
    ]
    assert told(job, GPU) == []
    assert told(job, None) == []  # it may be meant for another machine


@pytest.mark.usefixtures("installed")
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.config.rules.find_spec", lambda name: None)
    assert told(resolved(**EVERYTHING), GPU) == [
        ("strategy.type", "deepspeed is not installed"),
        ("train.optimizer.bits", "bitsandbytes is not installed"),
        ("model.quantization", "bitsandbytes is not installed"),
    ]
    assert told(resolved(), GPU) == []


@pytest.mark.usefixtures("installed")
def test_files_need_libaio(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"device": "nvme", "nvme_path": "swap"}
    job = resolved(strategy=zero(stage=3, offload_optimizer=files))
    assert told(job, NO_GPU) == []
    monkeypatch.setattr("shardtune.parallel.deepspeed.limits.find_library", lambda name: None)
    place = "strategy.zero_optimization.offload_optimizer.device"
    assert told(job, NO_GPU) == [(place, "nvme needs libaio, which this machine doesn't have")]


def test_groups_that_do_not_divide_the_ranks_are_refused_before_they_are_started() -> None:
    job = resolved(strategy=zero(stage=3, zero_hpz_partition_size=3), launch={"processes": 4})
    place = "strategy.zero_optimization.zero_hpz_partition_size"
    assert told(job, None) == [(place, "groups of 3 don't divide 4 ranks")]
