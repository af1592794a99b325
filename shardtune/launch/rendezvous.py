"""Rendezvous: how ranks find each other, whoever started them.

RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all that is needed. Our launcher
gives the ranks of one machine a private file instead. Where no launcher keeps a store (Slurm, Ray),
rank 0 does, on the address that the others were told and on no other. Ranks come here when their
data is ready, which on another node may be hours later, so this is the one place where they wait
for each other without a limit.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from shardtune.core.host.network import (
    LOOPBACK,
    address_of,
    interface_of,
    interfaces,
    own_address,
    socket_environment,
)
from shardtune.launch import STORE_FILE
from shardtune.launch.gate import Gate, knock

RENDEZVOUS_TIMEOUT = timedelta(days=7)
"""Whoever started the ranks ends them all when one of them dies."""


def rendezvous(rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """The store of the ranks, when all have come. Sets over which interface they will talk."""
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size
    address = address_of(os.environ["MASTER_ADDR"], "MASTER_ADDR")
    port = int(os.environ["MASTER_PORT"])
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if alone and not kept:
        address = LOOPBACK
    seen = address
    if not alone and address.startswith("127."):  # how the head calls itself
        seen = _outward()
        address = address if kept else seen  # a store that a launcher keeps is where it says
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        own = LOOPBACK if alone else own_address(seen)
        os.environ.update(socket_environment(interface_of(own)))
    store: Store
    if file := os.environ.get(STORE_FILE):
        store = FileStore(file)
    elif kept:
        store = _find(address, port)
    elif rank == 0:
        store = _host(address, port)
    else:
        store = _find(address, _store_port(address, port))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ours = PrefixStore(f"shardtune/{attempt}", store)
    if ours.add("here", 1) == size:
        ours.set("all here", "yes")
    ours.wait(["all here"], RENDEZVOUS_TIMEOUT)
    store.set_timeout(timeout)
    return ours


_gates: list[Gate] = []
"""Those of this process: they have to last as long as it does."""


def _host(address: str, port: int) -> TCPStore:
    _gates.append(Gate(address, port, "MASTER_PORT", RENDEZVOUS_TIMEOUT))
    return _gates[-1].store


def _store_port(address: str, port: int) -> int:
    """Waits for the gate of rank 0 to open. Whoever is there in its place is waited out."""
    while True:
        with suppress(OSError):
            return knock(address, port)
        time.sleep(0.1)


def _find(address: str, port: int) -> TCPStore:
    """Waits for the store to open; torch's own way of waiting fills the screen."""
    while True:
        try:
            with socket.create_connection((address, port), timeout=5.0):
                break
        except OSError:
            time.sleep(0.1)
    return TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT
    )


def _outward() -> str:
    """An address of this machine that others can reach, where its own name leads to itself."""
    return next((has for _, has in interfaces() if not has.startswith("127.")), LOOPBACK)
