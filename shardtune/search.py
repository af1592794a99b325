"""Which strategy: every candidate is forecast, the best is chosen, and each loser says why.

What is searched never changes the result of training: strategy, degrees, offload, recomputation and
the size of a micro-batch, at a fixed global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardtune.core.cluster import Cluster, find_gpu, parse_cluster
from shardtune.core.shape import ModelShape
from shardtune.errors import JobError
from shardtune.forecast import GIB, Forecast, forecast
from shardtune.job import Job, NoAdapter
from shardtune.rules import check
from shardtune.strategies import DDP, FSDP, DeepSpeed, Strategy

Aim = Literal["time", "cost", "memory"]
ALIKE = 0.01  # steps that differ by less are equally fast, for all that a forecast can say
MOST_NODES = 1024
HOST_GIB = 256  # of main memory for each GPU, in a node that nobody has described
LARGE_GPUS = ("A100-80GB", "H200-141GB")  # which people rent when a layer is too large for theirs


@dataclass(frozen=True)
class Candidate:
    """A strategy at its best, or the reason why it can't be had."""

    name: str
    found: Forecast | None
    refused: str = ""
    why: str = ""
    """What speaks for it, or against it."""

    @property
    def fits(self) -> bool:
        return self.found is not None and self.found.fits


@dataclass(frozen=True)
class Ranking:
    """All candidates, the best first."""

    candidates: tuple[Candidate, ...]
    aim: Aim

    @property
    def best(self) -> Candidate | None:
        first = self.candidates[0]
        return first if first.fits else None


def rank(
    job: Job,
    shape: ModelShape,
    cluster: Cluster,
    aim: Aim = "time",
    *,
    deepspeed: bool = True,
) -> Ranking:
    """Every strategy on all GPUs of the cluster, each with the settings that suit it best.

    Without `deepspeed`, which may not be installed, only those of PyTorch.
    """
    found = [
        _best(name, job, strategy, shape, cluster, aim)
        for name, strategy in choices(cluster)
        if deepspeed or not isinstance(strategy, DeepSpeed)
    ]
    found.sort(key=lambda each: _order(each, aim))
    best = found[0]
    return Ranking(tuple(replace(each, why=_why(each, best)) for each in found), aim)


def choices(cluster: Cluster) -> Iterator[tuple[str, Strategy]]:
    """The strategies worth trying on a cluster, the simplest first."""
    cpu = {"device": "cpu"}
    yield "ddp" if cluster.gpus > 1 else "one GPU", DDP()
    if cluster.gpus > 1:
        for stage in (1, 2, 3):
            yield f"zero{stage}", _zero(stage)
        yield "fsdp", FSDP()
        if cluster.nodes > 1:
            yield "fsdp hybrid", FSDP(sharding="hybrid", replicas=cluster.nodes)
            if cluster.gpus_per_node > 1:
                yield "zero3 + hpZ", _zero(3, zero_hpz_partition_size=cluster.gpus_per_node)
    if cluster.gpu.name == "CPU":
        return  # all is in main memory anyway
    yield "zero2, optimizer in main memory", _zero(2, offload_optimizer=cpu)
    yield "fsdp, all in main memory", FSDP(offload="cpu")
    yield "zero3, all in main memory", _zero(3, offload_optimizer=cpu, offload_param=cpu)


def _zero(stage: int, **settings: Any) -> DeepSpeed:
    return DeepSpeed.model_validate({"zero_optimization": {"stage": stage, **settings}})


def _best(
    name: str, job: Job, strategy: Strategy, shape: ModelShape, cluster: Cluster, aim: Aim
) -> Candidate:
    """The strategy with the micro-batch and the recomputation that suit it best."""
    variants = [_tried(each, shape, cluster) for each in _variants(job, strategy, cluster)]
    tried = [each for each in variants if isinstance(each, Forecast)]
    if not tried:
        return Candidate(name, None, next(each for each in variants if isinstance(each, str)))
    fitting = [each for each in tried if each.fits]
    if not fitting:
        return Candidate(name, min(tried, key=lambda each: max(each.over, each.host_over)))
    return Candidate(name, min(fitting, key=lambda each: _cost(each, aim)))


def _tried(job: Job, shape: ModelShape, cluster: Cluster) -> Forecast | str:
    """The forecast, or why the job is refused."""
    try:
        check(job, lambda path: ".".join(map(str, path)))
        return forecast(job, shape, cluster)
    except JobError as error:
        return error.problems[0].fact


