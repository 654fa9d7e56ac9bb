"""Goodput of training whose ranks are killed at random, and a count of hangs and divergences over many kills.

    python scripts/bench_survive.py goodput --seconds 120 --every 30 15
    python scripts/bench_survive.py kills --kills 300

`goodput` trains with four ranks that survive each other's deaths, and with four that all start anew from the newest
checkpoint, as torchrun's do. One rank at a time is killed. Its replacement starts 5 s later: until then survivors train
without it, and the others wait. In each step a rank sleeps for `--compute` seconds, as a host does while an accelerator
works; everything else is real.

Ranks are forked from a process that has imported torch, so that the start of Python, for which restarts of all ranks
wait each time, is not in these numbers. `kills` compares all weights after every step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dgcopt
from dgcopt import survive
from dgcopt.agent import Agent, Plan, Process

RANKS = 4
BACK_AFTER = 5.0
WIDTH = 64
DEADLINE = 20.0
MARGIN = 200
"""Steps from the decision to end to the last one, which no rank may have passed yet."""


def made(width: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    bare = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, dgcopt.DistributedOptimizer(bare, model.named_parameters(), dgcopt.DGC(0.01))


def train(folder: Path, kind: str, compute: float, save_every: int, digests: bool) -> None:
    """One rank's life: a line of time, step, ranks and digest for each step."""
    comm = dgcopt.init(survive=kind == "survive", deadline=DEADLINE)
    model, optimizer = made(WIDTH)
    state = survive.State(model=model, optimizer=optimizer, step=0)
    if kind == "survive":
        state.sync()
    elif save_every and (found := dgcopt.checkpoint.load(folder / "checkpoints")) is not None:
        state.step, saved = found
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    name = f"{os.getpid()}"
    with open(folder / f"{name}.log", "w") as file:
        draw = torch.Generator().manual_seed(os.getpid())
        while not (folder / "end").exists() or state.step < int((folder / "end").read_text()):
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH, generator=draw)).square().mean().backward()
            time.sleep(compute)
            optimizer.step()
            weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters()) if digests else b""
            told = {
                "time": time.time(),
                "step": state.step,
                "size": comm.size,
                "weights": hashlib.md5(weights).hexdigest(),
            }
            print(json.dumps(told), file=file, flush=True)
            state.step += 1
            if save_every and state.step % save_every == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                dgcopt.checkpoint.save(folder / "checkpoints", saved, state.step)


# -- killing ---------------------------------------------------------------------------------------------------------


