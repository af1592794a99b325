"""Which of this machine's interfaces leads to another machine, and who may connect to us there."""

from __future__ import annotations

import socket
import struct
import sys

from shardtune.errors import LaunchRefused, Problem

LOOPBACK = "127.0.0.1"
_ALL_INTERFACES = 0x8912  # SIOCGIFCONF
_ENTRY = 40  # bytes of an interface's name and address, on 64-bit Linux


def address_of(host: str, place: str = "--head") -> str:
    """The IPv4 address of a host."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        fact = f"{host!r} has no address here: {error}"
        raise LaunchRefused(Problem(place, fact, "name a host that every node can reach")) from None


def own_address(towards: str) -> str:
    """The address that this machine has on the way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing: the kernel only looks up the way
        except OSError as error:
            fact = f"there is no way to {towards}: {error.strerror}"
            fix = "fix the network of this node, or name another head"
            raise LaunchRefused(Problem("--head", fact, fix)) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The interface that has an address; empty where it can't be found out."""
    return next((name for name, has in interfaces() if has == address), "")


def interfaces() -> list[tuple[str, str]]:
    """Every IPv4 address of this machine with its interface; none where the kernel can't tell."""
    if not sys.platform.startswith("linux"):
        return [("lo0", LOOPBACK)]
    import array
    import fcntl

    room = array.array("B", bytes(256 * _ENTRY))
    where, length = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("iL", length, where)
        filled: int = struct.unpack("iL", fcntl.ioctl(probe, _ALL_INTERFACES, asked))[0]
    text = room.tobytes()[:filled]
    entries = [text[start : start + _ENTRY] for start in range(0, filled, _ENTRY)]
    # A further address of eth0 is listed as eth0:1.
    return [
        (entry[:16].partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(entry[20:24]))
        for entry in entries
    ]


def socket_environment(interface: str) -> dict[str, str]:
    """What makes gloo and NCCL listen and connect on one interface only."""
    if not interface:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def free_port(address: str = LOOPBACK) -> int:
    """A port that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def listen(address: str, port: int, place: str = "--head") -> socket.socket:
    """A socket bound to one address of this machine; port 0 lets the kernel choose."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        fact = f"{address}:{port} can't be listened on: {error.strerror}"
        fix = "name an address of node 0 and a free port of it"
        raise LaunchRefused(Problem(place, fact, fix)) from None
    return listener
