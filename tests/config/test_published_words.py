"""Words of other tools in a job: what they become, what is said of it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtune.config.auto import resolve
from shardtune.config.job_file import LoadedJob, load_job
from shardtune.core.host.machine import Machine
from shardtune.errors import JobError
from shardtune.parallel.published_names import published_strategy, torch_sharding
from tests.jobs import SECTIONS, job_text

TOP = len(SECTIONS) + 1
"""The line of what is added to the usual job."""
TRAIN = list(SECTIONS).index("train") + 1


def load(folder: Path, added: str = "", *overrides: str, **sections: str) -> LoadedJob:
    path = folder / "job.yaml"
    path.write_text(job_text(**sections) + added)
    return load_job(path, overrides)


def found(loaded: LoadedJob, key: str) -> Any:
    value: Any = loaded.job.model_dump()
    for part in key.split("."):
        value = value[part]
    return value


# What is added at the top, or the section `train` or `strategy` instead; what it becomes.
WORDS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "bf16": ("bf16: true", {}, {"train.precision": "bf16"}),
    "fp16": ("fp16: true", {}, {"train.precision": "fp16"}),
    "neither": ("bf16: false\nfp16: false", {}, {"train.precision": "fp32"}),
    "one of two": ("fp16: true\nbf16: false", {}, {"train.precision": "fp16"}),
    "in train": ("", {"train": "{steps: 2, fp16: true}"}, {"train.precision": "fp16"}),
    "twice the same": ("bf16: true", {"train": "{precision: bf16}"}, {"train.precision": "bf16"}),
    "false, and another": ("fp16: false", {"train": "{precision: bf16}"},
                           {"train.precision": "bf16"}),
    "checkpointing": ("gradient_checkpointing: true", {},
                      {"train.gradient_checkpointing": "full"}),
    "no checkpointing": ("", {"train": "{gradient_checkpointing: false}"},
                         {"train.gradient_checkpointing": "none"}),
    "torch's word": ("activation_checkpointing: true", {},
                     {"train.gradient_checkpointing": "full"}),
    "a file": ("deepspeed: zero2.json", {},
               {"strategy.type": "deepspeed", "strategy.config": "zero2.json"}),
    "a file, and the type": ("deepspeed: zero2.json", {"strategy": "{type: deepspeed}"},
                             {"strategy.config": "zero2.json"}),
    "full": ("", {"strategy": "{type: fsdp, sharding: FULL_SHARD, offload: cpu}"},
             {"strategy.sharding": "full", "strategy.offload": "cpu"}),
    "grad op": ("", {"strategy": "{type: fsdp, sharding: SHARD_GRAD_OP}"},
                {"strategy.sharding": "full", "strategy.reshard_after_forward": False}),
    "hybrid": ("", {"strategy": "{type: fsdp, sharding: HYBRID_SHARD}"},
               {"strategy.sharding": "hybrid"}),
    "hybrid with copies": ("", {"strategy": "{sharding_strategy: HYBRID_SHARD, replicas: 2}"},
                           {"strategy.sharding": "hybrid", "strategy.replicas": 2}),
    "nothing sharded": ("", {"strategy": "{type: fsdp, sharding: NO_SHARD}"},
                        {"strategy.type": "ddp"}),
    "sharding at the top": ("sharding: HYBRID_SHARD", {}, {"strategy.sharding": "hybrid"}),
    "Hugging Face's list": ("fsdp: full_shard auto_wrap offload", {},
                            {"strategy.type": "fsdp", "strategy.offload": "cpu"}),
    "the same as a list": ("fsdp: [full_shard, auto_wrap, offload]", {},
                           {"strategy.type": "fsdp", "strategy.offload": "cpu"}),
    "accelerate's number": ("", {"strategy": "{type: fsdp, fsdp_sharding_strategy: 2}"},
                            {"strategy.reshard_after_forward": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_words_are_understood(name: str, tmp_path: Path) -> None:
    added, sections, wanted = WORDS[name]
    loaded = load(tmp_path, added, **sections)
    assert {key: found(loaded, key) for key in wanted} == wanted


def test_what_a_word_became_is_said(tmp_path: Path) -> None:
    loaded = load(tmp_path, "bf16: true\n", strategy="{sharding: HYBRID_SHARD}")
    place = f"{tmp_path / 'job.yaml'}:{TOP + 1}"
    assert loaded.understood["train", "precision"] == f"`bf16: true`, {place}"
    assert loaded.origin(("train", "precision")) == f"{place} (`bf16: true`)"
    assert loaded.understood["strategy", "sharding"].startswith("`sharding: HYBRID_SHARD`, ")


def test_the_command_line_wins(tmp_path: Path) -> None:
    assert found(load(tmp_path, "bf16: true", "train.precision=fp32"), "train.precision") == "fp32"
    loaded = load(tmp_path, "", "bf16=true", train="{precision: fp32}")
    assert found(loaded, "train.precision") == "bf16"
    assert found(load(tmp_path, "bf16: true", "fp16=true"), "train.precision") == "fp16"
    loaded = load(tmp_path, "deepspeed: zero2.json", "strategy.type=ddp")
    assert found(loaded, "strategy.type") == "ddp"
    loaded = load(tmp_path, "", "deepspeed=zero2.json", strategy="{type: fsdp, offload: cpu}")
    assert found(loaded, "strategy.config") == "zero2.json"
    loaded = load(tmp_path, "", "deepspeed=zero2.json", strategy="auto")
    assert found(loaded, "strategy.type") == "deepspeed"


@pytest.mark.parametrize(
    ("added", "sections", "fact"),
    [
        ("bf16: true\nfp16: true", {}, "ask for two precisions"),
        ("bf16: true", {"train": "{precision: fp32}"},
         r"`bf16: true` and `train.precision: fp32` \(.*job.yaml:4\) contradict each other"),
        ("bf16: false", {"train": "{precision: bf16}"}, "`bf16: false` and .* contradict"),
        ("gradient_checkpointing: true", {"train": "{gradient_checkpointing: none}"},
         "`gradient_checkpointing: true` and `train.gradient_checkpointing: none`"),
        ("deepspeed: zero2.json", {"strategy": "{type: fsdp}"},
         "`deepspeed: zero2.json` and `strategy.type: fsdp`"),
        ("deepspeed: zero2.json", {"strategy": "auto"}, "and `strategy: auto`"),
        ("", {"strategy": "{type: fsdp, sharding: FULL_SHARD, sharding_strategy: HYBRID_SHARD}"},
         "unknown key|contradict"),
        ("", {"strategy": "{type: fsdp, sharding: SHARD_GRAD_OP, reshard_after_forward: true}"},
         "`sharding: SHARD_GRAD_OP` and `strategy.reshard_after_forward: true`"),
        ("", {"strategy": "{type: fsdp, sharding: NO_SHARD, offload: cpu}"},
         "`sharding: NO_SHARD` and `strategy.type: fsdp`"),
        ("", {"strategy": "{type: deepspeed, sharding: FULL_SHARD}"}, "unknown key here"),
        ("bf16: maybe", {}, "unknown key"),
        ("deepspeed: {zero_optimization: {stage: 2}}", {}, "names no strategy\n.*a .json file"),
        ("fsdp: full_shard something", {}, "names no strategy\n.*FULL_SHARD"),
        ("bf16: true", {"train": "5"}, "train: is 5"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_is_no_word_is_refused(
    added: str, sections: dict[str, str], fact: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=fact):
        load(tmp_path, added, **sections)


def test_every_name_of_torch_is_known() -> None:
    from torch.distributed.fsdp import ShardingStrategy

    for member in ShardingStrategy:
        assert torch_sharding(member.name) == torch_sharding(str(member)) is not None
        if not member.name.startswith("_"):
            assert torch_sharding(member.value) == torch_sharding(member.name)
    assert torch_sharding("SOME_SHARD") is None
    assert torch_sharding(0) is torch_sharding(9) is torch_sharding(True) is None
    assert published_strategy("deepspeed", "zero2.yaml") is None


@pytest.mark.parametrize("nodes", [1, 2])
def test_hybrid_sharding_makes_a_group_of_each_node(nodes: int, tmp_path: Path) -> None:
    job = load(tmp_path, strategy="{sharding: HYBRID_SHARD}", launch="{processes: 2}").job
    resolved = resolve(job, Machine(cores=4, gpus=0), nodes=nodes)
    assert resolved.job.strategy.model_dump()["replicas"] == nodes
    assert resolved.job.strategy.problems(2 * nodes) == []
    told = resolved.reasons["strategy", "replicas"]
    assert ("same as sharding: full" in told) == (nodes == 1)
