"""An override makes void what the file says for another case; what stands together is a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config.job import IA3, LoRA, NoAdapter
from shardtune.config.job_file import load_job
from shardtune.config.rules import check
from shardtune.errors import JobError
from shardtune.parallel.fsdp.strategy import FSDP
from shardtune.parallel.tensor.strategy import Tensor
from tests.jobs import write_job

LORA = "{type: lora, rank: 8, alpha: 16, targets: [q_proj]}"


def test_a_shorter_try_of_a_recipe_runs(tmp_path: Path) -> None:
    recipe = write_job(
        tmp_path,
        train="{steps: 24, warmup_steps: 3, global_batch: 2}",
        save="{directory: runs/a, every: 12}",
        evaluate="{every: 12}",
    )
    loaded = load_job(recipe, ["train.steps=3"])
    check(loaded.job, loaded.place)
    assert (loaded.job.train.warmup_steps, loaded.job.save.every) == (2, 0)
    assert loaded.understood == {
        ("train", "warmup_steps"): (
            "train.warmup_steps is 3 in the file, this run has 3: less warmup"
        ),
        ("save", "every"): (
            "save.every is 12 in the file, this run has 3: one checkpoint, at the end"
        ),
    }
    same = load_job(recipe, ["train.steps=24"])
    assert (same.job.train.warmup_steps, same.job.save.every, same.understood) == (3, 12, {})


def test_what_is_written_beside_the_steps_is_still_refused(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, train="{steps: 2, warmup_steps: 5, global_batch: 2}")
    loaded = load_job(recipe, ["save.every=9"])
    with pytest.raises(JobError) as caught:
        check(loaded.job, loaded.place)
    assert len(caught.value.problems) == 2
    told = load_job(write_job(tmp_path), ["train.steps=3", "save.every=9"])
    with pytest.raises(JobError, match="a checkpoint every 9 steps of a run of 3"):
        check(told.job, told.place)


def test_another_adapter_takes_nothing_of_the_old_one(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, adapter=LORA)
    loaded = load_job(recipe, ["adapter.type=none"])
    assert loaded.job.adapter == NoAdapter()
    why = "the file's rank, alpha, targets belong to another type: left out"
    assert loaded.understood == {("adapter", "type"): why}
    assert load_job(recipe, ["adapter.type=ia3"]).job.adapter == IA3(targets=("q_proj",))
    assert load_job(recipe, ["adapter.type=lora"]).job.adapter == load_job(recipe).job.adapter


def test_keys_of_two_types_behind_the_command_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="it belongs to `type: lora`"):
        load_job(write_job(tmp_path, adapter=LORA), ["adapter.type=none", "adapter.rank=4"])
    with pytest.raises(JobError, match="it belongs to `type: lora`"):
        load_job(write_job(tmp_path, adapter="{type: none, rank: 4}"))
    assert isinstance(load_job(write_job(tmp_path, adapter=LORA)).job.adapter, LoRA)


def test_a_later_type_takes_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    """So what the planner offers can be pasted behind any command."""
    words = ["strategy.type=tensor", "strategy.degree=2", "strategy.type=fsdp"]
    loaded = load_job(write_job(tmp_path), words)
    assert loaded.job.strategy == FSDP()
    why = "the earlier degree belong to another type: left out"
    assert loaded.understood == {("strategy", "type"): why}
    kept = load_job(write_job(tmp_path), [*words[:2], "strategy.type=tensor"])
    assert kept.job.strategy == Tensor(degree=2)
    with pytest.raises(JobError, match="degree: unknown key here"):
        load_job(write_job(tmp_path), [*words, "strategy.degree=4"])


def test_epochs_take_the_place_of_steps(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, train="{steps: 24, warmup_ratio: 0.1}")
    loaded = load_job(recipe, ["train.epochs=2"])
    assert (loaded.job.train.steps, loaded.job.train.epochs) == (None, 2.0)
    assert loaded.understood == {("train", "epochs"): "in the place of the file's steps: 24"}
    warm = load_job(recipe, ["train.warmup_steps=5"]).job.train
    assert (warm.warmup_steps, warm.warmup_ratio) == (5, None)
    both = load_job(recipe, ["train.steps=3", "train.epochs=2"])
    with pytest.raises(JobError, match="both steps"):
        check(both.job, both.place)


@pytest.mark.parametrize(
    ("written", "lead"),
    [
        ("save.steps=5", "use save.every"),
        ("evaluate.steps=5", "use evaluate.every"),
        ("launch.num_gpus=2", "use launch.processes, one for each GPU"),
        ("adapter.type=qlora", "QLoRA is adapter: {type: lora} on model: {quantization: nf4}"),
    ],
)
def test_words_of_others_lead_to_ours(tmp_path: Path, written: str, lead: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(write_job(tmp_path), [written])
    (problem,) = caught.value.problems
    assert lead in problem.fix
