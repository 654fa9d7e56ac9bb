"""The TCP sockets of this process and of its libraries, found in Linux's /proc: listed, timed and shut down."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

__all__ = ["end_connections", "end_waits_after", "listening", "shut_down"]


def _sockets() -> Iterator[socket.socket]:
    """Return copies of this process's TCP sockets."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        yield one


def end_waits_after(deadline: float, port: int) -> None:
    """Make connections to a port fail after the network was silent for the deadline; torch's store would wait on."""
    pause = max(1, int(deadline / 4))
    for one in _sockets():
        with contextlib.suppress(OSError):
            if not _is_listening(one) and one.getpeername()[1] == port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * deadline))


def end_connections(port: int) -> None:
    """End this process's connections to a port, and the waits for them; nothing where there is no /proc."""
    with contextlib.suppress(OSError):
        for one in _sockets():
            with contextlib.suppress(OSError):
                if not _is_listening(one) and one.getpeername()[1] == port:
                    one.shutdown(socket.SHUT_RDWR)


def _is_listening(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listening() -> set[tuple[str, int]]:
    """Return the addresses at which this process listens."""
    return {one.getsockname()[:2] for one in _sockets() if _is_listening(one)}


def shut_down(mine: tuple[str, int], theirs: set[tuple[str, int]]) -> None:
    """Shut down Gloo's connections: those to its own address, and those to the addresses of other ranks.

    Its `abort` does not: while a thread waits for a stalled rank, the connections to all others stay open.
    """
    for one in _sockets():
        with contextlib.suppress(OSError):
            if not _is_listening(one) and (one.getsockname()[:2] == mine or one.getpeername()[:2] in theirs):
                one.shutdown(socket.SHUT_RDWR)
