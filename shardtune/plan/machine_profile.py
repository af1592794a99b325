"""A machine or cluster as a file describes it: what it has, and what was measured on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from shardtune.core.files.yaml_document import KeyPath, YamlDocument, dotted, read_document
from shardtune.core.job_section import Section
from shardtune.errors import JobError, Problem, did_you_mean

_Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
LinkKind = Literal["nvlink", "pcie"]


class MatmulPoint(Section):
    """One product of matrices, m×k times k×n, timed."""

    m: _Positive
    n: _Positive
    k: _Positive
    dtype: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    tflops: Rate
    """10^12 floating-point operations a second."""


class CollectivePoint(Section):
    """One collective, timed."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "send_recv"]
    link: Literal["intra_node", "inter_node"]
    """What its slowest hop went over."""
    ranks: Annotated[int, Field(ge=2)]
    bytes: _Positive
    """Of the whole tensor that is gathered or reduced, not of a rank's share of it."""
    seconds: Rate


class Measured(Section):
    """What `shardtune bench` found; whatever is missing is estimated from the data sheet."""

    matmul: tuple[MatmulPoint, ...] = ()
    """The ceiling of products over their shapes."""
    memory_gbs: Rate | None = None
    """Device memory, read and written, in GB/s."""
    host_to_device_gbs: Rate | None = None
    """From pinned host memory, in GB/s."""
    device_to_host_gbs: Rate | None = None
    """To pinned host memory, in GB/s."""
    disk_read_gbs: Rate | None = None
    disk_write_gbs: Rate | None = None
    collectives: tuple[CollectivePoint, ...] = ()


class GpuFacts(Section):
    """A GPU that the catalogue doesn't have."""

    name: Annotated[str, Field(min_length=1)]
    memory_gib: Rate
    """What PyTorch calls its total memory, in GiB."""
    bf16_tflops: Rate | None
    """Peak of dense products in bf16; null if it can't."""
    fp16_tflops: Rate
    fp32_tflops: Rate | None = None
    """Peak in full fp32, without TF32; null takes that of 16 bits, as on a CPU without those."""
    memory_gbs: Rate
    """Device memory, in GB/s."""
    nvlink_gbs: Rate | None = None
    """To the other GPUs of its node, one direction; null if there is no such link."""
    host_gbs: Rate = 31.5
    """To the host, one direction; PCIe 4.0 with 16 lanes if not given."""


class Profile(Section):
    """A cluster of equal nodes."""

    gpu: str | GpuFacts
    """A name of the catalogue (`A100-80GB`), or the GPU's own figures."""
    nodes: _Positive = 1
    gpus_per_node: _Positive = 1
    memory_gib: Rate | None = None
    """What a job may take of a GPU's memory, where another program or a screen takes some."""
    link: LinkKind | None = None
    """Between the GPUs of a node; null takes NVLink where all of them have it."""
    inter_node_gbps: Rate | None = None
    """Between nodes, per node and direction, in gigabits a second."""
    host_gib: Rate | None = None
    """RAM of one node."""
    nvme_gib: Rate | None = None
    """Fast disk of one node."""
    price_per_gpu_hour: Rate | None = None
    """In any currency; costs come out in the same."""
    measured: Measured = Measured()


def read_profile(path: Path) -> Profile:
    """Reads a YAML or JSON profile; raises JobError with every problem found."""
    document = read_document(path)
    if not isinstance(document.value, dict):
        fact = "is empty" if document.value is None else "is not a mapping of keys"
        raise JobError(Problem(str(path), fact, "a profile has at least `gpu:`"))
    try:
        return Profile.model_validate_json(json.dumps(document.value))
    except ValidationError as error:
        raise JobError(_problems(error, document)) from None


def _problems(error: ValidationError, document: YamlDocument) -> list[Problem]:
    """One for each key, at its line."""
    found: dict[KeyPath, Problem] = {}
    for item in error.errors(include_url=False):
        path = _real_path(item["loc"], document.value, missing=item["type"] == "missing")
        fact, fix = _describe(path, item)
        found.setdefault(path, Problem(_place(path, document), fact, fix))
    # Where a section may also be a word, pydantic says of each that it isn't the other.
    inner = {path[:end] for path in found for end in range(len(path))}
    return [problem for path, problem in found.items() if path not in inner]


def _describe(path: KeyPath, item: ErrorDetails) -> tuple[str, str]:
    if item["type"] == "missing":
        return "is missing", f"add `{path[-1]}:`"
    if item["type"] == "extra_forbidden":
        near = did_you_mean(str(path[-1]), _keys(path))
        known = f"known here: {', '.join(_keys(path))}"
        return "unknown key", f"did you mean {near!r}?" if near else known
    wanted = item["msg"].replace("Input should be ", "")
    return f"is {json.dumps(item['input'])}; it must be {wanted}", "correct it"


def _real_path(location: KeyPath, value: Any, *, missing: bool) -> KeyPath:
    """Without the names that pydantic adds for the members of a union."""
    path: list[int | str] = []
    for part in location:
        known = isinstance(value, dict) and part in value
        if known or (isinstance(value, list) and isinstance(part, int)):
            path.append(part)
            value = value[part]
    if missing:
        path.append(location[-1])
    return tuple(path)


def _place(path: KeyPath, document: YamlDocument) -> str:
    nearest = next(path[:end] for end in range(len(path), -1, -1) if path[:end] in document.lines)
    return f"{document.source}:{document.lines[nearest]}: {dotted(path)}"


_SECTIONS: dict[str, type[BaseModel]] = {
    "gpu": GpuFacts,
    "measured": Measured,
    "matmul": MatmulPoint,
    "collectives": CollectivePoint,
}


def _keys(path: KeyPath) -> tuple[str, ...]:
    """The keys that are known beside the last one of a path."""
    names = [part for part in path[:-1] if isinstance(part, str)]
    section = _SECTIONS[names[-1]] if names else Profile
    return tuple(section.model_fields)
