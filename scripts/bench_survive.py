"""Goodput of training whose ranks are killed at random, and a count of hangs and divergences over many kills.

    python scripts/bench_survive.py goodput --results runs.jsonl --seconds 600 --every 0 15 60
    python scripts/bench_survive.py goodput --results runs.jsonl --kinds torchrun --save-every 1 5 20 --every 15
    python scripts/bench_survive.py table --results runs.jsonl
    python scripts/bench_survive.py kills --kills 900 --results kills.jsonl
    python scripts/bench_survive.py slow --results slow.jsonl

`goodput` trains with four ranks under real launchers (`survive/launchers.py`): `dgcopt run --survive`, torchrun with
restarts from checkpoints, Horovod Elastic, and torchft where it is installed. Ranks are killed by SIGKILL at the same
moments for all. A killed rank's replacement starts 5 s later. In each step a rank sleeps for `--compute` seconds, as a
host does while an accelerator works; everything else is real. A kill is left out if fewer than two ranks train, as one
that hits a job which restarts anyway, or one after which no state would be left. Each run is one line of `--results`.

`kills` compares all weights after every step. Its ranks are forked from a process that has imported torch, as are those
of `slow`: DiLoCo in which one of four ranks is slower, with rounds of all ranks and of a quorum. Its goodput is local
steps, all of which count in some round, over those of ranks that never wait.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from survive.launchers import LAUNCHERS, RANKS
from survive.rank import WIDTH, compressed, made

import dgcopt
from dgcopt import survive
from dgcopt.launcher.agent import Agent, Plan, Process

DEADLINE = 20.0
PAUSE = 1.0
"""Seconds between two steps from which on a run counts as interrupted."""
MARGIN = 200
"""Steps from the decision to end to the last one, which no rank may have passed yet."""


def train(folder: Path) -> None:
    """Train on one rank; write time, step and digest of the weights after each step."""
    comm = dgcopt.init(survive=True, deadline=DEADLINE)
    model, bare = made()
    optimizer = compressed(model, bare)
    state = survive.State(model=model, optimizer=optimizer, step=0)
    state.sync()
    with open(folder / f"{os.getpid()}.log", "w") as file:
        draw = torch.Generator().manual_seed(os.getpid())
        while not (folder / "end").exists() or state.step < int((folder / "end").read_text()):
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH, generator=draw)).square().mean().backward()
            time.sleep(0.005)
            optimizer.step()
            weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
            line = {
                "time": time.time(),
                "step": state.step,
                "size": comm.size,
                "weights": hashlib.md5(weights).hexdigest(),
            }
            print(json.dumps(line), file=file, flush=True)
            state.step += 1


# -- killing ---------------------------------------------------------------------------------------------------------


def told(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each process so far."""
    found = {}
    for path in folder.glob("*.log"):
        lines = [line for line in path.read_text().split("\n")[:-1] if line]
        found[path.stem] = [json.loads(line) for line in lines]
    return found


def living(folder: Path) -> list[int]:
    """Return the ids of processes that have made a step."""
    return [int(name) for name, lines in told(folder).items() if "step" in (lines or [{}])[-1] and _runs(int(name))]


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

    def __init__(self, folder: Path, env: Mapping[str, str], act: Callable[[Path], None]) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["bench_survive", "dgcopt.comm.surviving", "torch._dynamo"])
        self.process = context.Process(target=live, args=(str(folder), dict(env), act))
        self.process.start()
        self.terminate, self.kill = self.process.terminate, self.process.kill

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.process.exitcode


def live(folder: str, env: dict[str, str], act: Callable[[Path], None]) -> None:
    """Train in a forked process."""
    os.environ.update(env)
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    act(Path(folder))


class ForkingAgent(Agent):
    """An agent whose ranks are forked from a process that has imported torch."""

    def __init__(self, folder: Path, act: Callable[[Path], None] = train) -> None:
        super().__init__(Plan([], RANKS))
        self.folder, self.act = folder, act

    def spawn(self, env: Mapping[str, str]) -> Process:
        return Forked(self.folder, env, self.act)


def end(folder: Path, margin: int = MARGIN) -> None:
    """Let all ranks end after the same step."""
    last = max(line["step"] for lines in told(folder).values() for line in lines) + margin
    (folder / "new").write_text(str(last))
    (folder / "new").rename(folder / "end")


