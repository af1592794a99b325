"""A published estimator's table as that tool prints it, with our figures beside."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from shardtune.core.states_table import StatesTable
from shardtune.core.units import GIB
from shardtune.plan.cluster import Cluster
from shardtune.plan.deepspeed_estimators import OurStates


def print_table(
    table: StatesTable, ours: Sequence[OurStates | None], cluster: Cluster, console: Console
) -> None:
    """The table, line by line; `GB` are GiB, as the tool calls them."""
    for line in lines(table, ours, cluster):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def lines(table: StatesTable, ours: Sequence[OurStates | None], cluster: Cluster) -> list[str]:
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    gpus = f"{cluster.gpus_per_node} GPU{'s' * (cluster.gpus_per_node > 1)} per node"
    found = [
        f"{table.title}: estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes}, {gpus}.",
        f"SW: {table.model}",
        "  per CPU  |  per GPU | ours: CPU |      GPU |   Options",
    ]
    for row, own in zip(table.rows, ours, strict=True):
        beside = f"{'-':>9} | {'-':>8}"
        if own is not None:
            beside = f"{own.cpu / GIB:7.2f}GB | {own.gpu / GIB:6.2f}GB"
        published = f" {row.cpu / GIB:7.2f}GB | {row.gpu / GIB:6.2f}GB"
        found.append(f"{published} | {beside} | {row.options}")
    return [*found, ""]
