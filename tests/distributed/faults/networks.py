"""Two ranks in network namespaces of their own: links that fail for a while or for good, or are slow."""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.distributed.faults import forked
from tests.distributed.faults.actors import subject_name
from tests.distributed.faults.processes import judge, training
from tests.distributed.faults.rules import Seen
from tests.support.library import SETTINGS

KIND = "network"
COUNT, QUICK = 60, 2
CUTS = ("both ways, briefly", "one way, briefly", "both ways", "one way", "slow")
DEADLINE, BRIEF, SLACK = 3.0, 0.7, 150.0
INTERFACE, ADDRESSES = "fault0", ("10.253.77.1", "10.253.77.2")
NOWHERE = "02:00:00:00:fa:17"
"""A hardware address that nobody has: packets to it are lost on the way, and the sender is not told."""


@functools.cache
def missing() -> str:
    """Why no namespaces can be made on this machine; empty if they can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip or tc is not installed"
    if os.geteuid() != 0:
        return "namespaces need root"
    name = f"dgcopt-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made.returncode == 0 else f"no namespaces here: {made.stderr.strip()}"


def plan(seed: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        rng = random.Random(f"{seed} {KIND} {number}")
        yield {
            "cut": CUTS[number % len(CUTS)],
            "subject": rng.randrange(len(SETTINGS)),
            "rank": rng.randrange(2),
            "place": rng.random(),
        }


def label(fault: dict[str, Any]) -> str:
    return "a link that fails, both ways or one, or is slow"


def unavailable(fault: dict[str, Any]) -> str:
    return missing()


def describe(fault: dict[str, Any]) -> str:
    return f"{fault['cut']} from rank {fault['rank']} with {subject_name(fault['subject'])}"


def inject(fault: dict[str, Any]) -> Seen:
    limit = DEADLINE + SLACK
    with linked() as namespaces:
        body = training(fault, lambda: cut(fault), DEADLINE)
        reports = forked.run(2, body, limit, namespaces=namespaces, address=ADDRESSES[0], interface=INTERFACE)
    return judge(fault, reports, limit, "briefly" in fault["cut"], "")


def cut(fault: dict[str, Any]) -> None:
    """Damage the link from within the namespace of a rank; undone by a process of its own where it is brief."""
    how, other = fault["cut"], ADDRESSES[1 - fault["rank"]]
    if how == "slow":
        commands = [f"tc qdisc add dev {INTERFACE} root tbf rate 64kbit burst 2kb latency 200ms"]
    elif how.startswith("both"):
        commands = [f"ip link set {INTERFACE} down", f"ip link set {INTERFACE} up"]
    else:
        neighbour = f"ip neigh replace {other} dev {INTERFACE} lladdr"
        commands = [
            f"{neighbour} {NOWHERE} nud permanent",
            f"ip neigh del {other} dev {INTERFACE}",
        ]
    subprocess.run(["sh", "-c", commands[0]], check=True)
    if "briefly" in how:
        apart = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(["sh", "-c", f"sleep {BRIEF}; {commands[1]}"], start_new_session=True, **apart)


@contextmanager
def linked() -> Iterator[list[str]]:
    """Two namespaces, with a link between them."""
    names = [f"dgcopt-{os.getpid()}-{rank}" for rank in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