# -- goodput ---------------------------------------------------------------------------------------------------------


def goodput(arguments: argparse.Namespace, kind: str, every: float, save_every: int) -> dict[str, Any]:
    """Return the steps per second that count, of one run in which ranks are killed at random."""
    rng = random.Random(int(every))
    kills, left_out, loads = 0, 0, []
    with tempfile.TemporaryDirectory(prefix="dgcopt-bench-") as name:
        folder = Path(name)
        python = {"python": arguments.torchft_python} if kind == "torchft" else {}
        launcher = LAUNCHERS[kind](folder, arguments.compute, save_every, **python)
        try:
            launcher.start()
            wait_for(folder, RANKS, 180)
            start = time.time()
            due = start + rng.uniform(0.5, 1.5) * every if every else float("inf")
            while (now := time.time()) < start + arguments.seconds:
                launcher.look()
                if now > due:
                    due += rng.uniform(0.5, 1.5) * every
                    place = rng.choice(range(RANKS))
                    pids = living(folder)
                    if len(pids) < 2:
                        left_out += 1
                    else:
                        victim = sorted(pids)[place % len(pids)]
                        launcher.killed(told(folder)[str(victim)][0]["place"])
                        with suppress(ProcessLookupError):
                            os.kill(victim, signal.SIGKILL)
                        kills += 1
                loads.append(os.getloadavg()[0])
                time.sleep(0.05)
            stop = time.time()
        finally:
            launcher.end([int(name) for name in told(folder)])
            if arguments.keep:
                Path(arguments.keep).write_text((folder / "output").read_text())
        lines = told(folder)
    return {
        "kind": kind,
        "every": every,
        "save_every": save_every,
        "compute": arguments.compute,
        "at": time.strftime("%H:%M", time.gmtime(start)),
        "seconds": stop - start,
        "kills": kills,
        "left_out": left_out,
        "load": sum(loads) / len(loads),
        **useful([*lines.values()], start, stop),
    }


def useful(ranks: Sequence[Sequence[dict[str, Any]]], start: float, stop: float) -> dict[str, float]:
    """Return steps and samples between two times, a step that was made twice once, and the longest pauses.

    `importing` is the part of the pauses in which some rank was importing torch.
    """
    steps = [line for lines in ranks for line in lines if "step" in line]
    before = {line["step"] for line in steps if line["time"] <= start}
    within = [line for line in steps if start < line["time"] <= stop]
    counted = {line["step"]: line["size"] for line in within if line["step"] not in before}
    times = [start, *sorted(line["time"] for line in within), stop]
    pauses = [(sooner, later) for sooner, later in pairwise(times) if later - sooner > PAUSE]
    imports = [(lines[0]["started"], lines[1]["ready"] if len(lines) > 1 else stop) for lines in ranks if lines]
    return {
        "steps": len(counted),
        "samples": sum(counted.values()) / RANKS,
        "pauses": sum(later - sooner for sooner, later in pauses),
        "longest": max((later - sooner for sooner, later in pauses), default=0.0),
        "importing": sum(_overlap(pause, imports) for pause in pauses),
    }


