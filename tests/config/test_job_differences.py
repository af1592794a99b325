"""A job beside its defaults."""

from __future__ import annotations

from shardtune.config.job_differences import JobDifference, differences_from_defaults
from tests.jobs import make_job


def found(**sections: object) -> dict[str, JobDifference]:
    return {each.key: each for each in differences_from_defaults(make_job(**sections))}


def test_the_smallest_job_differs_in_what_it_must_say() -> None:
    differences = found()
    assert list(differences) == ["model.name", "data.train.0.path", "data.train.0.format"]
    assert differences["model.name"] == JobDifference("model.name", "tiny", "")


def test_values_sections_and_lists() -> None:
    differences = found(
        adapter={"type": "lora", "rank": 4},
        train={"steps": 7, "optimizer": {"type": "adamw", "betas": [0.8, 0.9]}},
        save={"trace": True},
    )
    assert differences["adapter.type"].value == "lora"
    assert differences["adapter.type"].default == "none"
    assert differences["adapter.rank"].value == "4"
    assert differences["train.optimizer.betas"].value == "[0.8, 0.9]"
    assert differences["save.trace"] == JobDifference("save.trace", "true", "false")
    assert "train.seed" not in differences
