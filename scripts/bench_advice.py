"""Predicted against measured: seconds of a step over shaped links, for the exchanges that `dgcopt advise` knows.

    python scripts/bench_advice.py                                   # as root: 2, 4 and 8 ranks, 24 cells, half an hour
    python scripts/bench_advice.py --models resnet50 --ranks 2 --links 1gbit --candidates "BF16()"
    python scripts/bench_advice.py --auto --models mobilenet_v2     # "auto" beside DDP, 12 cells, ten minutes at most

Every rank is a process in a network namespace of its own; the links between them are shaped by tc. The model has the
real shapes and the backward shares of `dgcopt advise`; its forward and backward are sleeps, so that ranks that share
few cores do not slow each other there: a parameter's gradient is ready when the real one would be, and late sleeps are
made up for by the next ones. Everything else runs.

A prediction uses a probe of the link (`dgcopt probe`) and the processor seconds of each exchange, recorded on all ranks
at once without the link; each the minimum over repetitions. No number of a measured step enters it. Ranks share cores
here with each other and with other work, and have their own elsewhere: a measured step leaves out the seconds that a
rank spent runnable without a core (of the rank with the longest such waits), but is no shorter than its bytes take at
the link's rate. Measured is the median over steps. With --wall nothing is left out, and measured is the minimum.

A cell is a model, a number of ranks and a link; a cell's choice is the exchange with the least predicted seconds.
Prints a table of all cells, the median error, and the share of cells whose choice is measured within 5% of the best;
--json writes everything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_step import bf16_hook
from links import Loopback, Namespaces, bits_per_second, lacking
from shaped_ranks import PATIENCE, Ranks, note, serve
from sleeping import Sleeping, waited_for_core
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from dgcopt.tuning.advise import BASELINES, CANDIDATES, Setting
from dgcopt.tuning.costs import Recipe, Recording
from dgcopt.tuning.models import Model, known_models
from dgcopt.tuning.timeline import Round
from dgcopt.tuning.wire import Fitted, fit

LINKS = ("100mbit", "300mbit", "1gbit", "none")
SYSTEMS = (
    *BASELINES,
    *("NoCompression()", "BF16()", "PowerSGD(rank=4, start_step=0)", "DGC(ratio=0.01, warmup=None)"),
    "DGC.compact(warmup=None)",
)
AUTO = "auto"
LONGEST_CHOICE = 300
"""Steps within which `auto` has chosen, though the link seems to change while it tries."""
WARMUP = 3
"""Steps after which DDP and dgcopt have learnt their buckets and memory is allocated."""
NEAR = 1.05
"""A choice is good if it is measured within this factor of the best."""
NEVER_SLOWER = 1.02
"""`auto` must take at most this many times the seconds of the best of DDP's."""

# -- a rank ------------------------------------------------------------------------------------------------------------


def in_ddp(system: str, module: nn.Module) -> DDP:
    """Return the module in DistributedDataParallel, with the gradients of a baseline."""
    ddp = DDP(module, gradient_as_bucket_view=True)
    if system == "DDP bf16":
        ddp.register_comm_hook(None, bf16_hook)
    return ddp


