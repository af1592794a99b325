"""When a job doesn't fit: the smallest change that does, and the smallest cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardtune.config.job import AdamW, Job, LoRA, NoAdapter
from shardtune.core.model.shape import ModelShape
from shardtune.parallel import STRATEGIES, Strategy
from shardtune.plan.cluster import Cluster, find_gpu, parse_cluster
from shardtune.plan.forecast import Forecast
from shardtune.plan.memory_budget import BETWEEN, LEVELS
from shardtune.plan.search import Candidate, rank, tried

OTHER_RESULT = ("adapter", "model", "data", "train.precision")
"""Keys whose values decide what is learnt."""
MOST_NODES = 1024
HOST_GIB = 256  # of main memory for each GPU, in a node that nobody has described
LARGE_GPUS = ("A100-80GB", "H200-141GB")  # which people rent when a layer is too large for theirs


@dataclass(frozen=True)
class Change:
    """Changes of a job, by key, after which it fits."""

    values: Mapping[str, Any]
    found: Forecast
    same_result: bool
    """Whether training gives the same as before."""

    def __str__(self) -> str:
        """As it would be written behind a command."""
        words = {
            key: str(value).lower() if isinstance(value, bool) else value
            for key, value in self.values.items()
        }
        return " ".join(f"{key}={value}" for key, value in words.items())


def smallest_change(job: Job, shape: ModelShape, cluster: Cluster) -> Change | None:
    """The least that makes the job fit: first what leaves its result alone, then what doesn't."""
    for values, changed in _changes(job, cluster):
        found = tried(changed, shape, cluster)
        if isinstance(found, Forecast) and found.fits:
            same = not any(key.startswith(OTHER_RESULT) for key in values)
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
    level, excepted = job.train.gradient_checkpointing, {}
    if job.train.keep_layers and level in BETWEEN:
        excepted = {"keep_layers": 0}
        yield train({**fused, **excepted})
    lean, levels = fused, []
    own = {key: value for key, value in fused.items() if key != "micro_batch"}
    for more in LEVELS if level == "auto" else LEVELS[LEVELS.index(level) + 1 :]:
        again = {**excepted, "gradient_checkpointing": more}
        levels.append({**own, **again})
        if smaller:  # the batch may be what it is; and several are added up in fp32
            yield train({**own, **again})
        lean = {**fused, **again}
        yield train(lean)
    names, leaner = _without_fp8(*train(lean))  # what follows divides weights, or packs them
    if job.splits_weights(cluster.gpus) and cluster.gpu.name != "CPU":
        for update in ({}, own, *levels, lean):  # the least beside it that is enough
            yield _paged(*train(update))
    names, leaner = _unpaged(names, leaner)
    for strategy in _sharded(cluster):
        yield (
            {**names, "strategy.type": strategy.type, **_settings(strategy)},
            leaner.model_copy(update={"strategy": strategy}),
        )
    yield from _other_results(names, leaner, cluster)


def _paged(names: dict[str, Any], job: Job) -> tuple[dict[str, Any], Job]:
    """What the update remembers lies in main memory."""
    told = {"train.optimizer.type": "adamw", "train.optimizer.paged": True}
    rule = job.train.optimizer.model_copy(update={"paged": True})
    train = job.train.model_copy(update={"optimizer": rule})
    return {**names, **told}, job.model_copy(update={"train": train})


def _unpaged(names: dict[str, Any], job: Job) -> tuple[dict[str, Any], Job]:
    """For what can't have them."""
    rule = job.train.optimizer
    if not isinstance(rule, AdamW) or not rule.paged:
        return names, job
    train = job.train.model_copy(update={"optimizer": rule.model_copy(update={"paged": False})})
    return {**names, "train.optimizer.paged": False}, job.model_copy(update={"train": train})


def _without_fp8(names: dict[str, Any], job: Job) -> tuple[dict[str, Any], Job]:
    """The same with frozen weights stored as they are computed with."""
    if job.model.quantization != "fp8":
        return names, job
    model = job.model.model_copy(update={"quantization": "none"})
    return {**names, "model.quantization": "none"}, job.model_copy(update={"model": model})


def _sharded(cluster: Cluster) -> Iterator[Strategy]:
    """What strategies offer to those for whom whole copies of a model are too much."""
    for kind in STRATEGIES.values():
        yield from kind.remedies(cluster.devices)


def _other_results(
    names: dict[str, Any], job: Job, cluster: Cluster
) -> Iterator[tuple[dict[str, Any], Job]]:
    """An adapter in place of all weights; then a frozen model in 4 bits; then shorter rows."""
    if isinstance(job.adapter, NoAdapter):
        job = job.model_copy(update={"adapter": LoRA()})
        names = {**names, "adapter.type": "lora"}
        yield names, job
    if job.model.quantization != "nf4":
        model = job.model.model_copy(update={"quantization": "nf4"})
        job = job.model_copy(update={"model": model})
        names = {**names, "model.quantization": "nf4"}
        yield names, job
    for strategy in _sharded(cluster):
        if not strategy.layout().home:  # nothing is offloaded, which costs more
            yield (
                {**names, "strategy.type": strategy.type, **_settings(strategy)},
                job.model_copy(update={"strategy": strategy}),
            )
    length = job.data.sequence_length
    while length > 512:
        length //= 2
        data = job.data.model_copy(update={"sequence_length": length})
        yield {**names, "data.sequence_length": length}, job.model_copy(update={"data": data})


def _settings(strategy: Strategy) -> dict[str, Any]:
    """What isn't its default."""
    return _written("strategy", strategy.model_dump(exclude_defaults=True, exclude={"type"}))


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
