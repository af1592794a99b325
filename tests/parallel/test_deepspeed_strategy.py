"""DeepSpeed's fields, what they declare, and the settings that are derived from the declaration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardtune.config.auto import resolve
from shardtune.core.host.machine import Machine
from shardtune.core.layout import Layout, Move
from shardtune.core.lr_schedule import Schedule
from shardtune.core.mesh import Mesh
from shardtune.core.setup import EngineSetup, OptimizerSetup
from shardtune.core.strategy import JobFacts
from shardtune.core.world import World
from shardtune.errors import JobError
from shardtune.parallel.deepspeed.derive_config import to_deepspeed
from shardtune.parallel.deepspeed.json_file import Read, read
from shardtune.parallel.deepspeed.strategy import DeepSpeed
from tests.jobs import make_job

RECIPES = Path(__file__).parents[2] / "recipes" / "deepspeed"
SETUP = EngineSetup("bf16", OptimizerSetup("adamw"), Schedule("cosine", 1e-3, 0, 10), None, 0, 2, 4)
FACTS = JobFacts(
    ranks=2,
    global_batch=16,
    micro_batch=2,
    precision="bf16",
    max_grad_norm=1.0,
    optimizer=OptimizerSetup("adamw", betas=(0.9, 0.95)),
    learning_rate=2e-4,
    schedule="cosine",
    warmup_steps=0,
    steps=100,
)
CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "swap"}


def strategy(**zero: Any) -> DeepSpeed:
    return DeepSpeed.model_validate({"zero_optimization": zero})


def derived(chosen: DeepSpeed, layout: Layout | None = None, ranks: int = 4) -> dict[str, Any]:
    world = World(size=ranks)
    return to_deepspeed(layout or chosen.layout(), chosen.mesh(world.size), chosen, SETUP, world)


# The declaration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "divided"),
    [(0, ()), (1, ("optim",)), (2, ("optim", "grads")), (3, ("optim", "grads", "params"))],
)
def test_a_stage_divides_as_many_states_as_its_number(stage: int, divided: tuple[str, ...]) -> None:
    layout, mesh = strategy(stage=stage).layout(), Mesh((("data", 4),))
    for state in ("params", "grads", "optim"):
        assert layout.divisor(state, mesh) == (4 if state in divided else 1)


def test_the_moves_of_each_stage() -> None:
    # The table of the architecture: ZeRO's paper, section 7.
    gather, reduce = Move("all_gather", "trained", "step"), "reduce_scatter"
    assert strategy(stage=0).layout().rules[0].moves == (Move("all_reduce", "grads", "step"),)
    assert strategy(stage=1).layout().rules[0].moves == (Move(reduce, "grads", "step"), gather)
    assert strategy(stage=2).layout().rules[0].moves == (
        Move(reduce, "grads", "micro_batch"),
        gather,
    )
    twice = Move("all_gather", "params", "micro_batch")
    assert strategy(stage=3).layout().rules[0].moves == (
        twice,
        twice,
        Move(reduce, "grads", "micro_batch"),
    )


def test_hpz_gathers_once_between_nodes_and_keeps_a_copy_within() -> None:
    chosen = strategy(stage=3, zero_hpz_partition_size=2)
    between, within, everywhere = chosen.layout().rules
    assert chosen.mesh(8).axes == (("between", 4), ("within", 2))
    assert between.moves == ()
    assert [move.op for move in within.moves] == ["all_gather"]
    assert [move.op for move in everywhere.moves] == ["all_gather", "reduce_scatter"]
    assert within.copies == {"params"}
    assert chosen.layout().divisor("params", chosen.mesh(8)) == 8


# The derivation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_stage_is_derived_from_the_layout_alone(stage: int) -> None:
    # The strategy says 2; a layout of another stage wins.
    other = strategy(stage=stage).layout()
    assert derived(strategy(stage=2), other)["zero_optimization"]["stage"] == stage


def test_offload_and_zeropp_are_derived_from_the_layout_alone() -> None:
    plain = strategy(stage=3, zero_hpz_partition_size=2)
    zero = derived(plain)["zero_optimization"]
    assert "offload_optimizer" not in zero
    assert "offload_param" not in zero
    assert zero["zero_hpz_partition_size"] == 2
    assert not zero["zero_quantized_weights"]
    moved = replace(plain.layout(), home={"optim": "cpu", "params": "cpu"})
    zero = derived(plain, moved)["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
    quantized = strategy(
        stage=3, zero_quantized_weights=True, zero_quantized_gradients=True
    ).layout()
    zero = derived(plain, quantized)["zero_optimization"]
    assert zero["zero_quantized_weights"]
    assert zero["zero_quantized_gradients"]
    assert zero["zero_hpz_partition_size"] == 1


def test_what_the_job_decides_is_written_out() -> None:
    config = derived(strategy(stage=2, reduce_bucket_size=5e8))
    assert config["train_batch_size"] == 2 * 4 * 4
    assert config["gradient_clipping"] == 0.0  # left out, DeepSpeed would clip at 1.0
    assert config["bf16"]["enabled"]
    assert not config["fp16"]["enabled"]
    assert config["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "sub_group_size" not in config["zero_optimization"]  # null keeps DeepSpeed's default


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "key"),
    [
        ({"stage": 2, "offload_param": CPU}, "offload_param"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size"),
        (
            {"stage": 3, "reduce_scatter": False, "zero_quantized_gradients": True},
            "reduce_scatter",
        ),
        ({"stage": 2, "use_multi_rank_bucket_allreduce": True}, "use_multi_rank_bucket_allreduce"),
        ({"stage": 1, "zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"stage": 2, "zero_quantized_gradients": True}, "zero_quantized_gradients"),
        ({"stage": 0, "offload_optimizer": CPU}, "offload_optimizer.device"),
        ({"stage": 2, "offload_optimizer": NVME}, "offload_optimizer.device"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.nvme_path"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(zero: dict[str, Any], key: str) -> None:
    (problem,) = strategy(**zero).problems(2)
    assert problem.place == f"strategy.zero_optimization.{key}"
    assert problem.fix


def test_quantized_collectives_need_a_gpu() -> None:
    chosen = strategy(stage=3, zero_quantized_weights=True)
    with pytest.raises(JobError, match="written for GPUs"):
        chosen.require(World(size=2), "bf16")
    chosen.require(World(size=2, device="cuda:0"), "bf16")


def test_groups_have_to_divide_the_ranks() -> None:
    with pytest.raises(JobError, match="groups of 3 don't divide 4 ranks"):
        strategy(stage=3, zero_hpz_partition_size=3).require(World(size=4), "bf16")


@pytest.mark.parametrize("zero", [{"stage": 4}, {"stagee": 2}, {"reduce_bucket_size": 0.5}])
def test_fields_are_strict(zero: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        strategy(**zero)


# Files -------------------------------------------------------------------------------------------


def read_file(path: Path, facts: JobFacts = FACTS) -> Read[DeepSpeed]:
    return read(DeepSpeed(config=str(path)), facts)


def changed(folder: Path, old: str, new: str, name: str = "zero3.json") -> Path:
    text = (RECIPES / name).read_text()
    assert old in text
    path = folder / "changed.json"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("name", "stage"), [("zero1", 1), ("zero2", 2), ("zero3", 3), ("zero3_long", 3)]
)
def test_the_files_that_people_write_are_read_as_they_are(name: str, stage: int) -> None:
    found = read_file(RECIPES / f"{name}.json")
    assert found.strategy.config is None
    assert found.strategy.zero_optimization.stage == stage
    assert not found.strategy.problems(2)
    assert "train_batch_size" in found.reasons["train", "global_batch"]
    written = json.loads((RECIPES / f"{name}.json").read_text())["zero_optimization"]
    kept = found.strategy.zero_optimization.model_dump(exclude_none=True)
    for key, value in written.items():
        if isinstance(value, (int, float)):
            assert kept[key] == value


def test_auto_sizes_follow_the_width_where_it_is_known() -> None:
    # The rules of Hugging Face's integration: h * h, 0.9 * h * h, 10 * h.
    found = read_file(RECIPES / "zero3.json", replace(FACTS, hidden_size=100))
    zero = found.strategy.zero_optimization
    assert zero.reduce_bucket_size == 10_000
    assert zero.stage3_prefetch_bucket_size == 9_000
    assert zero.stage3_param_persistence_threshold == 1_000
    key = ("strategy", "zero_optimization", "reduce_bucket_size")
    assert found.reasons[key] == "hidden_size squared, which is 100"


@pytest.mark.parametrize(
    ("old", "new", "fact", "fix"),
    [
        (
            "stage3_prefetch_bucket_size",
            "stage3_prefech_bucket_size",
            "zero_optimization.stage3_prefech_bucket_size",
            "did you mean 'stage3_prefetch_bucket_size'?",
        ),
        ("gradient_clipping", "gradient_cliping", "no key", "did you mean 'gradient_clipping'?"),
        ("loss_scale_window", "loss_scale_windw", "no key", "did you mean 'loss_scale_window'?"),
        ("steps_per_print", "sub_group_size", "no key", "it belongs into 'zero_optimization'"),
        ('"steps_per_print": 2000', '"elasticity": {"enabled": true}', "shardtune does", "remove"),
        (
            '"steps_per_print": 2000',
            '"data_types": {"grad_accum_dtype": "bf16"}',
            "accumulated in fp32",
            "remove it",
        ),
        (
            '"train_batch_size": "auto"',
            '"train_batch_size": 32',
            "is 32, but the job's train.global_batch makes it 16",
            "change train.global_batch",
        ),
        (
            '"gradient_accumulation_steps": "auto"',
            '"gradient_accumulation_steps": 8',
            r"makes it 4 \(global_batch\(16\) / \(micro_batch\(2\) x ranks\(2\)\)\)",
            "change train.global_batch",
        ),
        (
            '"gradient_clipping": "auto"',
            '"gradient_clipping": 0.5',
            "is 0.5, but the job's train.max_grad_norm makes it 1.0",
            "change train.max_grad_norm",
        ),
        ('"lr": "auto"', '"lr": 1e-5', "is 1e-05, .*makes it 0.0002", "train.learning_rate"),
        ('"AdamW"', '"Lamb"', 'is "Lamb", .* makes it "adamw"', "train.optimizer.type"),
        ("WarmupCosineLR", "WarmupLR", 'makes it "cosine"', "train.schedule"),
        ("WarmupCosineLR", "OneCycle", 'is "OneCycle"; of DeepSpeed\'s there are', "one_cycle"),
        (
            '"bf16": { "enabled": "auto" }',
            '"bf16": { "enabled": false }',
            "is false, but the job's train.precision makes it true",
            "train.precision",
        ),
        ('"stage": 3,', '"stage": 3, // ZeRO-3', "has a comment, and JSON has none", "remove"),
        ('"stage": 3,', '"stage": 3', "is not JSON", "correct the line"),
        ('"stage": 3', '"stage": 7', "is 7: ", "documentation"),
        ('"stage": 3', '"stage": 3, "stage": 2', "written twice", "keep one"),
        ('"steps_per_print": 2000', '"steps_per_print": NaN', "NaN", "finite"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_fix(
    tmp_path: Path, old: str, new: str, fact: str, fix: str
) -> None:
    with pytest.raises(JobError, match=fact) as caught:
        read_file(changed(tmp_path, old, new))
    assert fix in caught.value.problems[0].fix
    assert caught.value.problems[0].place.startswith(str(tmp_path / "changed.json"))


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    path = changed(tmp_path, '"gradient_clipping": "auto"', '"gradient_clipping": 3')
    path.write_text(path.read_text().replace('"lr": "auto"', '"lr": 1'))
    with pytest.raises(JobError) as caught:
        read_file(path)
    assert len(caught.value.problems) == 2


def test_a_file_and_fields_together_are_refused() -> None:
    both = DeepSpeed.model_validate({"config": "zero2.json", "zero_optimization": {"stage": 1}})
    with pytest.raises(JobError, match=r"both a file \(zero2.json\) and zero_optimization"):
        read(both, FACTS)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(JobError, match=r"nowhere\.json can't be read"):
        read_file(Path("nowhere.json"))


# Files as tutorials print them -------------------------------------------------------------------

LEFT_OUT = {
    "comet": {"enabled": True, "project": "mine"},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
    "flops_profiler": {"enabled": True, "profile_step": 1},
    "checkpoint": {"tag_validation": "Warn"},
    "compile": {"disable": False, "backend": "inductor"},
    "zero_optimization": {"stage": 2, "load_from_fp32_weights": True},
}
SWITCHED_OFF = {
    "wandb": {"enabled": False},
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "elasticity": {"enabled": False},
    "flops_profiler": {"enabled": False},
    "compile": {"disable": True, "backend": "inductor"},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "data_types": {"grad_accum_dtype": "fp32"},
    "sparse_gradients": False,
    "dump_state": False,
    "zero_optimization": {"stage": 2, "legacy_stage1": False},
}


def write(folder: Path, **content: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(content, indent=2))
    return path


@pytest.mark.parametrize("block", LEFT_OUT)
def test_what_changes_nothing_that_is_computed_is_left_out_with_a_word(
    block: str, tmp_path: Path
) -> None:
    found = read_file(write(tmp_path, **{block: LEFT_OUT[block]}))
    (note,) = found.notes
    assert note.startswith("ds.json:")
    assert block in note
    assert "is left out: " in note
    assert "does this itself" not in note


@pytest.mark.parametrize("block", SWITCHED_OFF)
def test_a_block_that_is_switched_off_is_no_matter(block: str, tmp_path: Path) -> None:
    assert read_file(write(tmp_path, **{block: SWITCHED_OFF[block]})).notes == ()


def test_older_and_second_names_of_deepspeed_are_known(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        zero_optimization={
            "stage": 3,
            "cpu_offload": True,
            "cpu_offload_params": False,
            "sub_group_size": 0,
            "max_live_parameters": 7,
            "stage3_gather_fp16_weights_on_model_save": True,
        },
    )
    found = read_file(path)
    zero = found.strategy.zero_optimization
    assert zero.offload_optimizer.device == "cpu"
    assert zero.offload_param.device == "none"
    assert zero.stage3_max_live_parameters == 7
    assert zero.stage3_gather_16bit_weights_on_model_save
    assert found.reasons["strategy", "zero_optimization", "offload_optimizer", "device"] == (
        "ds.json:4"
    )


PRINTED = {
    "train_batch_size": 8,
    "steps_per_print": 5,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True},
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 4},
    },
    "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_scatter": False},
}
"""As DeepSpeed's own documentation has them: numbers, no `auto`."""
SAID = {
    "global_batch": 8,
    "log_every": 5,
    "max_grad_norm": 0.5,
    "precision": "fp16",
    "learning_rate": 3e-5,
    "schedule": "constant",
    "warmup_steps": 4,
}
SILENT = {"steps": 20}