class Rank:
    """One rank: carries out the commands that it reads, and tells their results."""

    def __init__(self, model: Model, seconds: float) -> None:
        import dgcopt

        self.model, self.seconds = model, seconds
        self.comm = dgcopt.init(deadline=PATIENCE.total_seconds())
        self.step: Any = None
        self.optimizer: Any = None
        self.kept: dict[str, Any] = {}

    def probe(self, seconds: float) -> Any:
        """Measure the link."""
        from dgcopt.tuning.probe import probe

        found = probe(self.comm, seconds=seconds, deadline=PATIENCE.total_seconds())
        return [{"kind": kind, "group": group, **asdict(one)} for (kind, group), one in found.fits.items()]

    def record(self, names: Sequence[str]) -> Any:
        """Record the costs of exchanges, on all ranks at the same time."""
        from dgcopt.tuning.advise import recipes_of

        wanted = [name for name in names if name not in BASELINES]
        found = recipes_of(
            *(self.model.shapes, wanted, (self.comm.size,)), before_step=dist.barrier, clock=time.process_time
        )
        return [asdict(recipe) for recipe in found]

    def bare(self, repeats: int) -> float:
        """Return the CPU seconds of forward and backward, sleeps apart: the benchmark's own, without any exchange."""
        model, times = Sleeping(self.model, self.comm.rank, self.seconds), []
        for _ in range(repeats):
            for param in model.params:
                param.grad = None
            start = time.process_time()
            model().backward()
            times.append(time.process_time() - start)
        return min(times)

    def system(self, name: str, module: nn.Module) -> tuple[nn.Module, Optimizer]:
        """Return the module whose backward is run, and the optimizer that steps."""
        import dgcopt

        sgd = SGD(module.parameters(), lr=1e-6, momentum=0.9)
        if name in BASELINES:
            return in_ddp(name, module), sgd
        compressor = dgcopt.Auto() if name == AUTO else CANDIDATES[name][1]()
        return module, dgcopt.DistributedOptimizer(sgd, module.named_parameters(), compressor)

    def build(self, system: str) -> Any:
        """Build a system and warm it up; `auto` has chosen then."""
        self.step = None
        model = Sleeping(self.model, self.comm.rank, self.seconds)
        module, optimizer = self.system(system, model)

        def step() -> list[float]:
            start, queued = time.perf_counter(), waited_for_core() - model.sleeper.queued
            optimizer.zero_grad()
            module().backward()
            optimizer.step()
            return [time.perf_counter() - start, waited_for_core() - model.sleeper.queued - queued]

        self.step = step
        if system == AUTO:
            self.optimizer = optimizer
        taken = [step() for _ in range(WARMUP)]
        while system == AUTO and not self.choice()[1] and len(taken) < LONGEST_CHOICE:
            taken.append(step())
        return taken

    def choice(self) -> tuple[str, str]:
        """Return the exchange that `auto` uses, and its reason, empty until it has chosen."""
        auto = self.optimizer.compressor
        return auto.choice.base, auto.reason if " uses " in auto.reason else ""

    def keep(self, system: str) -> None:
        """Keep the system that is built under its name."""
        self.kept[system] = self.step

    def steps(self, limit: float, most: int, system: str | None = None) -> Any:
        """Run steps, two at least, further ones while they fit into `limit` seconds; return the seconds of each.

        Rank 0 decides when to stop. They are those of the system that was built last, or of one that is kept.
        """
        run = self.step if system is None else self.kept[system]
        dist.barrier()
        taken: list[list[float]] = []
        go, end = torch.ones(1), time.monotonic() + limit
        while go.item():
            taken.append(run())
            go.fill_(len(taken) < 2 or (len(taken) < most and time.monotonic() + taken[-1][0] < end))
            dist.broadcast(go, 0)
        return taken


def ranks_of(model: str, arguments: argparse.Namespace, network: Loopback) -> Ranks:
    """Start the ranks of a model."""
    return Ranks([__file__, "--serve", model, str(arguments.step[model])], network)


# -- all cells of one model and number of ranks ------------------------------------------------------------------------


