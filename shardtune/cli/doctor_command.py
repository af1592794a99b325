"""`shardtune doctor`: looks at a machine, or at several together, before a run does.

On several nodes the same command runs on each; they exchange what they found and measure the links
between neighbours, one after the other, so that none disturbs another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shardtune.cli.arguments import Commands, add_command, add_job, add_json, add_nodes
from shardtune.cli.say import say
from shardtune.core.host.network import listen, own_address
from shardtune.core.units import GIB, three_digits
from shardtune.errors import JobError, LaunchError, ModelError, Problem, ShardtuneError
from shardtune.measure.bandwidth import MeasuredLink, receive, send
from shardtune.measure.node_checks import CLOCK_TOLERANCE, Finding, NodeFacts, findings, local_facts

if TYPE_CHECKING:
    from shardtune.config.job import Job
    from shardtune.core.model.shape import ModelShape
    from shardtune.core.strategy import Devices
    from shardtune.launch.multi_node import MultiNode
    from shardtune.launch.node import Node

WAIT = 120.0  # seconds that nodes wait for each other
AS_EXPECTED = 0.85
"""The share of the expected bandwidth below which a link is called slow."""


@dataclass(frozen=True)
class DoctorReport:
    """What `--json` prints."""

    nodes: Sequence[NodeFacts]
    """The first is node 0."""
    links: Sequence[MeasuredLink]
    findings: Sequence[Finding]


def add_parser(commands: Commands) -> None:
    command = add_command(
        commands,
        "doctor",
        doctor,
        "check this machine, or several nodes, before a run",
        """\
  shardtune doctor
  shardtune doctor recipes/quickstart.yaml --json
  shardtune doctor recipes/quickstart.yaml --nodes 2
  shardtune doctor --nodes 2 --node-rank 0 --head host:29400 --expected 100""",
    )
    add_job(command, optional=True)
    command.add_argument(
        "--expected", type=float, metavar="GBPS", help="expected Gbit/s between two nodes"
    )
    add_json(command)
    add_nodes(command)


def doctor(arguments: argparse.Namespace) -> int:
    """The command. Exit code 1 if something is bad."""
    from shardtune.cli.start.nodes import this_node
    from shardtune.report.doctor_table import print_findings

    to_come = _nodes_to_come(arguments)
    node = None if to_come else this_node(arguments)
    nodes = to_come or (node.count if node else 1)
    with _launchers(node) as launchers:
        job, wrong = _job(arguments, nodes)
        everywhere = _exchange(launchers, local_facts(job))
        links = _links(launchers) if launchers is not None and node is not None else []
        if node is not None and node.number > 0:
            print("node 0 shows what was found")
            return 0
        found = [*wrong, *findings(everywhere, job)]
        if node is not None:
            fact = f"all {node.count} nodes reach node 0 at {node.head}:{node.port}"
            found.append(Finding("good", "rendezvous", fact))
            found += about_links(links, job, nodes, arguments.expected)
        elif to_come:
            found += about_nodes_to_come(job, nodes, arguments.expected)
    if arguments.json:
        print(json.dumps(asdict(DoctorReport(everywhere, links, found)), indent=2))
    else:
        print_findings(found)
    return int(any(each.level == "bad" for each in found))


def _nodes_to_come(arguments: argparse.Namespace) -> int:
    """How many nodes are asked about by `--nodes` alone, from one of them; 0 if not so."""
    if arguments.nodes is None or arguments.node_rank is not None or arguments.head is not None:
        return 0
    if arguments.nodes < 1:
        raise JobError(Problem("--nodes", f"is {arguments.nodes}", "give the number of machines"))
    return int(arguments.nodes)


def _job(arguments: argparse.Namespace, nodes: int) -> tuple[Job | None, list[Finding]]:
    """The job as it would run, and what is wrong with it."""
    from shardtune.cli.resolve_job import resolve_here
    from shardtune.config.job_file import load_job

    if arguments.job is None:
        return None, []
    loaded = load_job(arguments.job, arguments.overrides)
    try:
        return resolve_here(loaded, runs_here=True, nodes=nodes).job, []
    except ShardtuneError as error:
        problems = error.problems
        return loaded.job, [Finding("bad", each.place, each.fact, each.fix) for each in problems]


@contextmanager
def _launchers(node: Node | None) -> Iterator[MultiNode | None]:
    from shardtune.launch.multi_node import MultiNode

    if node is None:
        yield None
        return
    with closing(MultiNode(node, 1, wait=WAIT, say=say)) as launchers:
        yield launchers


def _exchange(launchers: MultiNode | None, mine: NodeFacts) -> list[NodeFacts]:
    """The facts of all nodes, in their order."""
    if launchers is None:
        return [mine]
    return [NodeFacts.from_json(text) for text in launchers.all_gather("facts", mine.to_json())]


def _links(launchers: MultiNode) -> list[MeasuredLink]:
    """From each node to the next, in both directions; the last one's next is the first."""
    node, found = launchers.node, []
    own = node.head if node.number == 0 else own_address(node.head)
    pairs = [(a, (a + 1) % node.count) for a in range(node.count)]
    ways = list(dict.fromkeys(way for a, b in pairs for way in ((a, b), (b, a))))
    for source, target in ways:
        link: MeasuredLink | None = None
        listener = listen(own, 0) if node.number == target else None
        name = f"{source}-{target}"
        if listener is not None:
            listener.listen()
        place = listener.getsockname() if listener is not None else None
        address, port = json.loads(launchers.all_gather(f"place {name}", json.dumps(place))[target])
        try:
            if listener is not None:
                with listener:
                    receive(listener)
            elif node.number == source:
                link = send(source, target, address, port)
        except OSError as error:
            fact = f"the link from node {source} to node {target} failed: {error}"
            fix = "open all ports between the nodes, or fix the network"
            raise LaunchError(Problem("link", fact, fix)) from None
        mine = json.dumps(asdict(link) if link is not None else None)
        found.append(MeasuredLink(**json.loads(launchers.all_gather(f"link {name}", mine)[source])))
    return found


