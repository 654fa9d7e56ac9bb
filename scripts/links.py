"""Hosts on one machine, joined by links of a chosen rate: a network namespace per rank and a switch between them.

    with Namespaces(2, delay_ms=2.5) as network:  # 5 ms from one host to another, as there are two links between them
        network.shape("100mbit")
        subprocess.Popen([*network.enter(0), "iperf3", "-s"])

The switch lives in a namespace of its own, so nothing of the machine's network is touched, several runs do not meet,
and deleting the namespaces removes everything. Needs root, and `ip` and `tc` of Debian's iproute2.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

__all__ = ["Loopback", "Machines", "Namespaces", "bits_per_second", "lacking"]

NAMES = Path("/etc/netns")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def lacking() -> str:
    """Why there can be no namespaces here, and what to do about it; empty if there can."""
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} not found: apt-get install iproute2"
    if os.geteuid():
        return "network namespaces need root: start with sudo"
    probe = f"dgcopt-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "exec", probe, "true")
    except RuntimeError as error:  # root in a container need not be allowed to
        return f"root may not make network namespaces here ({error})"
    finally:
        subprocess.run(["ip", "netns", "del", probe], stderr=subprocess.DEVNULL)
    return ""


class Loopback:
    """All ranks on the machine's own loopback interface: nothing to set up, no rates, no counters per rank."""

    interface = "lo"
    can_shape = False

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def enter(self, rank: int) -> list[str]:
        """What to put before a command so that it runs where `rank` lives."""
        return []

    def address(self, rank: int) -> str:
        """The IPv4 address of `rank`."""
        return "127.0.0.1"

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """What torch.distributed and dgcopt have to be told on `rank`, so that all meet at `port` of rank 0."""
        place: dict[str, object] = {"RANK": rank, "WORLD_SIZE": self.size, "DGCOPT_NODE": rank}
        place |= {"MASTER_ADDR": self.address(0), "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": self.interface}
        return {name: str(value) for name, value in place.items()}

    def port(self) -> int:
        """A port on which nobody listens."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def shape(self, rate: str) -> None:
        """Limit every link to `rate` in each direction, as tc writes rates ("100mbit"); "none" lifts the limit."""


class Namespaces(Loopback):
    """A namespace per rank, each with one link to a switch (a bridge), of a latency if that is given."""

    interface = "eth0"
    can_shape = True

    def __init__(self, size: int, delay_ms: float = 0.0) -> None:
        super().__init__(size)
        self._delay_ms, self._relay = delay_ms, None
        self._ports = itertools.count(20000)
        self._switch = f"dgcopt-{os.getpid()}-switch"
        self._hosts = [f"dgcopt-{os.getpid()}-{rank}" for rank in range(size)]

    def __enter__(self) -> Namespaces:
        try:
            for name in (self._switch, *self._hosts):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "addrgenmode", "none", "up")
            self._lay_links()
            for rank, host in enumerate(self._hosts):
                # without IPv6 addresses the counters hold what the ranks say to each other, and nothing else
                ends = ((self._switch, f"port{rank}", ("master", "bridge")), (host, self.interface, ()))
                for name, end, more in ends:
                    _run("ip", "-n", name, "link", "set", end, *more, "addrgenmode", "none", "up")
                _run("ip", "-n", host, "address", "add", f"{self.address(rank)}/24", "dev", self.interface)
                # `ip netns exec` shows this as /etc/hosts: Horovod listens where the machine's own name points to
                (NAMES / host).mkdir(parents=True)
                names = f"127.0.0.1 localhost\n{self.address(rank)} {socket.gethostname()}\n"
                (NAMES / host / "hosts").write_text(names)
        except BaseException:
            self._remove()
            raise
        return self

    def _lay_links(self) -> None:
        """From `interface` of each host to a port of the switch."""
        if not self._delay_ms:
            for rank, host in enumerate(self._hosts):
                pair = ("link", "add", f"port{rank}", "type", "veth", "peer", "name", self.interface, "netns", host)
                _run("ip", "-n", self._switch, *pair)
            return
        links = [f"{self._switch}/port{rank}--{host}/{self.interface}" for rank, host in enumerate(self._hosts)]
        command = [sys.executable, str(Path(__file__).with_name("delay.py")), str(self._delay_ms), *links]
        self._relay = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            raise RuntimeError(f"{' '.join(command)} has ended: see what it says above")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for name in (self._switch, *self._hosts):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(NAMES / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # others may have theirs there
            NAMES.rmdir()

    def enter(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self._hosts[rank]]

    def address(self, rank: int) -> str:
        return f"10.0.0.{rank + 1}"

    def port(self) -> int:
        return next(self._ports)

    def shape(self, rate: str) -> None:
        """As `Loopback.shape`, by a token bucket at both ends of every link.

        The far end counts too: without it a rank would receive from all others at once faster than its link is.
        """
        for rank, host in enumerate(self._hosts):
            for name, end in ((self._switch, f"port{rank}"), (host, self.interface)):
                if rate == "none":
                    with contextlib.suppress(RuntimeError):  # there was no limit
                        _run("tc", "-n", name, "qdisc", "del", "dev", end, "root")
                else:
                    # What a bucket holds is sent at once, whatever the rate: 1 ms of it is little beside a step, and
                    # enough on a busy machine, which refills late.
                    burst = max(15_000, int(bits_per_second(rate) / 8 * 1e-3))
                    bucket = ("tbf", "rate", rate, "burst", str(burst), "latency", "50ms")
                    _run("tc", "-n", name, "qdisc", "replace", "dev", end, "root", *bucket)


class Machines(Namespaces):
    """Several ranks in each namespace: they reach each other by its loopback interface, others by its one link."""

    def __init__(self, machines: int, ranks_each: int, delay_ms: float = 0.0) -> None:
        super().__init__(machines, delay_ms)
        self.size, self._ranks_each = machines * ranks_each, ranks_each

    def enter(self, rank: int) -> list[str]:
        return super().enter(rank // self._ranks_each)

    def environment(self, rank: int, port: int) -> dict[str, str]:
        return super().environment(rank, port) | {"DGCOPT_NODE": str(rank // self._ranks_each)}


def bits_per_second(rate: str) -> float:
    """What tc understands by `rate`; infinite for "none". ValueError if it is no rate."""
    match = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", rate)
    if match is None and rate != "none":
        raise ValueError(f"a rate looks like 100mbit or 2.5gbit, or is none; not {rate!r}")
    return float(match[1]) * UNITS[match[2]] if match else math.inf


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