def _variants(job: Job, strategy: Strategy, cluster: Cluster) -> Iterator[Job]:
    launch = job.launch.with_processes(cluster.gpus)
    mesh = strategy.mesh(cluster.gpus)
    shares = mesh.data_ranks
    rows = -(-job.train.global_batch // shares)
    micro = 1
    while micro <= rows:
        for checkpointing in ("none", "full"):
            train = job.train.model_copy(
                update={"micro_batch": micro, "gradient_checkpointing": checkpointing}
            )
            yield job.model_copy(update={"strategy": strategy, "train": train, "launch": launch})
        micro *= 2


def _cost(found: Forecast, aim: Aim) -> tuple[float, float]:
    """What is to be small; among equals, what is left of it is the memory."""
    if aim == "memory":
        return found.memory.peak, found.speed.step.total
    # Money is time: the cluster is given.
    return round(found.speed.step.total / (1 + ALIKE), 4), found.memory.peak


def _order(each: Candidate, aim: Aim) -> tuple[float, ...]:
    if each.found is None:
        return (2.0,)
    if not each.fits:
        return 1.0, max(each.found.over, each.found.host_over)
    return 0.0, *_cost(each.found, aim)


# Why ---------------------------------------------------------------------------------------------


def _why(each: Candidate, best: Candidate) -> str:
    if each.found is None:
        return f"can't be had: {each.refused}"
    if not each.fits:
        return _too_large(each.found)
    if each is best or best.found is None:
        return _praise(each.found)
    longer = each.found.speed.step.total / best.found.speed.step.total - 1
    if longer < ALIKE:
        more = (each.found.memory.peak - best.found.memory.peak) / GIB
        return f"as fast, and takes {more:+.1f} GiB"
    return f"fits, {longer:.0%} slower: {_slower(each.found, best.found)}{_provided(each.found)}"


_WORDS = {
    "params": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
}


def _too_large(found: Forecast) -> str:
    at = f"micro-batch {found.work.micro_batch}"
    at += ", with recomputation" if found.work.checkpointing == "full" else ""
    if found.over > 0:
        largest = max(found.memory.gpu, key=lambda name: found.memory.gpu[name])
        share = found.memory.gpu[largest] / GIB
        return f"{found.over / GIB:.1f} GiB over at {at}; {_WORDS[largest]} are {share:.1f} GiB"
    room = found.cluster.host_gib or 0.0
    return f"a node needs {found.host / GIB:.0f} GiB of main memory and has {room:.0f}"


def _praise(found: Forecast) -> str:
    left = -found.over / GIB
    part, seconds = _largest_wait(found)
    share = seconds / found.speed.step.total
    waits = f"; {share:.0%} of the time goes to {part}" if share > 0.02 else ""
    return f"fits with {left:.1f} GiB to spare{waits}{_provided(found)}"


def _provided(found: Forecast) -> str:
    """What nobody said about the nodes, where it matters."""
    states = found.memory.host * min(found.mesh.size, found.cluster.gpus_per_node)
    if not states or found.cluster.host_gib is not None:
        return ""
    return f", if a node has {found.host / GIB:,.0f} GiB of main memory"


def _slower(found: Forecast, best: Forecast) -> str:
    ours, theirs = found.speed.step, best.speed.step
    parts = ("compute", "communication", "optimizer", "offload", "bubble")
    lost = {part: getattr(ours, part) - getattr(theirs, part) for part in parts}
    part = max(lost, key=lambda name: lost[name])
    if part == "compute":
        if found.work.checkpointing != best.work.checkpointing:
            return "it has to compute activations again to fit"
        return f"micro-batches of {found.work.micro_batch} keep the GPU less busy"
    return _named(part, found)


def _largest_wait(found: Forecast) -> tuple[str, float]:
    step = found.speed.step
    parts = {name: getattr(step, name) for name in ("communication", "offload", "bubble")}
    part = max(parts, key=lambda name: parts[name])
    return _named(part, found), parts[part]


def _named(part: str, found: Forecast) -> str:
    """A part of the step in words, with the link that it waits for."""
    if part == "optimizer":
        return "each rank updates more weights"
    if part == "offload":
        return "states that travel between main memory and the GPU"
    if part == "bubble":
        return "stages that wait for each other"
    if not found.speed.sent:
        return "communication"
    largest = max(found.speed.sent, key=lambda each: each.total)
    names = {**dict.fromkeys(("params", "recalled", "trained"), "weights"), "grads": "gradients"}
    what = names.get(largest.move.what, "activations")
    kind = {
        "all_gather": f"gathers of {what}",
        "reduce_scatter": f"reductions of {what}",
        "all_reduce": f"reductions of {what}",
        "send_recv": f"sending {what}",
    }[largest.move.op]
    cluster = found.cluster
    inside = {"nvlink": "NVLink", "pcie": "PCIe"}[cluster.link]
    network = f"the network between nodes ({cluster.inter_node_gbps:g} Gbps)"
    return f"{kind} exposed on {inside if largest.where == 'intra_node' else network}"


# When nothing fits -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Changes of a job, by key, after which it fits."""

    values: Mapping[str, Any]
    found: Forecast
    same_result: bool
    """Whether training gives the same as before."""

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


def smallest_change(job: Job, shape: ModelShape, cluster: Cluster) -> Change | None:
    """The least that makes the job fit: first what leaves its result alone, then what doesn't."""
    for values, changed in _changes(job, cluster):
        found = _tried(changed, shape, cluster)
        if isinstance(found, Forecast) and found.fits:
            same = not any(key.startswith(("adapter", "model", "data")) for key in values)
            return Change(values, found, same)
    return None


def _changes(job: Job, cluster: Cluster) -> Iterator[tuple[dict[str, Any], Job]]:
    """Each with what was tried before it: smaller micro-batches cost least, offload most."""

    def train(update: dict[str, Any]) -> tuple[dict[str, Any], Job]:
        names = {f"train.{key}": value for key, value in update.items()}
        return names, job.model_copy(update={"train": job.train.model_copy(update=update)})

    micro = int(job.train.micro_batch) if job.train.micro_batch != "auto" else 1
    smaller = {"micro_batch": 1} if micro > 1 else {}
    while micro > 1:
        micro //= 2
        yield train({"micro_batch": micro})
    fused = {**smaller, "loss": "fused"} if job.train.loss != "fused" else smaller
    if fused != smaller:
        yield train(fused)
    lean = fused
    if job.train.gradient_checkpointing != "full":
        lean = {**fused, "gradient_checkpointing": "full"}
        yield train(lean)
    names, leaner = train(lean)
    for strategy in _sharded(cluster):
        yield (
            {**names, **_written("strategy", strategy.model_dump(exclude_defaults=True))},
            leaner.model_copy(update={"strategy": strategy}),
        )
    yield from _other_results(names, leaner, cluster)


def _sharded(cluster: Cluster) -> Iterator[Strategy]:
    if cluster.gpus > 1:
        yield FSDP()
    if cluster.gpu.name != "CPU":
        yield FSDP(offload="cpu")


def _other_results(
    names: dict[str, Any], job: Job, cluster: Cluster
) -> Iterator[tuple[dict[str, Any], Job]]:
    """An adapter in place of all weights; then a frozen model in 4 bits; then shorter rows."""
    from shardtune.job import LoRA

    if isinstance(job.adapter, NoAdapter):
        job = job.model_copy(update={"adapter": LoRA()})
        names = {**names, "adapter.type": "lora"}
        yield names, job
    if job.model.quantization != "nf4":
        model = job.model.model_copy(update={"quantization": "nf4"})
        job = job.model_copy(update={"model": model})
        names = {**names, "model.quantization": "nf4"}
        yield names, job
    if cluster.gpus > 1:
        yield (
            {**names, "strategy.type": "fsdp"},
            job.model_copy(update={"strategy": FSDP()}),
        )
    length = job.data.sequence_length
    while length > 512:
        length //= 2
        data = job.data.model_copy(update={"sequence_length": length})
        yield {**names, "data.sequence_length": length}, job.model_copy(update={"data": data})


def _written(prefix: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A section as the `key=value` words that a person would write."""
    found: dict[str, Any] = {}
    for key, child in value.items():
        name = f"{prefix}.{key}"
        found |= _written(name, child) if isinstance(child, Mapping) else {name: child}
    return found


def smallest_cluster(job: Job, shape: ModelShape, cluster: Cluster) -> Candidate | None:
    """The fewest GPUs on which some strategy fits: of this kind, or of a larger one where a single
    layer is too much for this. Nodes are filled first.

    Every rank needs a row: with more ranks than rows the global batch grows with them.
    """
    for larger in _larger(cluster):
        rows = max(job.train.global_batch, larger.gpus)
        train = job.train.model_copy(update={"global_batch": rows})
        best = rank(job.model_copy(update={"train": train}), shape, larger).best
        if best is not None:
            return best
    return None


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    for nodes, per_node in _sizes():
        if nodes * per_node > cluster.gpus and cluster.gpu.name != "CPU":
            name = _spec(nodes, per_node, cluster.gpu.name)
            host = cluster.host_gib or HOST_GIB * per_node
            yield replace(cluster, nodes=nodes, gpus_per_node=per_node, name=name, host_gib=host)
    for gpu in LARGE_GPUS:
        if find_gpu(gpu).memory_gib > cluster.gpu.memory_gib:
            for nodes, per_node in _sizes():
                network = f"@{cluster.inter_node_gbps:g}Gbps" if nodes > 1 else ""
                found = parse_cluster(_spec(nodes, per_node, gpu) + network)
                yield replace(found, host_gib=HOST_GIB * per_node)


def _spec(nodes: int, per_node: int, gpu: str) -> str:
    return f"{per_node}x{gpu}" if nodes == 1 else f"{nodes}x{per_node}x{gpu}"


def _sizes() -> Iterator[tuple[int, int]]:
    """Nodes, and GPUs in each: every size twice the one before."""
    for per_node in (1, 2, 4, 8):
        yield 1, per_node
    nodes = 2
    while nodes <= MOST_NODES:
        yield nodes, 8
        nodes *= 2
