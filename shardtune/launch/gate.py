"""The gate: who joins a run over the network proves first that it knows the run's secret (HMAC).

torch's TCPStore asks nobody who they are: whoever reaches it can list, change and delete keys. So
it listens on a port of its own, behind a packet filter that lets only addresses of the run in; the
kernel drops everything else, so a stranger gets no connection and costs no descriptor. The port
that people are told is the gate's. Both ends prove there that they know the secret, which itself is
never sent; then the address of whoever came is let in, and it is told the store's port.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import secrets
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardtune.core.host.network import listen, own_address
from shardtune.launch import SECRET

PROOF_TIMEOUT = 5.0  # seconds in which whoever connects has to have answered
MOST_GUESTS = 128  # connections at the gate at once; more are closed unheard
_NONCE = 32  # bytes
_MAC = 32
_PORT = struct.Struct("!H")
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER


class Gate:
    """A TCPStore behind its gate, until it is closed."""

    def __init__(self, address: str, port: int, place: str, timeout: timedelta) -> None:
        self._secret = run_secret()
        self._let_in: list[str] = []
        self._closed = False
        door = listen(address, 0, place)
        self._door = door.dup()  # the same socket: what is set here holds for the store's
        self._lock = threading.Lock()
        for own in (address, own_address(address)):  # on loopback these differ
            self._admit(own)
        self.store_port = int(door.getsockname()[1])
        self.store = TCPStore(
            address, self.store_port, is_master=True, wait_for_workers=False, timeout=timeout,
            master_listen_fd=door.detach(),
        )  # fmt: skip
        self._guests = threading.Semaphore(MOST_GUESTS)
        self._listener = listen(address, port, place)
        self._listener.listen(MOST_GUESTS)
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Lets nobody else in. The store itself ends with this object."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for guests
        self._listener.close()
        self._door.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                guest, (address, _) = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # closed; or out of descriptors, which may pass
                continue
            if not self._guests.acquire(blocking=False):
                guest.close()
                continue
            threading.Thread(target=self._hear, args=(guest, address), daemon=True).start()

    def _hear(self, guest: socket.socket, address: str) -> None:
        try:
            with guest, suppress(OSError):
                deadline = time.monotonic() + PROOF_TIMEOUT
                ours = secrets.token_bytes(_NONCE)
                guest.settimeout(PROOF_TIMEOUT)
                guest.sendall(ours)
                answer = _receive(guest, _NONCE + _MAC, deadline)
                theirs, proof = answer[:_NONCE], answer[_NONCE:]
                if not hmac.compare_digest(proof, _mac(self._secret, b"guest", ours, theirs)):
                    return
                self._admit(address)
                port = _PORT.pack(self.store_port)
                guest.sendall(port + _mac(self._secret, b"gate", ours, theirs, port))
        finally:
            self._guests.release()

    def _admit(self, address: str) -> None:
        with self._lock:
            if address not in self._let_in and not self._closed:
                self._let_in.append(address)
                _let_in_only(self._door, self._let_in)


def knock(address: str, port: int, timeout: float = PROOF_TIMEOUT) -> int:
    """The port of the store behind the gate at `port`; OSError if nobody is there, PermissionError
    if the two don't share a secret."""
    secret, deadline = run_secret(), time.monotonic() + timeout
    with socket.create_connection((address, port), timeout=timeout) as gate:
        theirs = _receive(gate, _NONCE, deadline)
        ours = secrets.token_bytes(_NONCE)
        gate.sendall(ours + _mac(secret, b"guest", theirs, ours))
        refusal = f"who answers there has another {SECRET} than this process"
        try:
            answer = _receive(gate, _PORT.size + _MAC, deadline)
        except ConnectionError:
            raise PermissionError(refusal) from None
        told, proof = answer[: _PORT.size], answer[_PORT.size :]
        if not hmac.compare_digest(proof, _mac(secret, b"gate", theirs, ours, told)):
            raise PermissionError(refusal)
        return int(_PORT.unpack(told)[0])


def run_secret() -> bytes:
    """The secret of this process's run; empty where nobody has set one."""
    return os.environ.get(SECRET, "").encode()


def new_secret() -> str:
    return secrets.token_hex(32)


def _mac(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"|".join(parts), "sha256")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes. A peer that sends one at a time has no more time than others."""
    found = b""
    while len(found) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(count - len(found))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        found += piece
    return found


def _let_in_only(listener: socket.socket, addresses: list[str]) -> None:
    """Makes the kernel drop every packet for a listening socket that comes from elsewhere: a
    program of its classic packet filter, which needs no privilege."""
    if not sys.platform.startswith("linux"):
        return
    load, equal, leave = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ, BPF_RET
    source = (1 << 32) - 0x100000 + 12  # SKF_NET_OFF: the source of the IPv4 header
    lines = [(load, 0, 0, source)]
    for address in addresses:
        lines += [(equal, 0, 1, struct.unpack("!I", socket.inet_aton(address))[0])]
        lines += [(leave, 0, 0, 0xFFFFFFFF)]
    lines += [(leave, 0, 0, 0)]
    text = b"".join(struct.pack("HBBI", *line) for line in lines)
    memory = ctypes.create_string_buffer(text, len(text))
    program = struct.pack("HL", len(lines), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
