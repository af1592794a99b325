"""Writes the table of docs/families.md: `python -m docs.make_families`.

Whether a family trains and can be quantized is tried: a tiny random model of it takes three steps
of the default job on one process. Its defaults come from the resolved job; tensor and pipeline
parallelism, fusing and planning from the tables that the planner reads. With names of families only
their rows are made and printed; a test compares them with the page (`--check`).
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardtune.config.job import LoRA, ModelSection, TrainSection
from shardtune.core.model.architectures import SHAPE_READERS
from shardtune.core.model.fused_families import SHARED_INPUT_FAMILIES
from shardtune.core.model.parallel_plan import SHARDABLE_FAMILIES, can_slice
from shardtune.core.world import World
from shardtune.errors import ModelError
from shardtune.models.builder import PretrainedModelBuilder
from shardtune.models.model_files import ModelFiles
from tests.models import families
from tests.models.family_runs import family_job, run, write_family
from tests.numerics import test_encoder_decoder

PAGE = Path(__file__).with_name("families.md")
BEGIN, END = "<!-- table families -->", "<!-- /table families -->"
HEADINGS = (
    "family", "trains", "attention", "packs", "quantized", "TP", "PP", "fused", "planned",
)  # fmt: skip
BOTH = ("bart", "mt5", "t5")
"""Families with an encoder and a decoder."""


def mark(holds: bool) -> str:
    return "yes" if holds else "-"


def row(family: str, folder: Path) -> str:
    """The row of one family."""
    trains, attention, packs, quantized = (
        _paired(family) if family in BOTH else _decoder(family, folder)
    )
    tried = (f"`{family}`", mark(trains), attention, mark(packs), mark(quantized))
    return f"| {' | '.join((*tried, *declared(family)))} |"


def declared(family: str) -> tuple[str, ...]:
    """The last columns, which follow from tables alone."""
    sliced, cut = can_slice(family), family in SHARDABLE_FAMILIES
    fused, planned = family in SHARED_INPUT_FAMILIES, family in SHAPE_READERS
    return tuple(map(mark, (sliced, cut, fused, planned)))


def _decoder(family: str, folder: Path) -> tuple[bool, str, bool, bool]:
    write_family(folder, family)
    job = family_job(folder, family, "lora", "ddp", 1)
    trains = _finite(run(World(), job).losses)
    nf4 = family_job(folder, family, "lora", "ddp", 1, quantization="nf4")
    return trains, job.model.attention, job.data.packs, _finite(run(World(), nf4).losses)


def _paired(family: str) -> tuple[bool, str, bool, bool]:
    """The losses of a model with an encoder are compared in tests/numerics."""
    path = test_encoder_decoder.folder(family)
    steps = test_encoder_decoder.engine_run(World(), path, "lora", {"type": "ddp"})
    attention = _whole(ModelSection(name=path)).config._attn_implementation
    try:
        _whole(ModelSection(name=path, quantization="nf4"))
        quantized = True
    except ModelError:
        quantized = False
    return _finite([loss for loss, _ in steps]), attention, False, quantized


def _whole(section: ModelSection) -> Any:
    files, train = ModelFiles(section), TrainSection(precision="fp32")
    return PretrainedModelBuilder(files, LoRA(rank=4), train).whole("cpu")


def _finite(losses: list[float] | tuple[float, ...]) -> bool:
    return bool(losses) and all(map(math.isfinite, losses))


def rows(names: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        return {name: row(name, Path(folder)) for name in names}


def known() -> list[str]:
    return sorted([*families.CONFIGS, *BOTH])


def written() -> dict[str, str]:
    """The rows that the page has."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    lines = rest.partition(END)[0].strip().splitlines()[2:]
    return {line.split("`")[1]: line for line in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="only these rows (all)")
    parser.add_argument("--check", action="store_true", help="only say whether they are current")
    given = parser.parse_args()
    if find_spec("bitsandbytes") is None:
        raise SystemExit("the column `quantized` is tried: pip install 'shardtune[quant]'")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = rows(given.families or known())
    if given.check:
        old = [name for name, line in found.items() if written().get(name) != line]
        for name in old:
            print(f"{PAGE.name}: {name} is out of date: {found[name]}", file=sys.stderr)
        return int(bool(old))
    if given.families:
        print("\n".join(found.values()))
        return 0
    rules = "|".join(["---"] * len(HEADINGS))
    table = "\n".join([f"| {' | '.join(HEADINGS)} |", f"|{rules}|", *found.values()])
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
