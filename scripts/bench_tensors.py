"""Microseconds per tensor of a training step, for models of many small tensors, against the bare optimizer and DDP.

    python scripts/bench_tensors.py                             # two ranks, 2,000 and 20,000 tensors of 64 elements
    python scripts/bench_tensors.py --before ../older           # the same for the package of another checkout, in turns
    python scripts/bench_tensors.py --parts                     # one process: CPU time of each part of a step
    python scripts/bench_tensors.py --simulated                 # one process: a simulated world of two

Ranks are processes of torchrun on one machine. All systems live in each of them and take turns, round after round, so
that ratios hold on a machine with other work. The model multiplies its tensors one after another, so backward makes
their gradients one by one. A step is zero_grad, forward, backward and step; `local` is the same without any exchange,
and the tables say what a system takes beyond it, per tensor: wall clock, and CPU time of all threads of a rank.
`--json` writes all numbers to a file.
"""

import argparse
import contextlib
import functools
import inspect
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("local", "ddp", "NoCompression()", "DGC(ratio=0.01)", 'DGC(ratio=0.01, vectors="sparse")')
WARMUP = 4  # DDP and dgcopt learn their buckets
MICRO = 1e6


class Chain(nn.Module):
    """A product of many tensors of ones: backward makes a gradient for each of them, one after another."""

    def __init__(self, tensors: int, numel: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(1, numel)) for _ in range(tensors)])

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor
        return x.sum()


def build(system: str, tensors: int, numel: int, comm: Any = None) -> tuple[nn.Module, Optimizer]:
    """The module whose backward is run, and the optimizer that steps."""
    model = Chain(tensors, numel)
    sgd = SGD(model.parameters(), lr=1e-9, momentum=0.9)
    if system == "local":
        return model, sgd
    if system == "ddp":
        return DDP(model), sgd
    import dgcopt

    compressor = eval(system, vars(dgcopt))
    return model, dgcopt.DistributedOptimizer(sgd, model.named_parameters(), compressor, comm=comm)


def forward(module: nn.Module, numel: int) -> None:
    """Forward and backward; every gradient is 1 and every product 1."""
    module(torch.ones(1, numel)).backward()