def resolved(path: Path, **train: Any) -> Any:
    job = make_job(train=train, strategy={"type": "deepspeed", "config": str(path)})
    return resolve(job, Machine(cores=2, gpus=0), 2)


def test_a_file_decides_what_the_job_does_not_say(tmp_path: Path) -> None:
    found = resolved(write(tmp_path, **PRINTED), **SILENT)
    train = found.job.train
    assert {key: getattr(train, key) for key in SAID} == SAID
    assert train.optimizer.betas == (0.8, 0.999)
    assert train.optimizer.weight_decay == 3e-7
    assert found.reasons["train", "log_every"] == "ds.json:3"
    assert found.reasons["train", "precision"] == "ds.json:6: fp16.enabled"
    assert found.job.strategy.zero_optimization.reduce_scatter is False


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"learning_rate": 1e-3}, "optimizer.params.lr"),
        ({"precision": "fp32"}, "fp16.enabled"),
        ({"global_batch": 4}, "train_batch_size"),
        ({"schedule": "cosine"}, "scheduler.type"),
        ({"optimizer": {"type": "sgd"}}, "optimizer.type"),
        ({"max_grad_norm": None}, "gradient_clipping"),
        ({"warmup_ratio": 0.5}, "scheduler.params.warmup_num_steps"),
    ],
)
def test_what_the_job_says_has_to_agree(train: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        resolved(write(tmp_path, **PRINTED), **SILENT, **train)
    assert any(problem.place.endswith(key) for problem in caught.value.problems)


@pytest.mark.parametrize("length", [{"steps": 20}, {"epochs": 1.0}], ids=["steps", "epochs"])
def test_a_ratio_of_the_job_takes_the_place_of_the_files_warmup(
    length: dict[str, Any], tmp_path: Path
) -> None:
    """A fifth of 20 steps are the 4 of the file; how many of an epoch only the data tell."""
    train = resolved(write(tmp_path, **PRINTED), **length, warmup_ratio=0.2).job.train
    assert (train.warmup_ratio, train.warmup_steps) == (0.2, 0)


@pytest.mark.parametrize(
    ("blocks", "precision"),
    [
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, None),
        ({}, None),
    ],
)
def test_the_precision_that_a_file_switches_on(
    blocks: dict[str, Any], precision: str | None, tmp_path: Path
) -> None:
    told = DeepSpeed(config=str(write(tmp_path, **blocks))).precision()
    assert (told and told[0]) == precision


def test_two_precisions_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, bf16={"enabled": True}, fp16={"enabled": True})
    with pytest.raises(JobError, match="bf16 is enabled as well"):
        resolved(path)


def test_rows_and_accumulation_make_the_batch(tmp_path: Path) -> None:
    path = write(tmp_path, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)
    train = resolved(path).job.train
    assert (train.global_batch, train.micro_batch) == (2 * 3 * 2, 2)


def test_a_number_that_no_job_takes_is_told_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, train_batch_size=-8)
    with pytest.raises(JobError, match=r"ds.json:2: is -8, and train takes none such"):
        resolved(path)


def test_a_folder_that_cannot_be_written_to_is_told_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardtune.parallel.deepspeed.limits.find_library", lambda name: name)
    (tmp_path / "file").touch()
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "file" / "swap")}
    told = strategy(stage=3, offload_param=nvme).problems_here(gpu=True, precision="bf16")
    assert "can't be written to" in told[-1].fact


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_go_to_all_ranks_are_declared(stage: int) -> None:
    moves = strategy(stage=stage, reduce_scatter=False).layout().rules[0].moves
    assert [move.op for move in moves if move.what == "grads"] == ["all_reduce"]