def told(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of each process so far."""
    found = {}
    for path in folder.glob("*.log"):
        lines = [line for line in path.read_text().split("\n")[:-1] if line]
        found[path.stem] = [json.loads(line) for line in lines]
    return found


def living(folder: Path) -> list[int]:
    """Ids of processes that have made a step."""
    return [int(name) for name, lines in told(folder).items() if lines and _runs(int(name))]


def kill_one(rng: random.Random, folder: Path) -> bool:
    """Kill any rank; return False if there is none, or it has ended meanwhile."""
    pids = living(folder)
    with suppress(ProcessLookupError):
        if pids:
            os.kill(rng.choice(pids), signal.SIGKILL)
            return True
    return False


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_for(folder: Path, ranks: int, limit: float) -> None:
    """Wait until as many ranks train. Raises TimeoutError."""
    end = time.monotonic() + limit
    while len(living(folder)) < ranks:
        if time.monotonic() > end:
            raise TimeoutError(f"{ranks} ranks do not train after {limit:g} s")
        time.sleep(0.1)


# -- ranks -----------------------------------------------------------------------------------------------------------


class Forked:
    """A rank as the agent sees a process."""

    def __init__(self, folder: Path, env: Mapping[str, str], settings: tuple[Any, ...]) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["bench_survive", "dgcopt.comm.surviving", "torch._dynamo"])
        self.process = context.Process(target=live, args=(str(folder), dict(env), settings))
        self.process.start()
        self.terminate, self.kill = self.process.terminate, self.process.kill

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.process.exitcode


def live(folder: str, env: dict[str, str], settings: tuple[Any, ...]) -> None:
    """Train in a forked process."""
    os.environ.update(env)
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    train(Path(folder), *settings)


class ForkingAgent(Agent):
    """An agent whose ranks are forked from a process that has imported torch."""

    def __init__(self, folder: Path, settings: tuple[Any, ...], restart_after: float = 0.0) -> None:
        super().__init__(Plan([], RANKS, restart_after=restart_after))
        self.folder, self.settings = folder, settings

    def spawn(self, env: Mapping[str, str]) -> Process:
        return Forked(self.folder, env, self.settings)


def restart_all(folder: Path, settings: tuple[Any, ...]) -> None:
    """Start all ranks, and all of them anew when one dies, until the end."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(RANKS)}
        ranks = [Forked(folder, {**env, "RANK": str(n), "LOCAL_RANK": str(n)}, settings) for n in range(RANKS)]
        while all(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
        is_over = (folder / "end").exists() and all(rank.wait(DEADLINE) == 0 for rank in ranks)
        for rank in ranks:
            rank.kill()
            rank.wait()
        if is_over:
            return
        time.sleep(BACK_AFTER)


def end(folder: Path) -> None:
    """Let all ranks end after the same step."""
    last = max(line["step"] for lines in told(folder).values() for line in lines) + MARGIN
    (folder / "new").write_text(str(last))
    (folder / "new").rename(folder / "end")


# -- goodput ---------------------------------------------------------------------------------------------------------


def goodput(arguments: argparse.Namespace, kind: str, every: float, save_every: int) -> dict[str, Any]:
    """Steps per second that count, of one run in which a rank is killed at random."""
    rng = random.Random(int(every))
    settings = (kind, arguments.compute, save_every, False)
    window = [0.0, 0.0]
    kills = 0

    def kill(folder: Path) -> None:
        nonlocal kills
        wait_for(folder, RANKS, 180)
        window[0] = time.time()
        due = window[0] + rng.uniform(0.5, 1.5) * every if every else float("inf")
        while time.time() < window[0] + arguments.seconds:
            if time.time() > due and kill_one(rng, folder):
                kills += 1
                due += rng.uniform(0.5, 1.5) * every
            time.sleep(0.05)
        window[1] = time.time()
        wait_for(folder, RANKS, 60)
        end(folder)

    with tempfile.TemporaryDirectory(prefix="dgcopt-bench-") as name:
        folder = Path(name)
        killer = threading.Thread(target=kill, args=(folder,), daemon=True)
        killer.start()
        if kind == "survive":
            ForkingAgent(folder, settings, BACK_AFTER).run()
        else:
            restart_all(folder, settings)
        killer.join()
        lines = told(folder)
    steps = {
        line["step"]: line["size"] for one in lines.values() for line in one if window[0] < line["time"] <= window[1]
    }
    seconds = window[1] - window[0]
    return {
        "kills": kills,
        "seconds": seconds,
        "steps": len(steps) / seconds,
        "samples": sum(steps.values()) / RANKS / seconds,
    }


def compare(arguments: argparse.Namespace) -> None:
    """Print a table: each kind at each rate of kills, as a share of ranks that neither survive nor are disturbed."""
    runs = [("restart", 0.0, 0), ("survive", 0.0, 0)]
    for every in arguments.every:
        runs += [("survive", every, 0), *(("restart", every, saves) for saves in arguments.save_every)]
    print("| after a death | a kill every | checkpoint every | kills | steps/s | goodput, steps | goodput, samples |")
    print("|---|---|---|---|---|---|---|", flush=True)
    whole = 0.0
    for kind, every, save_every in runs:
        run = goodput(arguments, kind, every, save_every)
        whole = whole or run["steps"]
        named = "the others train on" if kind == "survive" else "all ranks start anew"
        saved = f"{save_every} steps" if save_every else "-"
        killed = f"{every:g} s" if every else "-"
        print(
            f"| {named} | {killed} | {saved} | {run['kills']} in {run['seconds']:.0f} s | {run['steps']:.2f} "
            f"| {run['steps'] / whole:.0%} | {run['samples'] / whole:.0%} |",
            flush=True,
        )


# -- many kills ------------------------------------------------------------------------------------------------------


def count(arguments: argparse.Namespace) -> None:
    """Kill ranks one after another, and say how often the others hung or diverged."""
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="dgcopt-bench-") as name:
        folder = Path(name)
        hangs = killed = 0

        def kill() -> None:
            nonlocal hangs, killed
            begin = time.monotonic()
            try:
                while killed < arguments.kills:
                    wait_for(folder, arguments.at_least, 120)
                    time.sleep(rng.uniform(0.0, arguments.pause))
                    while not kill_one(rng, folder):
                        time.sleep(0.01)
                    killed += 1
                    if killed % 50 == 0:
                        print(f"{killed} kills in {time.monotonic() - begin:.0f} s", flush=True)
                wait_for(folder, RANKS, 120)
            except TimeoutError as error:
                hangs += 1
                print(error, flush=True)
            end(folder)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        ForkingAgent(folder, ("survive", 0.005, 0, True)).run()
        killer.join()
        lines = told(folder)
        if arguments.keep:
            Path(arguments.keep).write_text((folder / "output").read_text())
    by_step: dict[int, list[dict[str, Any]]] = {}
    for one in lines.values():
        for line in one:
            by_step.setdefault(line["step"], []).append(line)
    diverged = sum(len({line["weights"] for line in some}) > 1 for some in by_step.values())
    times = sorted(min(line["time"] for line in some) for some in by_step.values())
    pauses = sorted(later - sooner for sooner, later in pairwise(times))[-killed or None :]
    told_ = f"{pauses[len(pauses) // 2]:.2f} s, longest {pauses[-1]:.2f} s" if pauses else "-"
    missing = max(by_step) + 1 - len(by_step)
    print(
        f"{killed} kills: {hangs} hangs, {diverged} divergences in {len(by_step)} steps, {missing} steps that "
        f"no rank has told; the {len(pauses)} longest pauses between steps: median {told_}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("goodput")
    one.add_argument("--seconds", type=float, default=120.0, help="length of each run")
    one.add_argument(
        "--every", type=float, nargs="+", default=[30.0, 15.0], help="seconds between two kills, on average"
    )
    one.add_argument("--compute", type=float, default=0.2, help="seconds of each step's computing")
    one.add_argument(
        "--save-every",
        type=int,
        nargs="+",
        default=[5, 20],
        help="steps between checkpoints, where all ranks start anew",
    )
    one = commands.add_parser("kills")
    one.add_argument("--kills", type=int, default=300)
    one.add_argument("--pause", type=float, default=0.3, help="longest seconds from a rank's return to the next kill")
    one.add_argument("--at-least", type=int, default=RANKS, help="ranks that train before the next kill")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--keep", help="where the ranks' output goes")
    arguments = parser.parse_args()
    compare(arguments) if arguments.command == "goodput" else count(arguments)


if __name__ == "__main__":
    main()
