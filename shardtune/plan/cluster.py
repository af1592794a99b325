"""Clusters: GPUs, nodes and links, described by a short text or a file.

4xA40                       one node with four GPUs
2x8xA100-80GB@400Gbps       two nodes with eight each, 400 Gbit/s between them
8xRTX3090:pcie              eight GPUs connected by PCIe
1xRTX4090:display           a GPU that drives a screen as well
1xRTX4090:20GiB             a GPU of which a job may take 20 GiB
cluster.yaml                a profile, with the measurements of `shardtune bench`
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from shardtune.core.host.matmul_speed import MatmulSpeed, gpu_matmul_speed
from shardtune.core.setup import Precision
from shardtune.core.strategy import Devices
from shardtune.errors import JobError, Problem, did_you_mean
from shardtune.plan.machine_profile import GpuFacts, LinkKind, Measured, Profile, read_profile

OPTION = "--cluster"
EXAMPLES = "4xA40, 2x8xA100-80GB@400Gbps, 8xRTX3090:pcie, or a profile's file"

USUAL_GBPS = 100.0
"""Between nodes, per node, if unknown: what any rented cluster has."""

LARGEST_NODE = 16
"""More GPUs than this in one node are noted as an assumption. Chosen."""

DISPLAY_GIB = 1.0
"""What a desktop and a browser take of a card that drives a screen. A guess: `nvidia-smi` shows
what it is; write that much less as `:20GiB`."""

LATENCY_SECONDS = {"nvlink": 5e-6, "pcie": 10e-6, "network": 20e-6}
"""Of one hop of a collective, NCCL's share included; a measured profile knows better."""

Bridges = Literal["none", "bridge", "switch"]
"""NVLink topology: none, pairs, or all to all."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: peaks of dense products, without sparsity; rates in 10^9 bytes a second."""

    name: str
    memory_gib: float
    """`total_memory` in PyTorch; the CUDA context is part of it."""
    bf16_tflops: float | None
    fp16_tflops: float
    memory_gbs: float
    nvlink_gbs: float | None
    """In one direction; on AMD's the Infinity Fabric."""
    nvlink: Bridges
    host_gbs: float
    """To the host in one direction: PCIe, or NVLink if the CPU has it."""
    source: str
    fp32_tflops: float | None = None
    """In full fp32, torch's default, not TF32, which rounds inputs to 10 bits of mantissa. None if
    unknown: then as fast as in 16 bits, which holds for some CPUs only."""

    @property
    def peak_tflops(self) -> float:
        """In the 16-bit precision that suits training best."""
        return self.bf16_tflops or self.fp16_tflops

    @property
    def matmul(self) -> MatmulSpeed:
        """The precisions in which its matmuls are fast."""
        if self.name == "CPU":  # as `shardtune bench` measured it
            found = "is fast in" if self.bf16_tflops else "has no fast"
            fast: tuple[Precision, ...] = ("bf16",) if self.bf16_tflops else ()
            return MatmulSpeed(fast, f"the measured CPU {found} bf16")
        return gpu_matmul_speed(self.name, bf16=self.bf16_tflops is not None)