def cpu_seconds() -> float:
    """Of all threads of this process, in user mode and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# -- ranks -------------------------------------------------------------------------------------------------------------


def serve(arguments: argparse.Namespace) -> None:
    """One rank: all systems in turn; rank 0 prints a line for each number of tensors."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if any("(" in system for system in arguments.systems):
        import dgcopt

        dgcopt.init()
    for tensors in arguments.tensors:
        built = {system: build(system, tensors, arguments.numel) for system in arguments.systems}
        times: dict[str, list[tuple[float, float]]] = {system: [] for system in built}
        for number in range(WARMUP + arguments.rounds):
            for system, (module, optimizer) in built.items():
                dist.barrier()
                for _ in range(1 if number < WARMUP else arguments.steps):
                    start = time.perf_counter(), cpu_seconds()
                    optimizer.zero_grad()
                    forward(module, arguments.numel)
                    optimizer.step()
                    took = time.perf_counter() - start[0], cpu_seconds() - start[1]
                    if number >= WARMUP:
                        times[system].append(took)
        if dist.get_rank() == 0:
            print(json.dumps({"tensors": tensors, "times": times}), flush=True)
        del built
    dist.destroy_process_group()


def launch(tree: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run ranks with the package in `tree`; what rank 0 printed."""
    numbers = ("tensors", "numel", "rounds", "steps")
    given = [[f"--{name}", *map(str, _listed(getattr(arguments, name)))] for name in numbers]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    command += [__file__, "--serve", *(word for words in given for word in words), "--systems", *arguments.systems]
    place = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env={**os.environ, **place}, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Launches of all trees in turn; a record for each number of tensors, tree and system."""
    trees = {"": ROOT} | ({} if arguments.before is None else {"before": arguments.before.resolve()})
    runs: dict[tuple[int, str, str], list[list[float]]] = defaultdict(list)
    for number in range(arguments.launches):
        for name, tree in trees.items():
            note(f"launch {number + 1} of {arguments.launches}{f': {name}' if name else ''}")
            for told in launch(tree, arguments):
                for system, times in told["times"].items():
                    runs[told["tensors"], name, system] += times
    records = []
    for (tensors, name, system), times in runs.items():
        floor = runs[tensors, name, "local"]
        beyond = [
            [(mine - bare) / tensors * MICRO for mine, bare in zip(*pair, strict=True)]
            for pair in zip(times, floor, strict=True)
        ]
        wall, cpu = zip(*beyond, strict=True)
        records.append(
            {
                **{"tensors": tensors, "tree": name, "system": system},
                **{"wall": statistics.median(wall), "cpu": statistics.median(cpu)},
                **{"least wall": _least(times, floor, 0, tensors), "least cpu": _least(times, floor, 1, tensors)},
                "step": statistics.median(took for took, _ in times) / tensors * MICRO,
            }
        )
    return records


def _least(times: list[list[float]], floor: list[list[float]], which: int, tensors: int) -> float:
    """The fastest step beyond the fastest bare one."""
    return (min(took[which] for took in times) - min(took[which] for took in floor)) / tensors * MICRO


def table(records: list[dict[str, Any]]) -> str:
    """A row per number of tensors and system."""
    kinds = ("wall", "least wall", "cpu", "least cpu")
    ddp = {(r["tensors"], r["tree"]): r for r in records if r["system"] == "ddp"}
    lines = ["| tensors | system | wall | fastest | vs ddp | CPU | least CPU | vs ddp |", "|---" * 8 + "|"]
    for record in sorted(
        records,
        key=lambda r: (r["tensors"], r["tree"] == "", SYSTEMS.index(r["system"]) if r["system"] in SYSTEMS else 99),
    ):
        if record["system"] == "local":
            what, cells = "local, all of it", [f"{record['step']:.1f}", *[""] * 5]
        else:
            what = record["system"]
            wall, least, cpu, least_cpu = (record[kind] for kind in kinds)
            dense = ddp.get((record["tensors"], record["tree"]))
            ratios = [f"{record[kind] / dense[kind]:.2f}x" if dense else "" for kind in ("wall", "cpu")]
            cells = [f"{wall:.1f}", f"{least:.1f}", ratios[0], f"{cpu:.1f}", f"{least_cpu:.1f}", ratios[1]]
        what += f" ({record['tree']})" if record["tree"] else ""
        lines.append(" | ".join([f"| {record['tensors']:,}", what, *cells]) + " |")
    return "\n".join(lines)


# -- parts of a step ---------------------------------------------------------------------------------------------------

PARTS = {
    "hook": ["gradients.stepping:Stepping.gradient_arrived"],
    "fill": ["gradients.tracker:GradientTracker.fill"],
    "vote": ["gradients.gradient_step:GradientStep.ballot"],
    "launch": ["gradients.outgoing:OutgoingBuckets.launch_rest", "gradients.outgoing:OutgoingBuckets.launch_full"],
    "finish": ["exchange.scheduler:CollectiveScheduler.finish"],
    "commit": ["exchange.commit:commit_memory"],
    "write-back": ["exchange.commit:commit_gradients"],
    "between exchange and step": ["gradients.stepping:Stepping._use_gradients"],
    "after step": ["gradients.stepping:Stepping._end_step"],
    "zero_grad": ["gradients.stepping:Stepping.zero_grad"],
}


class Clock:
    """User CPU seconds of each part of a step, without those of the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._last = 0.0

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        self._charge()
        self._open.append(part)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._last
        self._last = time.process_time()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, or generator function, whose time is a part's."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.within(part):
                return function(*args, **kwargs)

        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Any:
            generator, result = function(*args, **kwargs), None
            while True:
                try:
                    with self.within(part):
                        yielded = generator.send(result)
                except StopIteration as stop:
                    return stop.value
                result = yield yielded

        return generate if inspect.isgeneratorfunction(function) else call


def mirror() -> Any:
    """A wire of two ranks whose other one always sends what this one does: nobody waits."""
    from dgcopt.collectives import AllGather, AllReduce
    from dgcopt.comm import Comm, Finished

    class Mirror(Comm):
        wire = "mirror"

        def _start(self, collective: Any, ranks: tuple[int, ...]) -> Any:
            tensor = collective.tensor
            if isinstance(collective, AllGather):
                return Finished(collective, torch.stack([tensor, tensor]))
            if isinstance(collective, AllReduce) and collective.op == "sum":
                return Finished(collective, tensor.mul_(2))
            return Finished(collective, tensor)

        def _among(self, members: tuple[int, ...], given: Any) -> None:
            raise NotImplementedError

    return Mirror(0, 2)


def parts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """User CPU time of each part of a step, in one process."""
    torch.set_num_threads(1)
    records = []
    for tensors in arguments.tensors:
        for system in arguments.systems:
            if "(" not in system:
                continue
            records.append({"tensors": tensors, "system": system, **_parts_of(system, tensors, arguments)})
            lines = [
                f"    {part:28}{took:8.2f}" for part, took in records[-1].items() if part not in ("tensors", "system")
            ]
            print(f"{tensors:,} tensors, {system}: microseconds a tensor", *lines, sep="\n", flush=True)
    return records


def _parts_of(system: str, tensors: int, arguments: argparse.Namespace) -> dict[str, float]:
    import importlib

    found: dict[str, list[float]] = defaultdict(list)
    for timed in (False, True):  # first as a whole, then with a clock in every part
        clock, module_and_optimizer = Clock(), build("local", tensors, arguments.numel)
        with contextlib.ExitStack() as undo:
            for part, places in PARTS.items() if timed else ():
                for place in places:
                    name, _, path = place.partition(":")
                    owner = functools.reduce(getattr, path.split(".")[:-1], importlib.import_module(f"dgcopt.{name}"))
                    last = path.split(".")[-1]
                    before = getattr(owner, last)
                    setattr(owner, last, clock.timed(part, before))
                    undo.callback(setattr, owner, last, before)
            ours = build(system, tensors, arguments.numel, mirror())
            for number in range(WARMUP + arguments.rounds * arguments.steps):
                clock.seconds.clear()
                took = [_cpu_of_step(*each, arguments.numel) for each in (ours, module_and_optimizer)]
                if number < WARMUP:
                    continue
                for part in PARTS if timed else ():
                    found[part].append(clock.seconds[part])
                if not timed:
                    found["all, beyond local"].append(took[0] - took[1])
                    found["local"].append(took[1])
    return {part: statistics.median(values) / tensors * MICRO for part, values in found.items()}


def _cpu_of_step(module: nn.Module, optimizer: Optimizer, numel: int) -> float:
    start = time.process_time()
    optimizer.zero_grad()
    forward(module, numel)
    optimizer.step()
    return time.process_time() - start


# -- simulated ranks ---------------------------------------------------------------------------------------------------


def simulated(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a step of a simulated world of two, and of its first one."""
    import dgcopt

    torch.set_num_threads(1)
    records = []
    for tensors in arguments.tensors:
        for system in arguments.systems:
            if "(" not in system:
                continue
            start = time.process_time()
            ranks = [build(system, tensors, arguments.numel, comm) for comm in dgcopt.simulated_world(2)]
            took = [time.process_time() - start]
            for _ in range(1 + arguments.steps):
                start = time.process_time()
                for module, optimizer in ranks:
                    optimizer.zero_grad()
                    forward(module, arguments.numel)
                for _, optimizer in ranks:
                    optimizer.step()
                took.append(time.process_time() - start)
            made, first, later = took[0], took[1], statistics.median(took[2:])
            records.append({"tensors": tensors, "system": system, "made": made, "first": first, "later": later})
            print(f"{tensors:,} tensors, {system}: made in {made:.2f} s, first step {first:.2f} s, later {later:.3f} s")
    return records


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(given: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[2000, 20000])
    parser.add_argument("--numel", type=int, default=64, help="elements of each tensor")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps of a system before it is the next one's turn")
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--json", type=Path)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--parts", action="store_true")
    modes.add_argument("--simulated", action="store_true")
    modes.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(None if given is None else list(given))
    if arguments.serve:
        serve(arguments)
        return
    measure = parts if arguments.parts else simulated if arguments.simulated else compare
    records = measure(arguments)
    if measure is compare:
        print(table(records))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
