"""When a job doesn't fit: the smallest change that does, and the smallest cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

from shardtune.config.job import AdamW, Job, LoRA, NoAdapter
from shardtune.core.job_section import Section
from shardtune.core.model.shape import ModelShape
from shardtune.core.setup import Recompute
from shardtune.parallel import STRATEGIES, Strategy
from shardtune.plan.auto_micro_batch import BETWEEN, LEVELS, has_room, levels_of
from shardtune.plan.cluster import Cluster, find_gpu, known_gpus, parse_cluster
from shardtune.plan.forecast import Forecast
from shardtune.plan.search import Candidate, may_fit, planned_value, rank, tried

OTHER_RESULT = ("adapter", "model", "data", "train.precision")
"""Keys whose values decide what is learnt."""
MOST_NODES = 1024
HOST_GIB = 256  # of CPU memory for each GPU, in a node that nobody has described
SHORTEST = 512  # tokens of a row: fewer are no remedy
LARGE_GPUS = ("A100-80GB", "H200-141GB")  # which people rent when a layer is too large for theirs

Setting: TypeAlias = bool | int | float | str | None
"""The value of one key, as it is written behind `key=`."""


@dataclass(frozen=True)
class Change:
    """Changes of a job, by key, after which it fits."""

    values: Mapping[str, Setting]
    found: Forecast
    same_result: bool
    """Whether training gives the same as before."""

    def __str__(self) -> str:
        """As it would be written behind a command."""
        return in_words(self.values)


def in_words(values: Mapping[str, Setting]) -> str:
    """Overrides as they are written behind a command."""
    return " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
    )


def smallest_change(
    job: Job, shape: ModelShape, cluster: Cluster, *, rows_told: bool = False
) -> Change | None:
    """The least that makes the job fit: first what leaves its result alone, then what doesn't. Of
    those with the same result one that leaves the documented reserve free comes first.
    `rows_told`: the strategy's own file says the micro-batch, so it can't be set beside it."""
    narrow: Change | None = None
    for ladder in _ladders(_Changed(job, {}, rows_told), shape, cluster):
        if narrow is not None and narrow.same_result and not ladder[0].same_result:
            return narrow
        change = _least_that_fits(ladder, shape, cluster)
        if change is not None and has_room(change.found):
            return change
        narrow = narrow or change
    return narrow


def _least_that_fits(
    ladder: Sequence[_Changed], shape: ModelShape, cluster: Cluster
) -> Change | None:
    """Of changes that spare more and more; None where the last ones, with as few rows at a time as
    can be and with as many as before, don't fit either."""
    if len(ladder) > 2 and not any(_fitting(each, shape, cluster) for each in ladder[-2:]):
        return None
    narrow: Change | None = None
    for changed in ladder:
        change = _fitting(changed, shape, cluster)
        if change is not None and has_room(change.found):
            return change
        narrow = narrow or change
    return narrow


def _fitting(changed: _Changed, shape: ModelShape, cluster: Cluster) -> Change | None:
    found = tried(changed.job, shape, cluster)
    if not isinstance(found, Forecast) or not found.fits:
        return None
    return Change(changed.values, found, changed.same_result)


@dataclass(frozen=True)
class _Changed:
    """A job, and the keys in which it differs from the one that was asked for."""

    job: Job
    values: Mapping[str, Setting]
    rows_told: bool = False
    """Whether its strategy's own file says the micro-batch."""

    @property
    def same_result(self) -> bool:
        return not any(key.startswith(OTHER_RESULT) for key in self.values)

    def train(self, **update: Setting) -> _Changed:
        train = self.job.train.model_copy(update=update)
        return self._with("train", train, {f"train.{key}": each for key, each in update.items()})

    def paged(self) -> _Changed:
        """Optimizer states in CPU memory."""
        told: dict[str, Setting] = {
            "train.optimizer.type": "adamw",
            "train.optimizer.paged": True,
        }
        return self._with_optimizer(True, told)

    def unpaged(self) -> _Changed:
        """For what can't have them there."""
        rule = self.job.train.optimizer
        if not isinstance(rule, AdamW) or not rule.paged:
            return self
        return self._with_optimizer(False, {"train.optimizer.paged": False})

    def quantized(self, kind: str) -> _Changed:
        """Frozen weights stored in another way."""
        if self.job.model.quantization == kind:
            return self
        model = self.job.model.model_copy(update={"quantization": kind})
        return self._with("model", model, {"model.quantization": kind})

    def without_fp8(self) -> _Changed:
        """The same with frozen weights stored as they are computed with."""
        return self.quantized("none") if self.job.model.quantization == "fp8" else self

    def lora(self) -> _Changed:
        return self._with("adapter", LoRA(), {"adapter.type": "lora"})

    def strategy(self, strategy: Strategy) -> _Changed:
        """Under another strategy, with those of its settings that aren't the default."""
        changed = self._with("strategy", strategy, _told(self.job.strategy, strategy))
        return replace(
            changed, rows_told=self.rows_told and strategy.type == self.job.strategy.type
        )

    def sequence_length(self, length: int) -> _Changed:
        data = self.job.data.model_copy(update={"sequence_length": length})
        return self._with("data", data, {"data.sequence_length": length})

    def _with_optimizer(self, paged: bool, told: Mapping[str, Setting]) -> _Changed:
        rule = self.job.train.optimizer.model_copy(update={"paged": paged})
        return self._with("train", self.job.train.model_copy(update={"optimizer": rule}), told)

    def _with(self, name: str, section: Section, told: Mapping[str, Setting]) -> _Changed:
        job = self.job.model_copy(update={name: section})
        return replace(self, job=job, values={**self.values, **told})