@dataclass(frozen=True)
class Link:
    """Latency in seconds, and bandwidth in bytes a second in one direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """Equal nodes with equal GPUs."""

    name: str
    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 1
    link: LinkKind = "pcie"
    """Between the GPUs of a node."""
    inter_node_gbps: float = USUAL_GBPS
    """Per node and direction, shared by its GPUs."""
    host_gib: float | None = None
    """RAM of a node; None if unknown."""
    nvme_gib: float | None = None
    price_per_gpu_hour: float | None = None
    measured: Measured = field(default_factory=Measured)
    assumptions: tuple[str, ...] = ()
    """Assumptions about what wasn't given."""

    @property
    def gpus(self) -> int:
        """In all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def devices(self) -> Devices:
        """For strategies, which need neither links nor the catalogue."""
        return Devices(self.nodes, self.gpus_per_node, gpu=self.gpu.name != "CPU")

    @property
    def intra_node(self) -> Link:
        """From one GPU to others of its node."""
        speed = self.gpu.nvlink_gbs if self.link == "nvlink" else self.gpu.host_gbs
        assert speed is not None
        return Link(LATENCY_SECONDS[self.link], speed * 1e9)

    @property
    def inter_node(self) -> Link:
        """From one node to others, over all its adapters."""
        return Link(LATENCY_SECONDS["network"], self.inter_node_gbps / 8 * 1e9)

    @property
    def price_per_hour(self) -> float | None:
        """Of all GPUs."""
        price = self.price_per_gpu_hour
        return None if price is None else price * self.gpus


# The catalogue ---------------------------------------------------------------------------------


@cache
def known_gpus() -> dict[str, Gpu]:
    """Every GPU of the catalogue by its name."""
    return {entry["name"]: _from_entry(entry) for entry in _entries()}


def find_gpu(name: str, place: str = OPTION) -> Gpu:
    """A GPU by any of its names, in upper or lower case, with or without separators."""
    names = {_plain(spelling): spelling for spelling in _spellings()}
    spelling = names.get(_plain(name))
    if spelling is None:
        near = names.get(did_you_mean(_plain(name), names))
        known = f"known are {', '.join(known_gpus())}"
        fix = f"did you mean {near}? {known}" if near else f"{known}; or describe it in a profile"
        raise JobError(Problem(place, f"there is no GPU {name!r} in the catalogue", fix))
    return known_gpus()[_spellings()[spelling]]


@cache
def _spellings() -> dict[str, str]:
    """Every name, and the one of them under which the GPU stands in the catalogue."""
    return {
        spelling: entry["name"]
        for entry in _entries()
        for spelling in (entry["name"], *entry["aliases"])
    }


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


@cache
def _entries() -> list[dict[str, Any]]:
    text = files("shardtune.plan").joinpath("data/gpus.json").read_text("utf-8")
    entries: list[dict[str, Any]] = json.loads(text)["gpus"]
    return entries


def _from_entry(entry: dict[str, Any]) -> Gpu:
    return Gpu(**{key: value for key, value in entry.items() if key != "aliases"})


# From a text or a file to a cluster ------------------------------------------------------------

_SPEC = re.compile(
    r"(?:(?P<nodes>\d{1,7})x)?(?P<gpus>\d{1,7})x(?P<gpu>[A-Za-z][\w. -]*?|\d{4})"
    r"(?P<words>(?::[\w.]+)*)(?:@(?P<speed>\d{1,9}(?:\.\d{1,9})?)(?P<unit>[A-Za-z/]*))?",
    re.ASCII | re.IGNORECASE,
)
_BITS = ("Gbps", "gbps", "Gbit/s")
_BYTES = ("GB/s", "GBps")


def parse_cluster(spec: str) -> Cluster:
    """The cluster that a spec or the path of a profile describes; JobError says what is wrong."""
    text = spec.strip()
    if _is_file(text):
        profile = read_profile(Path(text))
        facts = profile.gpu
        gpu = find_gpu(facts, f"{text}: gpu") if isinstance(facts, str) else _own(facts, text)
        link = _link(gpu, profile.gpus_per_node, profile.link, f"{text}: link")
        return _build(text, gpu, link, profile)
    match = _SPEC.fullmatch(text)
    if match is None:
        fact = f"{spec!r} is neither a cluster nor a file"
        raise JobError(Problem(OPTION, fact, f"write {EXAMPLES}"))
    problems = [*_bad_counts(match), *_bad_speed(match)]
    nodes, gpus = int(match["nodes"] or 1), int(match["gpus"])
    try:
        gpu = find_gpu(match["gpu"])
        asked, memory = _words(match["words"], gpu)
        link = _link(gpu, gpus, asked, OPTION)
    except JobError as error:
        raise JobError([*problems, *error.problems]) from None
    if problems:
        raise JobError(problems)
    speed = float(match["speed"]) if match["speed"] else None
    profile = Profile(
        gpu=gpu.name, nodes=nodes, gpus_per_node=gpus, inter_node_gbps=speed, memory_gib=memory
    )
    return _build(text, gpu, link, profile)


def _words(text: str, gpu: Gpu) -> tuple[str | None, float | None]:
    """The link, and the memory that a job may take, of what stands behind the GPU's name."""
    link, memory = None, None
    for word in filter(None, text.split(":")):
        if word.lower() == "display":
            memory = gpu.memory_gib - DISPLAY_GIB
        elif size := re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)GiB", word, re.IGNORECASE):
            memory = float(size[1])
        elif link is None:
            link = word
        else:
            fact = f"{word!r} is a second link, after {link!r}"
            raise JobError(Problem(OPTION, fact, "write one link; memory is :display or :20GiB"))
    if memory is not None and not 0 < memory <= gpu.memory_gib:
        fact = f"a job can't take {memory:g} GiB of {gpu.name}, which has {gpu.memory_gib:g}"
        raise JobError(Problem(OPTION, fact, "give what is free, such as :20GiB"))
    return link, memory