def _overlap(pause: tuple[float, float], spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a pause that are in any of the spans."""
    covered, end = 0.0, pause[0]
    for sooner, later in sorted(spans):
        sooner, later = max(sooner, end), min(later, pause[1])
        if later > sooner:
            covered, end = covered + later - sooner, later
    return covered


def compare(arguments: argparse.Namespace) -> None:
    """Run each kind at each rate of kills; append a line each to the results."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that launchers and ranks are ended
    done = set()
    if Path(arguments.results).exists():
        runs = [json.loads(line) for line in Path(arguments.results).read_text().splitlines()]
        done = {(run["kind"], run["every"], run["save_every"]) for run in runs}
    for every in arguments.every:
        for kind in arguments.kinds:
            intervals = {"torchrun": arguments.save_every if every else [0], "horovod": arguments.commit_every}
            for save_every in intervals.get(kind, [0]):
                if (kind, every, save_every) in done:
                    continue
                line = json.dumps(goodput(arguments, kind, every, save_every))
                with open(arguments.results, "a") as file:
                    print(line, file=file)
                print(line, flush=True)


def table(arguments: argparse.Namespace) -> None:
    """Print the results as a table: each run as a share of the undisturbed one of its kind."""
    runs = [json.loads(line) for line in Path(arguments.results).read_text().splitlines()]
    whole = {run["kind"]: run["steps"] / run["seconds"] for run in runs if not run["every"]}
    print("| kind | a kill every | checkpoint every | kills | steps/s | goodput | start of Python counted apart | "
          "samples | longest pause | load |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for run in sorted(runs, key=lambda run: (run["every"], [*LAUNCHERS].index(run["kind"]), run["save_every"])):
        full, seconds = whole[run["kind"]], run["seconds"]
        every = f"{run['every']:g} s" if run["every"] else "-"
        saved = f"{run['save_every']} steps" if run["save_every"] else "-"
        print(
            f"| {run['kind']} | {every} | {saved} | {run['kills']} in {seconds:.0f} s | {run['steps'] / seconds:.2f} "
            f"| {run['steps'] / seconds / full:.0%} | {run['steps'] / (seconds - run['importing']) / full:.0%} "
            f"| {run['samples'] / seconds / full:.0%} | {run['longest']:.1f} s | {run['load']:.1f} |"
        )


# -- a slow rank -----------------------------------------------------------------------------------------------------


def train_apart(folder: Path, every: int, compute: float, slow: float, quorum: int | None) -> None:
    """Train on one rank by DiLoCo, the last rank at a lower speed; write a line per local step."""
    comm: Any = dgcopt.init(survive=True, deadline=DEADLINE)
    model, bare = made()
    averaging = dgcopt.DiLoCo(every, compression=dgcopt.TopK(0.01), quorum=quorum, grace=2.0)
    optimizer: Any = averaging.attach(bare, model.named_parameters())
    seconds, step = compute * (slow if comm.rank == RANKS - 1 else 1.0), 0
    state = survive.State(model=model, optimizer=optimizer)
    state.sync()
    with open(folder / f"{os.getpid()}.log", "w") as file:
        while not (folder / "end").exists() or optimizer.averaging.step < int((folder / "end").read_text()):
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH)).square().mean().backward()
            time.sleep(seconds)
            optimizer.step()
            step += 1
            line = {"time": time.time(), "step": optimizer.averaging.step, "local": step, "rank": comm.rank}
            print(json.dumps(line), file=file, flush=True)


def slow(arguments: argparse.Namespace) -> None:
    """Compare rounds that wait for all ranks with those of a quorum, if one rank is slow; append to the results."""
    for factor, quorum in ((1.0, None), (arguments.slow, None), (arguments.slow, RANKS - 1)):
        with tempfile.TemporaryDirectory(prefix="dgcopt-bench-") as name:
            folder, loads = Path(name), list[float]()
            act = partial(train_apart, every=arguments.every, compute=arguments.compute, slow=factor, quorum=quorum)

            def watch(folder: Path = folder, loads: list[float] = loads) -> None:
                wait_for(folder, RANKS, 120)
                for _ in range(int(arguments.seconds)):
                    loads.append(os.getloadavg()[0])
                    time.sleep(1.0)
                end(folder, arguments.every * 2)

            watcher = threading.Thread(target=watch, daemon=True)
            watcher.start()
            ForkingAgent(folder, act).run()
            watcher.join()
            ranks = [*told(folder).values()]
        start = max(lines[0]["time"] for lines in ranks)
        stop = min(lines[-1]["time"] for lines in ranks)
        made_here = {lines[0]["rank"]: sum(start < line["time"] <= stop for line in lines) for lines in ranks}
        most = sum((stop - start) / (arguments.compute * (factor if rank == RANKS - 1 else 1)) for rank in made_here)
        line = {
            "slow": factor,
            "quorum": quorum,
            "every": arguments.every,
            "compute": arguments.compute,
            "seconds": stop - start,
            "local_steps": made_here,
            "goodput": sum(made_here.values()) / most,
            "load": sum(loads) / len(loads),
        }
        with open(arguments.results, "a") as file:
            print(json.dumps(line), file=file)
        print(line, flush=True)


# -- many kills ------------------------------------------------------------------------------------------------------


