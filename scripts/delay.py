"""Links with latency: what enters one end leaves the other so many milliseconds later.

    python scripts/delay.py 2.5 switch/port0--host0/eth0 switch/port1--host1/eth0

makes a pair of TAP devices for each argument, in network namespaces that exist, and carries frames between them until
it is ended. It prints a line once they are there. scripts/links.py starts it where netem, which kernels may lack, would
have done; rates are limited at the devices, as on any other. Needs root.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

# of <linux/if_tun.h> and <sched.h>
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000
LONGEST = 70_000  # bytes of a frame: segments come as the sender's TCP has made them, with a header that says so


def tap(where: str) -> int:
    """A new TAP device "namespace/name", as a file."""
    namespace, name = where.split("/")
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22s", name.encode(), flags, b""))
    fcntl.ioctl(device, TUNSETVNETHDRSZ, struct.pack("i", 10))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def carry(pairs: list[tuple[int, int]], seconds: float) -> None:
    """Hand each frame to the other end of its pair once it has been on its way for so long; never returns."""
    other = {end: far for pair in pairs for end, far in (pair, pair[::-1])}
    on_their_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait = max(0.0, on_their_way[0][0] - time.monotonic()) if on_their_way else None
        readable, _, _ = select.select(list(other), [], [], wait)
        now = time.monotonic()
        for end in readable:
            with contextlib.suppress(BlockingIOError):
                while True:
                    on_their_way.append((now + seconds, other[end], os.read(end, LONGEST)))
        while on_their_way and on_their_way[0][0] <= now:
            _, end, frame = on_their_way.popleft()
            with contextlib.suppress(OSError):  # a device that is down, or whose queue is full, loses it
                os.write(end, frame)


if __name__ == "__main__":
    ends = [(tap(near), tap(far)) for near, far in (link.split("--") for link in sys.argv[2:])]
    print("ready", flush=True)
    carry(ends, float(sys.argv[1]) / 1e3)