def _is_file(text: str) -> bool:
    try:
        return text.endswith((".yaml", ".yml", ".json")) or Path(text).is_file()
    except OSError:  # too long a name, somebody else's folder ...
        return False


def _bad_counts(match: re.Match[str]) -> list[Problem]:
    counts = (("nodes", "nodes"), ("gpus", "GPUs in a node"))
    return [
        Problem(OPTION, f"0 {what}", "give at least 1")
        for name, what in counts
        if match[name] is not None and int(match[name]) == 0
    ]


def _bad_speed(match: re.Match[str]) -> list[Problem]:
    if match["speed"] is None:
        return []
    speed, unit = float(match["speed"]), match["unit"]
    if match["nodes"] is None:
        fact = f"@{speed:g}{unit} is between nodes, and {match['gpus']}x{match['gpu']} is one node"
        fix = f"write how many nodes there are first, as 2x8x{match['gpu']}, or leave it out"
        return [Problem(OPTION, fact, fix)]
    if unit in _BITS and speed > 0:
        return []
    if unit in _BYTES:
        fact, fix = f"{unit} are bytes; networks are named in bits", f"write @{speed * 8:g}Gbps"
    elif unit in _BITS:
        fact, fix = "0 Gbps between nodes", "give more than nothing"
    else:
        fact = f"{unit!r} is no unit of a network" if unit else f"{speed:g} of what?"
        fix = "write @400Gbps (gigabits a second, per node)"
    return [Problem(OPTION, fact, fix)]


def _link(gpu: Gpu, gpus: int, asked: str | None, place: str) -> LinkKind:
    """What connects the GPUs of a node; JobError if it isn't what was asked for."""
    if asked is None:
        return "nvlink" if gpu.nvlink == "switch" else "pcie"
    word = asked.lower()
    if word == "pcie":
        return "pcie"
    if word != "nvlink":
        near = did_you_mean(word, ("nvlink", "pcie", "display"))
        fact = f"{asked!r} is no link between GPUs"
        known = "choose nvlink or pcie, display or a size such as 20GiB"
        fix = f"did you mean {near}?" if near else known
    elif gpu.nvlink_gbs is None:
        fact, fix = f"{gpu.name} has no NVLink", "choose pcie, or leave it out"
    elif gpu.nvlink == "bridge" and gpus > 2:
        fact = f"NVLink bridges connect two {gpu.name}, not {gpus}"
        fix = "choose pcie: that is what limits them all"
    else:
        return "nvlink"
    raise JobError(Problem(place, fact, fix))


def _own(facts: GpuFacts, path: str) -> Gpu:
    return Gpu(
        **facts.model_dump(),
        nvlink="none" if facts.nvlink_gbs is None else "switch",
        source=path,
    )


def _build(name: str, gpu: Gpu, link: LinkKind, profile: Profile) -> Cluster:
    if profile.memory_gib is not None:
        gpu = replace(gpu, memory_gib=min(gpu.memory_gib, profile.memory_gib))
    return Cluster(
        name=name,
        gpu=gpu,
        nodes=profile.nodes,
        gpus_per_node=profile.gpus_per_node,
        link=link,
        inter_node_gbps=profile.inter_node_gbps or USUAL_GBPS,
        host_gib=profile.host_gib,
        nvme_gib=profile.nvme_gib,
        price_per_gpu_hour=profile.price_per_gpu_hour,
        measured=profile.measured,
        assumptions=tuple(_assumed(gpu, link, profile)),
    )


def _assumed(gpu: Gpu, link: LinkKind, profile: Profile) -> list[str]:
    found = []
    if profile.nodes > 1 and profile.inter_node_gbps is None:
        found.append(
            f"{USUAL_GBPS:g} Gbps between nodes, because nothing was given"
            " (write @400Gbps after the GPU, or inter_node_gbps in a profile)"
        )
    if profile.gpus_per_node > LARGEST_NODE:
        gpus = profile.gpus_per_node
        found.append(f"one node with {gpus} GPUs (write NODESxGPUSxTYPE, as 2x8x{gpu.name})")
    if gpu.nvlink == "bridge" and profile.gpus_per_node == 2 and link == "pcie":
        found.append(f"no NVLink bridge between the two {gpu.name} (write :nvlink if there is one)")
    return found