def _ladders(asked: _Changed, shape: ModelShape, cluster: Cluster) -> Iterator[Sequence[_Changed]]:
    """Changes from the least to the one that spares most; smaller micro-batches cost least, offload
    most."""
    yield from ([each] for each in _rungs(asked, shape, cluster)[1:])
    if asked.job.splits_weights(cluster.gpus) and cluster.gpu.name != "CPU":
        yield _rungs(asked.paged(), shape, cluster)
    divided = asked.without_fp8().unpaged()  # what follows divides weights, or packs them
    for strategy in _sharded(cluster):
        yield _rungs(divided.strategy(strategy), shape, cluster)
    yield from _other_results(divided, shape, cluster)


def _rungs(changed: _Changed, shape: ModelShape, cluster: Cluster) -> list[_Changed]:
    """The job as it is, and with all that spares memory and leaves strategy and result alone."""
    fused: dict[str, Setting] = {"loss": "fused"}
    can_fuse = changed.job.train.loss != "fused" and _can_be_had(
        changed.train(**fused), shape, cluster
    )
    loss = fused if can_fuse else {}
    rows = changed.job.train.micro_batch
    micro = 1 if rows == "auto" or changed.rows_told else int(rows)
    savings = _savings(changed.job, micro, loss, levels_of(changed.job, shape.kind))
    return [changed, *(changed.train(**update) for update in savings)]


def _can_be_had(changed: _Changed, shape: ModelShape, cluster: Cluster) -> bool:
    """Whether no rule refuses it, whatever it takes."""
    return isinstance(tried(changed.job, shape, cluster), Forecast)


def _savings(
    job: Job, micro: int, loss: dict[str, Setting], levels: Sequence[Recompute]
) -> Iterator[dict[str, Setting]]:
    """Of the section `train`, each with what came before it; the last spares most."""
    smaller: dict[str, Setting] = {"micro_batch": 1} if micro > 1 else {}
    while micro > 1:
        micro //= 2
        yield {"micro_batch": micro}
    if loss:
        yield {**smaller, **loss}
    level = job.train.gradient_checkpointing
    excepted: dict[str, Setting] = {}
    if job.train.keep_layers and level in BETWEEN:
        excepted = {"keep_layers": 0}
        yield {**smaller, **loss, **excepted}
    for more in levels:
        if level == "auto" or LEVELS.index(more) > LEVELS.index(level):
            again = {**loss, **excepted, "gradient_checkpointing": more}
            if smaller:  # the batch may be what it is; and several are added up in fp32
                yield again
            yield {**smaller, **again}


def _sharded(cluster: Cluster) -> Iterator[Strategy]:
    """What strategies offer to those for whom whole copies of a model are too much."""
    for kind in STRATEGIES.values():
        yield from kind.remedies(cluster.devices)


def _other_results(
    changed: _Changed, shape: ModelShape, cluster: Cluster
) -> Iterator[Sequence[_Changed]]:
    """An adapter in place of all weights; then a frozen model in 4 bits; then shorter rows."""
    own = [each for each in _sharded(cluster) if not each.layout().home]  # offload costs more
    lora = changed.lora()
    if isinstance(changed.job.adapter, NoAdapter) and _can_be_had(lora, shape, cluster):
        changed = lora
        for each in (changed, *map(changed.strategy, own)):
            yield _rungs(each, shape, cluster)
    packed = changed.quantized("nf4")
    if changed.job.model.quantization != "nf4" and _can_be_had(packed, shape, cluster):
        changed = packed
        yield _rungs(changed, shape, cluster)
    for strategy in own:
        yield _rungs(changed.strategy(strategy), shape, cluster)
    length = changed.job.data.sequence_length
    while length > SHORTEST:
        length //= 2
        for each in (changed, *map(changed.strategy, _sharded(cluster))):
            yield [_rungs(each, shape, cluster)[-1].sequence_length(length)]


