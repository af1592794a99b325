"""Every strategy in every precision on every kind of machine: chosen, taken, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from shardtune.config.auto import resolve
from shardtune.config.rules import check
from shardtune.core.files.yaml_document import dotted
from shardtune.core.host.machine import Machine
from shardtune.core.host.matmul_speed import MatmulSpeed, gpu_matmul_speed
from shardtune.errors import JobError
from tests.jobs import make_job

MACHINES = {
    "CPU without bf16": Machine(cores=2, gpus=0, matmul=MatmulSpeed(("fp32",), "slow")),
    "CPU with bf16": Machine(cores=2, gpus=0, matmul=MatmulSpeed(("fp32", "bf16"), "fast")),
    "old GPU": Machine(cores=2, gpus=2, matmul=gpu_matmul_speed("T4", bf16=False)),
    "new GPU": Machine(cores=2, gpus=2, matmul=gpu_matmul_speed("A100", bf16=True)),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"type": "ddp"},
    "fsdp": {"type": "fsdp"},
    "deepspeed": {"type": "deepspeed", "zero_optimization": {"stage": 2}},
    "tensor": {"type": "tensor", "degree": 2},
    "pipeline": {"type": "pipeline", "stages": 2},
    "layers": {"type": "layers", "stages": 2},
}
CHOSEN = {
    "CPU without bf16": "fp32",
    "CPU with bf16": "bf16",
    "old GPU": "fp16",
    "new GPU": "bf16",
}
SCALES_THE_LOSS = ("ddp", "fsdp", "deepspeed")


@pytest.fixture(autouse=True, params=[False, True], ids=["no fp16 on CPUs", "fp16 on CPUs"])
def deepspeed_says(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What DeepSpeed's accelerator says of fp16 on this CPU; and it is installed."""
    place = "shardtune.parallel.deepspeed.limits.fp16_on_this_cpu"
    monkeypatch.setattr(place, lambda: request.param)
    monkeypatch.setattr("shardtune.config.rules.find_spec", lambda name: name)
    return bool(request.param)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_auto_is_never_refused(strategy: str, machine: str) -> None:
    job = make_job(strategy=STRATEGIES[strategy], launch={"processes": 2})
    found = resolve(job, MACHINES[machine]).job
    check(found, dotted, MACHINES[machine])
    taken = CHOSEN[machine]
    if taken == "fp16" and strategy not in SCALES_THE_LOSS:
        taken = "fp32"
    assert found.train.precision == taken


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_can_not_be_done_is_refused_before_ranks_start(
    precision: str, strategy: str, machine: str, deepspeed_says: bool
) -> None:
    job = make_job(
        strategy=STRATEGIES[strategy], train={"precision": precision}, launch={"processes": 2}
    )
    found = resolve(job, MACHINES[machine]).job
    assert found.train.precision == precision
    lacking = strategy == "deepspeed" and "CPU" in machine and not deepspeed_says
    if precision == "fp16" and (strategy not in SCALES_THE_LOSS or lacking):
        with pytest.raises(JobError) as caught:
            check(found, dotted, MACHINES[machine])
        assert {each.place for each in caught.value.problems} == {"train.precision"}
    else:
        check(found, dotted, MACHINES[machine])