def about_links(
    links: Sequence[MeasuredLink], job: Job | None, nodes: int, expected: float | None
) -> list[Finding]:
    """How fast each is, beside what was expected and what the job needs."""
    found = []
    for link in links:
        place = f"node {link.source} -> node {link.target}"
        fact = (
            f"{three_digits(link.gbps)} Gbit/s over TCP, {link.milliseconds:.2g} ms there and back"
        )
        slow = expected is not None and link.gbps < AS_EXPECTED * expected
        if expected is not None:
            fact += f"; {expected:g} Gbit/s were expected"
        fix = "look for a wrong interface (--interface), a full switch or a bad cable"
        found.append(Finding("warning" if slow else "good", place, fact, fix if slow else ""))
        if abs(link.clock_seconds) > CLOCK_TOLERANCE:
            fact = f"the clocks are {abs(link.clock_seconds):.1f} s apart"
            fix = "let a time service set them; logs of the nodes can't be compared so"
            found.append(Finding("warning", place, fact, fix))
    if job is not None and links:
        found.append(_need(job, nodes, min(link.gbps for link in links)))
    return found


def about_nodes_to_come(job: Job | None, nodes: int, expected: float | None) -> list[Finding]:
    """Of nodes like this one, asked about from one of them: nothing between them was measured."""
    fact = f"the links between {nodes} nodes weren't measured: that takes this command on each"
    options = f"--nodes {nodes} --node-rank N --head HOST:29400"
    fix = f"add to it {options}, where N counts from 0 and HOST is the address of node 0"
    found = [] if job is None else [_need(job, nodes, expected)]
    return [*found, Finding("warning", "links", fact, fix)]


def _need(job: Job, nodes: int, gbps: float | None) -> Finding:
    """What a link as fast as the slowest means for the job; of an unknown one, what would do."""
    from shardtune.core.host.machine import Machine
    from shardtune.core.strategy import Devices
    from shardtune.plan.this_machine import require_forecast_here

    try:
        predicted = require_forecast_here(job, Machine.here(), nodes)
    except (JobError, ModelError) as error:
        why = error.problems[0]
        fact = f"what it sends can't be forecast: {why.place}: {why.fact}"
        return Finding("warning", "job", fact, why.fix)
    bits = predicted.traffic().leaves_node * GIB * 8  # as `estimate` counts them
    computing = predicted.speed.step.compute
    how = f"{job.strategy.type} on {nodes} nodes"
    fact = f"about {three_digits(bits / 1e9)} Gbit leave each node in a step ({how})"
    if gbps is None:
        enough = bits / 1e9 / computing
        fact += f", which computes for about {three_digits(computing)} s: "
        fact += f"{three_digits(enough)} Gbit/s keep up with it"
        return Finding("good", "job", fact)
    seconds = bits / (gbps * 1e9)
    fact += f": {three_digits(seconds)} s at {three_digits(gbps)} Gbit/s"
    if seconds <= computing:
        return Finding("good", "job", fact)
    fact += f", and a step computes for about {three_digits(computing)} s: "
    fact += "the network limits the run"
    devices = Devices(nodes, max(1, int(job.launch.processes) // nodes), gpu=True)
    less = "a larger global_batch or an adapter sends less often or less"
    return Finding("warning", "job", fact, _inside_nodes(predicted.shape, devices) + less)


def _inside_nodes(shape: ModelShape, devices: Devices) -> str:
    """A strategy that divides the weights over the devices of each node alone, to name in a fix."""
    from shardtune.plan.search import choices

    for choice in choices(shape, devices):
        layout = choice.strategy.layout()
        divides = any("params" in rule.divides and rule.by == "share" for rule in layout.rules)
        if divides and not layout.home and not choice.strategy.capabilities.gathers_from_all_nodes:
            return f"strategy: {choice.strategy.written()} gathers weights inside each node; "
    return ""