def _told(asked: Strategy, strategy: Strategy) -> dict[str, Setting]:
    """The settings that make one of the other. A key that both types have stays what the job says,
    unless it is told otherwise."""
    chosen = strategy.model_dump(exclude={"type"})
    if asked.type == strategy.type:
        told = _differing("strategy", asked.model_dump(), chosen)
    else:
        settings = strategy.model_dump(exclude_defaults=True, exclude={"type"})
        both = asked.model_dump(exclude_defaults=True).keys() & chosen.keys()
        told = _written("strategy", settings | {key: chosen[key] for key in sorted(both)})
    return {"strategy.type": strategy.type, **told}


def _differing(
    prefix: str, asked: Mapping[str, object], chosen: Mapping[str, object]
) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for key, value in chosen.items():
        old = asked.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            found |= _differing(f"{prefix}.{key}", old, value)
        elif value != old:
            found |= _written(prefix, {key: value})
    return found


def _written(prefix: str, value: Mapping[str, object]) -> dict[str, Setting]:
    """A section as the `key=value` words that a person would write."""
    found: dict[str, Setting] = {}
    for key, child in value.items():
        name = f"{prefix}.{key}"
        if isinstance(child, Mapping):
            found |= _written(name, child)
        else:
            assert child is None or isinstance(child, bool | int | float | str)
            found[name] = child
    return found


def smallest_cluster(job: Job, shape: ModelShape, cluster: Cluster) -> Candidate | None:
    """The fewest GPUs on which some strategy fits: of this kind, or of a larger one where a single
    layer is too much for this. Nodes are filled first.

    Every rank needs a row: with more ranks than rows the global batch grows with them.
    """
    for _, same_kind in groupby(_larger(cluster), key=lambda each: each.gpu.name):
        for larger in _from_first_fit(job, shape, list(same_kind)):
            best = rank(_with_rows_for(job, larger), shape, larger).best
            if best is not None:
                return best
    return None


def _from_first_fit(job: Job, shape: ModelShape, clusters: list[Cluster]) -> list[Cluster]:
    """The clusters, which grow, from the first on that may hold the job. What fits on some fits on
    more of them, so it is found by halving."""

    def fits(number: int) -> bool:
        cluster = clusters[number]
        return may_fit(_with_rows_for(job, cluster), shape, cluster)

    low, high = 0, len(clusters) - 1
    if high < 0 or not fits(high):
        return []
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return clusters[low:]


def _with_rows_for(job: Job, cluster: Cluster) -> Job:
    """With a row for each rank at least."""
    rows = max(job.train.global_batch, cluster.gpus)
    return job.model_copy(update={"train": job.train.model_copy(update={"global_batch": rows})})


PLANNED = (
    "global_batch", "micro_batch", "gradient_checkpointing", "keep_layers", "loss", "kernels",
    "optimizer.paged",
)  # fmt: skip
"""Keys of the section `train` that a search may change, the batch for a larger cluster only."""


def overrides(asked: Job, planned: Job) -> dict[str, Setting]:
    """What makes one job the other, of all that the search may choose."""
    same = planned.strategy == asked.strategy
    found = {} if same else _told(asked.strategy, planned.strategy)
    for key in PLANNED:
        new = planned_value(planned, key)
        if new != planned_value(asked, key):
            if key == "optimizer.paged":  # a job may have no such section yet
                found["train.optimizer.type"] = planned.train.optimizer.type
            found[f"train.{key}"] = new
    return found


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    for nodes, per_node in _sizes():
        if nodes * per_node > cluster.gpus and cluster.gpu.name != "CPU":
            name = _spec(nodes, per_node, cluster.gpu.name)
            link = cluster.link
            if cluster.gpu.nvlink == "bridge" and per_node != 2:  # bridges connect two
                link = "pcie"
            if (link == "pcie") == (cluster.gpu.nvlink == "switch"):
                name += f":{link}"
            known = known_gpus().get(cluster.gpu.name)
            if known is not None and cluster.gpu.memory_gib < known.memory_gib:
                name += f":{cluster.gpu.memory_gib:g}GiB"
            if nodes > 1:
                name += f"@{cluster.inter_node_gbps:g}Gbps"
            host = cluster.host_gib or HOST_GIB * per_node
            yield replace(
                cluster, nodes=nodes, gpus_per_node=per_node, link=link, name=name, host_gib=host
            )
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