def measure(network: Loopback, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return everything measured: probes by link, costs by rank, steps by link and system."""
    probes: dict[str, list[Any]] = {link: [] for link in arguments.links}
    steps: dict[str, dict[str, list[Any]]] = {
        link: {system: [] for system in arguments.candidates} for link in arguments.links
    }
    costs: list[Any] = []
    bare: list[float] = []
    with ranks_of(model, arguments, network) as ranks:
        for number in range(arguments.rounds):
            network.shape("none")
            note(f"{model}, {network.size} ranks, round {number + 1}: costs")
            bare.append(statistics.mean(ranks.call("bare", 5)))
            costs.append(ranks.call("record", arguments.candidates))
            for link in arguments.links:
                network.shape(link)
                note(f"{model}, {network.size} ranks, round {number + 1}: probe of {link}")
                probes[link].append(ranks.call("probe", arguments.probe)[0])
            for system in arguments.candidates:
                network.shape("none")
                note(f"{model}, {network.size} ranks, round {number + 1}: {system}")
                ranks.call("build", system)
                for link in arguments.links:
                    network.shape(link)
                    taken = ranks.call("steps", arguments.seconds, arguments.steps)
                    steps[link][system] += zip(*taken, strict=True)  # the ranks' numbers of each step
    about = {"model": model, "ranks": network.size, "load": os.getloadavg()[0], "step": arguments.step[model]}
    return about | {"bare": min(bare), "probes": probes, "costs": costs, "steps": steps}


def try_auto(arguments: argparse.Namespace) -> bool:
    """Print a row for each cell with the seconds of `compression="auto"` and of DDP; True if it is slower nowhere.

    In a cell its ranks start on the shaped link, as a user's do, and DDP's and its own steps take turns.
    """
    end, is_fine = time.monotonic() + arguments.limit, True
    print("| model | ranks | link | DDP fp32 | DDP bf16 | auto | of the best of DDP's | choice |\n" + "|---" * 8 + "|")
    for model, size in itertools.product(arguments.models, arguments.ranks):
        with Namespaces(size) as network, ranks_of(model, arguments, network) as ranks:
            for link in arguments.links:
                if time.monotonic() > end:
                    note("the time is up: name the cells that are left by --models, --ranks and --links")
                    return is_fine
                note(f"{model}, {size} ranks, {link}")
                network.shape(link)
                ranks.call("build", AUTO)
                ranks.call("keep", AUTO)
                for system in BASELINES:
                    ranks.call("build", system)
                    ranks.call("keep", system)
                taken: dict[str, list[float]] = {}
                for system in (*BASELINES, AUTO, AUTO, *reversed(BASELINES)):
                    rows = zip(*ranks.call("steps", arguments.seconds / 2, arguments.steps, system), strict=True)
                    taken.setdefault(system, []).extend(max(seconds for seconds, _ in row) for row in rows)
                middle = {system: statistics.median(seconds) for system, seconds in taken.items()}
                over = middle[AUTO] / min(middle[system] for system in BASELINES)
                is_fine = is_fine and over <= NEVER_SLOWER
                values = " | ".join(f"{middle[system]:.3f}" for system in (*BASELINES, AUTO))
                chosen = ranks.call("choice")[0][0]
                print(f"| {model} | {size} | {link} | {values} | {over:.2f}x | {chosen} |", flush=True)
    return is_fine


# -- predicted against measured ----------------------------------------------------------------------------------------


def mean_recording(rows: Sequence[Any]) -> Recording:
    """Return the mean over ranks of one exchange's costs."""
    first = rows[0]
    rounds = [[Round(**one) for one in place] for place in first["rounds"]]
    decode = [statistics.mean(each) for each in zip(*(row["decode"] for row in rows), strict=True)]
    encode, step = (statistics.mean(row[name] for row in rows) for name in ("encode", "step"))
    return Recording(first["size"], rounds, encode, decode, first["votes"], step)


def recipes_from(costs: Sequence[Any]) -> list[Recipe]:
    """Return the cheapest recipe of each exchange over repetitions, each the mean over ranks."""
    best: dict[str, Recipe] = {}
    for ranks in costs:
        for rows in zip(*ranks, strict=True):
            recording = mean_recording([row["low"] for row in rows])
            recipe = Recipe(**{**rows[0], "low": recording, "high": recording})
            if recipe.name not in best or recording.seconds < best[recipe.name].low.seconds:
                best[recipe.name] = recipe
    return list(best.values())


def wire_from(probes: Sequence[Any]) -> Fitted:
    """Return the fits of the fastest measurements of each size."""
    fits = {}
    for rows in zip(*probes, strict=True):
        fastest: dict[float, float] = {}
        for row in rows:
            for nbytes, seconds in zip(row["sizes"], row["seconds"], strict=True):
                fastest[nbytes] = min(seconds, fastest.get(nbytes, math.inf))
        fits[rows[0]["kind"], rows[0]["group"]] = fit([*fastest], [*fastest.values()], rows[0]["size"])
    return Fitted(fits)


def merged(runs: Sequence[Any]) -> list[Any]:
    """Return runs with those of one model, number of ranks and step joined, as if they were rounds of one."""
    found: dict[tuple[str, int, float], Any] = {}
    for run in runs:
        key = run["model"], run["ranks"], run["step"]
        if key not in found:
            found[key] = run
            continue
        known = found[key]
        known["costs"] += run["costs"]
        known["bare"] = min(known["bare"], run["bare"])
        for link, systems in run["steps"].items():
            known["probes"].setdefault(link, []).extend(run["probes"][link])
            for system, taken in systems.items():
                known["steps"].setdefault(link, {}).setdefault(system, []).extend(taken)
    return list(found.values())


def cells(found: Sequence[Any], wall: bool) -> Iterator[dict[str, Any]]:
    """Yield every cell with the predicted and the measured seconds of each exchange."""
    for run in found:
        recipes = {recipe.name: recipe for recipe in recipes_from(run["costs"])}
        for link, systems in run["steps"].items():
            wire = wire_from(run["probes"][link])
            model = replace(known_models()[run["model"]], seconds=run["step"] + run["bare"])
            setting = Setting(model, run["ranks"], wire)
            rows = {}
            for system, taken in systems.items():
                step = setting.step(recipes[system])
                if wall:
                    measured = min(statistics.mean(seconds for seconds, _ in ranks) for ranks in taken)
                else:
                    quiet = statistics.median(min(seconds - queued for seconds, queued in ranks) for ranks in taken)
                    # such waits may pass beside a transfer, which takes its time whatever the rank does
                    measured = max(quiet, 8 * step.sent / bits_per_second(link))
                rows[system] = {"predicted": step.seconds, "measured": measured}
            yield {"model": run["model"], "ranks": run["ranks"], "link": link, "rows": rows}


def report(found: Sequence[Any], wall: bool) -> str:
    """Return the table, a line for each cell, and the sums of it."""
    names = list(dict.fromkeys(system for run in found for rows in run["steps"].values() for system in rows))
    lines = [" | ".join(["| model", "ranks", "link", *names, "choice", "of the best", "median error"]) + " |"]
    lines.append("|---" * (6 + len(names)) + "|")
    errors, good, number = [], 0, 0
    for cell in cells(found, wall):
        rows = cell["rows"]
        own = [abs(row["predicted"] / row["measured"] - 1) for row in rows.values()]
        errors += own
        choice = min(rows, key=lambda name: rows[name]["predicted"])
        over = rows[choice]["measured"] / min(row["measured"] for row in rows.values())
        good, number = good + (over <= NEAR), number + 1
        link = "unshaped" if cell["link"] == "none" else cell["link"]
        values = [f"{rows[name]['predicted']:.3f} / {rows[name]['measured']:.3f}" for name in names]
        line = [f"| {cell['model']}", str(cell["ranks"]), link, *values]
        lines.append(" | ".join([*line, choice, f"{over:.2f}x", f"{statistics.median(own):.0%}"]) + " |")
    ninth, middle = sorted(errors)[int(0.9 * len(errors))], statistics.median(errors)
    lines.append(
        f"\n{number} cells, {len(errors)} predictions: median error {middle:.1%}, nine of ten within {ninth:.0%}; the "
        f"choice is measured within {NEAR - 1:.0%} of the best in {good} cells ({good / number:.0%})"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mobilenet_v2", "resnet18"], choices=known_models())
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--links", nargs="+", default=LINKS, help="rates as tc writes them")
    parser.add_argument("--candidates", nargs="+", default=SYSTEMS, choices=[*BASELINES, *CANDIDATES], metavar="NAME")
    parser.add_argument("--steps", type=int, default=6, help="most steps of an exchange on a link in a round")
    parser.add_argument("--seconds", type=float, default=4, help="fewer steps where they would take longer than this")
    parser.add_argument("--probe", type=float, default=10, help="seconds of a probe")
    parser.add_argument("--batch", type=int, default=512, help="samples of a rank in a step")
    parser.add_argument("--rounds", type=int, default=1, help="how often the exchanges take turns")
    parser.add_argument("--wall", action="store_true", help="measured steps include waits for a core")
    parser.add_argument("--auto", action="store_true", help='measure only compression="auto", and DDP beside it')
    parser.add_argument("--limit", type=float, default=540, help="with --auto: seconds after which no cell is begun")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--again", type=Path, nargs="+", help="files of --json to predict from, in place of measuring")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        model, seconds = arguments.serve
        return serve(lambda: Rank(known_models()[model], float(seconds)))
    arguments.step = {name: model.seconds * arguments.batch / model.batch for name, model in known_models().items()}
    # an exit by signal, too, must leave the blocks that remove processes and namespaces
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if arguments.again is not None:
        found = merged([run for path in arguments.again for run in json.loads(path.read_text())])
    else:
        if reason := lacking():
            parser.error(f"no shaped links: {reason}")
        if arguments.auto:
            sys.exit(
                0 if try_auto(arguments) else f"auto takes more than {NEVER_SLOWER:g} times DDP's seconds in a cell"
            )
        found = []
        for model in arguments.models:
            for size in arguments.ranks:
                with Namespaces(size) as network:
                    found.append(measure(network, model, arguments))
                if arguments.json:
                    arguments.json.write_text(json.dumps(found) + "\n")
    print("Seconds of a step, predicted / measured.\n")
    print(report(found, arguments.wall))


if __name__ == "__main__":
    main()
