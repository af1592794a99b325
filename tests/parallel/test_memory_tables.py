"""The tables of DeepSpeed's memory estimators, beside what DeepSpeed itself prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.cli.main import main
from shardtune.cli.states_tables import states_options
from shardtune.config.job import ModelSection
from shardtune.config.model_config import shape_of
from shardtune.core.strategy import Devices
from shardtune.core.units import GIB
from shardtune.parallel.deepspeed.memory_tables import states_tables
from tests.models.families import write

MACHINES = ((1, 1), (1, 8), (2, 8), (4, 4), (16, 8))


def published(text: str) -> list[tuple[str, str, str]]:
    """CPU, GPU and options of each line that DeepSpeed printed. From Python 3.11 on it prints the
    name of its enumeration, too."""
    text = text.replace("OffloadDeviceEnum.", "")
    cells = [line.split("|") for line in text.splitlines() if line.count("GB |") == 2]
    return [(cpu.strip(), gpu.strip(), options.replace(" ", "")) for cpu, gpu, options in cells]


def ours(stage: int, parameters: int, largest: int, machine: Devices) -> list[tuple[str, str, str]]:
    table = states_tables(parameters, largest, machine)[stage - 2]
    return [
        (f"{row.cpu / GIB:.2f}GB", f"{row.gpu / GIB:.2f}GB", row.options.replace(" ", ""))
        for row in table.rows
    ]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("parameters", "largest"), [(13_015_864_320, 163_840_000), (350_000_001, 1)]
)
def test_cold(
    parameters: int, largest: int, machine: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed", reason="needs the extra `deepspeed`")
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    nodes, gpus = machine
    on = Devices(nodes, gpus, gpu=True)
    capsys.readouterr()
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold(parameters, gpus, nodes)
    assert ours(2, parameters, largest, on) == published(capsys.readouterr().out)
    stage3.estimate_zero3_model_states_mem_needs_all_cold(parameters, largest, gpus, nodes)
    assert ours(3, parameters, largest, on) == published(capsys.readouterr().out)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_live(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed counts a model in memory, we its config."""
    pytest.importorskip("deepspeed", reason="needs the extra `deepspeed`")
    from deepspeed.runtime.zero import stage3

    model = write(tmp_path, family)
    shape = shape_of(ModelSection(name=str(tmp_path)))
    assert stage3.model_to_params(model) == (shape.parameters, shape.largest_module)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    (option,) = states_options()
    words = ["estimate", option.flag, "llama-2-7b", "--cluster", "2x8xA100-80GB"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "SW: Model with 6738M total params, 131M largest layer params." in told
    assert "  301.23GB |  19.61GB |" in told  # as DeepSpeed has it
    assert told.count("zero_init=0") == told.count("zero_init=1") == 3
    figures = [line.split("|")[3] for line in told.splitlines() if line.count("GB |") == 4]
    assert len(figures) == 8


def test_a_gpu_without_bf16_has_tables_too(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's formulas ask for 16 bits, and not for which."""
    (option,) = states_options()
    figures = []
    for gpu in ("V100", "A100-80GB"):
        assert main(["estimate", option.flag, "llama-3.2-1b", "--cluster", f"8x{gpu}"]) == 0
        figures.append(capsys.readouterr().out)
    assert figures[0] == figures[1]


def test_counts_alone_have_no_figure_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    (option,) = states_options()
    cluster = ["--cluster", "8xA100-80GB"]
    assert main(["estimate", option.flag, "13B,164M", *cluster]) == 0
    assert "13000M total params, 164M largest layer" in capsys.readouterr().out
    assert main(["estimate", option.flag, "13B", *cluster]) == 2
    assert "write 13B,LARGEST" in capsys.readouterr().err