def count(arguments: argparse.Namespace) -> None:
    """Kill ranks one after another, in batches; append each batch's hangs and divergences to the results."""
    done = []
    if Path(arguments.results).exists():
        done = [json.loads(line) for line in Path(arguments.results).read_text().splitlines()]
    batch = len(done)
    left = arguments.kills - sum(one["kills"] for one in done)
    while left > 0:
        one = kill_many(arguments, min(arguments.batch, left), f"{arguments.seed} {batch}")
        with open(arguments.results, "a") as file:
            print(json.dumps(one), file=file)
        print(one, flush=True)
        batch, left = batch + 1, left - max(one["kills"], 1)


def kill_many(arguments: argparse.Namespace, kills: int, seed: str) -> dict[str, Any]:
    """Kill ranks of one job; return how often the others hung or diverged."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="dgcopt-bench-") as name:
        folder = Path(name)
        hangs = killed = 0

        def kill() -> None:
            nonlocal hangs, killed
            try:
                while killed < kills:
                    wait_for(folder, arguments.at_least, 120)
                    time.sleep(rng.uniform(0.0, arguments.pause))
                    while not kill_one(rng, folder):
                        time.sleep(0.01)
                    killed += 1
                wait_for(folder, RANKS, 120)
            except TimeoutError as error:
                hangs += 1
                print(error, flush=True)
            end(folder)

        begin = time.monotonic()
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        ForkingAgent(folder).run()
        killer.join()
        seconds = time.monotonic() - begin
        lines = told(folder)
        if arguments.keep:
            Path(arguments.keep).write_text((folder / "output").read_text())
    by_step: dict[int, list[dict[str, Any]]] = {}
    for one in lines.values():
        for line in one:
            by_step.setdefault(line["step"], []).append(line)
    times = sorted(min(line["time"] for line in some) for some in by_step.values())
    pauses = sorted(later - sooner for sooner, later in pairwise(times))[-killed or None :]
    return {
        "seed": seed,
        "kills": killed,
        "hangs": hangs,
        "divergences": sum(len({line["weights"] for line in some}) > 1 for some in by_step.values()),
        "steps": len(by_step),
        "steps_untold": max(by_step) + 1 - len(by_step),
        "median_pause": pauses[len(pauses) // 2],
        "longest_pause": pauses[-1],
        "seconds": seconds,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("goodput")
    one.set_defaults(act=compare)
    one.add_argument("--results", required=True, help="file of JSON lines; runs that it has are not made again")
    one.add_argument("--kinds", nargs="+", default=["survive", "torchrun", "horovod"], choices=[*LAUNCHERS])
    one.add_argument("--seconds", type=float, default=120.0, help="length of each run")
    one.add_argument(
        "--every", type=float, nargs="+", default=[0.0, 15.0], help="seconds between two kills, on average; 0: none"
    )
    one.add_argument("--compute", type=float, default=0.2, help="seconds of each step's computing")
    one.add_argument("--save-every", type=int, nargs="+", default=[5], help="steps between checkpoints, for torchrun")
    one.add_argument("--commit-every", type=int, nargs="+", default=[10], help="steps between commits, for Horovod")
    one.add_argument("--torchft-python", default="python", help="an interpreter that has torchft")
    one.add_argument("--keep", help="where the ranks' output goes")
    one = commands.add_parser("table")
    one.set_defaults(act=table)
    one.add_argument("--results", required=True)
    one = commands.add_parser("slow")
    one.set_defaults(act=slow)
    one.add_argument("--results", required=True, help="file of JSON lines to append to")
    one.add_argument("--seconds", type=float, default=60.0, help="length of each of three runs")
    one.add_argument("--every", type=int, default=32, help="local steps between outer steps")
    one.add_argument("--compute", type=float, default=0.1, help="seconds of a local step of the other ranks")
    one.add_argument("--slow", type=float, default=3.0, help="of the last rank, in times of the others")
    one = commands.add_parser("kills")
    one.set_defaults(act=count)
    one.add_argument("--results", required=True, help="file of JSON lines; batches that it has are not made again")
    one.add_argument("--kills", type=int, default=300)
    one.add_argument("--batch", type=int, default=300, help="kills of one job")
    one.add_argument("--pause", type=float, default=0.3, help="longest seconds from a rank's return to the next kill")
    one.add_argument("--at-least", type=int, default=RANKS, help="ranks that train before the next kill")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--keep", help="where the ranks' output goes")
    arguments = parser.parse_args()
    arguments.act(arguments)


if __name__ == "__main__":
    main()
