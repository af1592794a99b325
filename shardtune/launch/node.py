"""A node of a multi-node run: which of how many machines this is, and where they meet."""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.core.host.network import LOOPBACK, address_of, interface_of, interfaces, own_address
from shardtune.errors import JobError, Problem


@dataclass(frozen=True)
class Node:
    """This node's rank among the nodes, and the address of node 0 (the head)."""

    count: int
    number: int
    head: str
    """The IPv4 address of node 0."""
    port: int
    interface: str = ""
    """What this node talks to the others over."""

    @property
    def others(self) -> list[int]:
        """The numbers of the other nodes."""
        return [number for number in range(self.count) if number != self.number]

    @staticmethod
    def parse(count: int, number: int, head: str, interface: str | None = None) -> Node:
        """From the command line; JobError says everything that is wrong."""
        host, _, port = head.rpartition(":")
        problems = []
        if not 0 <= number < count:
            fact = f"there is no node {number} among {count}"
            problems.append(Problem("--node-rank", fact, "number the nodes from 0"))
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            fix = "write the address of node 0 and a free port of it, as 10.0.0.1:29400"
            problems.append(Problem("--head", f"{head!r} is not HOST:PORT", fix))
        if interface is not None and interface not in {name for name, _ in interfaces()}:
            known = ", ".join(sorted({name for name, _ in interfaces()}))
            fact = f"there is no interface {interface!r} with an address"
            problems.append(Problem("--interface", fact, f"this node has {known}"))
        if problems:
            raise JobError(problems)
        address = address_of(host)
        if address == LOOPBACK and count > 1:
            fact = f"{host} is this node itself" if number else f"no other node reaches {host}"
            raise JobError(Problem("--head", fact, "name node 0 by an address that others reach"))
        own = address if number == 0 else own_address(address)
        return Node(count, number, address, int(port), interface or interface_of(own))
