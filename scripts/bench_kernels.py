"""What compressing and decompressing the gradients of one step costs a rank, on ResNet-50's shapes at 0.1% and 1%.

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --rounds 30 --json kernels.json --plot kernels.png
    python scripts/bench_kernels.py --device cuda
    python scripts/bench_kernels.py --compressors
    python scripts/bench_kernels.py --compressors QSGD DeMo

The unit is one pass over memory that no exact method with a momentum u and a residual v can do without: u <- 0.9 u + g,
v <- v + u; 5 streams. It is a plain loop in C, compiled when this starts; without a compiler, and on CUDA, it is done
by torch, on a CPU in chunks that stay in the cache. Nothing is sent: a rank decodes its own message. Gradients differ
from step to step and are put back before each, which is not timed. Everything runs on one thread, whose CPU time is
taken. Systems take turns, round after round; times are medians over the rounds, and so are their ratios to the pass of
the same round, so that they hold on a machine with other work. A second table says where dgcopt's milliseconds go
(not on CUDA, where asking for them would make the device wait); a third has its bytes.

With --compressors there is a row for each compressor of the library instead, or for those that are named: with default
settings and past every warm-up, on a fourth of ResNet-50's tensors, from gradients that lie in the buckets to the
flat result. It says how long a step takes in torch, and how long with the kernels that are in use here, by turns, and
how many passes over g, u and v of these tensors that is: the pass takes its turn in each round, as it does above.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from naive_dgc import NaiveDGC
from synthetic import Synthetic
from torch.optim import SGD, Adam

import dgcopt
from dgcopt import kernels
from dgcopt.__main__ import LATE, library
from dgcopt.coding import SparseCode
from dgcopt.collectives import Collective
from dgcopt.compressors import Compressor, Memory, Place, reduction
from dgcopt.compressors.sparse.memory import ErrorFeedback
from dgcopt.compressors.sparse.schedule import Selection
from dgcopt.errors import ConfigError
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket
from dgcopt.gradients.layout import bucket_sizes
from dgcopt.gradients.settings import Settings
from dgcopt.kernels import CHUNK

PASS, BY_TORCH, COPY = "5-stream pass", "5-stream pass by torch", "copy"
TOPK, NAIVE = "torch.topk of all magnitudes", "naive DGC, sampled threshold"
COMPACT = "indices='rice', vectors='int8'"
SYSTEMS = (
    "DGC(ratio=0.001)",
    "DGC(ratio=0.001, overlap=True)",
    "DGC(ratio=0.01)",
    "DGC(ratio=0.01, overlap=True)",
    "DGC(ratio=0.001, granularity='bucket')",
    f"DGC(ratio=0.001, values='int8', {COMPACT})",
    f"DGC(ratio=0.001, values='int2', {COMPACT})",
)
DENSE = ("PowerSGD(rank=4, start_step=0)",)
"""What names no coordinates."""
WARMUP = 3
LOOP = """
void five_streams(float *restrict u, float *restrict v, const float *restrict g, long n) {
    for (long i = 0; i < n; i++) {
        u[i] = 0.9f * u[i] + g[i];
        v[i] += u[i];
    }
}
"""

seconds_of: defaultdict[str, float] = defaultdict(float)
"""Seconds by phase, while they are `watched`."""


def now(device: torch.device) -> float:
    """A clock that stands still on a CPU while other processes have it; CUDA's work is done when it is read."""
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def compiled() -> ctypes.CDLL | None:
    """The pass in C, by a compiler that may use all that this processor has; None where there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "pass.c"), Path(folder, "pass.so")
        source.write_text(LOOP)
        command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library]
        if shutil.which(str(command[0])) is None or subprocess.run(command, capture_output=True).returncode:
            return None
        return ctypes.CDLL(str(library))


class Flat:
    """All gradients, u and v, each in one piece."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        self.g = torch.cat([gradient.view(-1) for gradient in gradients])
        self.u, self.v = torch.zeros_like(self.g), torch.zeros_like(self.g)
        self.magnitudes = self.g.abs()
        size = CHUNK if self.g.device.type == "cpu" else len(self.g)
        self.chunks = list(zip(self.g.split(size), self.u.split(size), self.v.split(size), strict=True))
        self.loop = compiled() if self.g.device.type == "cpu" else None

    def touch(self) -> None:
        if self.loop is None:
            return self.touch_by_torch()
        u, v, g = (ctypes.c_void_p(flat.data_ptr()) for flat in (self.u, self.v, self.g))
        self.loop.five_streams(u, v, g, ctypes.c_long(len(self.g)))
        return None

    def touch_by_torch(self) -> None:
        for g, u, v in self.chunks:
            torch.add(g, u, alpha=0.9, out=u)
            v.add_(u)

    def copy(self) -> None:
        self.v.copy_(self.g)

    def topk(self) -> None:
        self.magnitudes.topk(-(-len(self.magnitudes) // 1000), sorted=False)


class Naive:
    """The authors' algorithm."""

    def __init__(self, model: Synthetic) -> None:
        self.optimizer = NaiveDGC(model.parameters(), lr=0.1, momentum=0.9)

    def step(self) -> None:
        message, vectors = self.optimizer.compress()
        self.optimizer.decompress([message], vectors)


def lay_out(named: list[tuple[str, Any]], compressor: Compressor) -> tuple[bool, list[GradientBucket]]:
    """Whether a compressor's buckets leave while backward runs, and the buckets, of the size that they have then."""
    most, first = (int(size * 2**20) for size in bucket_sizes(Settings(), compressor, named))
    buckets = build_buckets(named, compressor.kind, most, first, None, GradientBucket)
    return compressor.overlaps(named[0][1].device), buckets


class Dgcopt:
    """One of dgcopt's compressors, driven as its engine does it: all buckets encoded, then decoded, then handed out."""

    def __init__(self, system: str, model: Synthetic) -> None:
        self.compressor = eval(system, vars(dgcopt))
        self.compressor.attach(SGD(model.parameters(), lr=0.1, momentum=0.9))
        ready = list(model.named_parameters())[::-1]
        self.early, self.buckets = lay_out(ready, self.compressor)
        self.contexts = [
            dgcopt.Context(Place(0, 1, "average", 0, b.kind, b.segments), Memory(b.segments)) for b in self.buckets
        ]
        for bucket in self.buckets:
            bucket.in_place = bucket.is_cpu and self.compressor.in_place(bucket.kind)
        (self.comm,) = dgcopt.simulated_world(1)
        self.bytes: defaultdict[Hashable, int] = defaultdict(int)

    def step(self) -> None:
        self.bytes.clear()
        flights = [(exchange, next(exchange)) for exchange in map(self._exchange, self.buckets, self.contexts)]
        results = []
        for (exchange, collective), bucket in zip(flights, self.buckets, strict=True):
            result = None
            while result is None:
                self.bytes[bucket.kind] += collective.nbytes
                try:
                    collective = exchange.send(self.comm.run(collective))
                except StopIteration as stop:
                    result = stop.value
            results.append(result)
        for bucket, context, result in zip(self.buckets, self.contexts, results, strict=True):
            context.commit()
            self.write_back(bucket, result)
            context.begin(context.step + 1)

    def write_back(self, bucket: GradientBucket, result: Any) -> None:
        bucket.prepare(result)()

    def _exchange(self, bucket: Any, context: Any) -> Any:
        context.certain = not self.early
        if bucket.in_place:
            context.local = bucket.local(True, 1.0)
            return self.compressor.exchange(torch.empty(0), context)
        bucket.fill(range(len(bucket.segments)), [segment.param.grad for segment in bucket.segments])
        return self.compressor.exchange(bucket.grad, context)

    @property
    def selected(self) -> int:
        """How many coordinates a message names."""
        if not isinstance(self.compressor, dgcopt.DGC):
            return 0
        return sum(self.compressor.selection(context).count for context in self.contexts if context.kind == "matrix")


PHASES: dict[str, list[tuple[Any, str]]] = {
    "preview": [(ErrorFeedback, "preview_block_maxima"), (ErrorFeedback, "preview_blocks")],
    "accumulate": [(ErrorFeedback, "accumulate"), (ErrorFeedback, "update_momentum"), (ErrorFeedback, "correct")],
    "select": [(Selection, "largest"), (Selection, "largest_of")],
    "encode": [(SparseCode, "send"), (reduction, "encode_rows")],
    "decode": [(SparseCode, "receive"), (reduction, "decode_rows")],
    "commit": [(dgcopt.Context, "commit")],
    "write back": [(Dgcopt, "write_back")],
}


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Add the time that each of `PHASES` takes to `seconds_of`."""

    def timed(phase: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            start, before = time.thread_time(), sum(seconds_of.values())
            result = inner(*args, **kwargs)
            of_others = sum(seconds_of.values()) - before  # which this phase has called
            seconds_of[phase] += time.thread_time() - start - of_others
            return result

        return outer

    kept = [(owner, name, phase, getattr(owner, name)) for phase, calls in PHASES.items() for owner, name in calls]
    for owner, name, phase, inner in kept:
        setattr(owner, name, timed(phase, inner))
    yield
    for owner, name, _, inner in kept:
        setattr(owner, name, inner)


class Bench:
    """Everything that is timed, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model = Synthetic(rank=0).to(device)
        self.model.gradients = [gradient.to(device) for gradient in self.model.gradients]
        self.grads = [torch.empty_like(gradient) for gradient in self.model.gradients]
        self.steps = 0
        self.flat = Flat(self.model.gradients)
        self.in_c = self.flat.loop is not None
        self.run: dict[str, Callable[[], None]] = {PASS: self.flat.touch}
        if self.in_c:
            self.run[BY_TORCH] = self.flat.touch_by_torch
        if device.type != "cpu":
            self.run[COPY] = self.flat.copy
        self.run |= {TOPK: self.flat.topk, NAIVE: Naive(self.model).step}
        self.dgcopt = {system: Dgcopt(system, self.model) for system in (*SYSTEMS, *DENSE)}
        self.run |= {system: it.step for system, it in self.dgcopt.items()}

    def seconds(self, name: str) -> dict[str, float]:
        """How long one step takes, on gradients of its own: the whole, and each phase that is watched."""
        self.steps += 1
        for param, grad, gradient in zip(self.model.params, self.grads, self.model.gradients, strict=True):
            param.grad = grad.copy_(gradient.view(-1).roll(7919 * self.steps).view_as(grad))
        seconds_of.clear()
        start = now(self.device)
        self.run[name]()
        whole = now(self.device) - start
        return {"whole": whole, **seconds_of, "rest": whole - sum(seconds_of.values())}


@torch.no_grad()
def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """A record per system."""
    for _ in range(WARMUP):
        for name in bench.run:
            bench.seconds(name)
    with watched() if bench.device.type == "cpu" else contextlib.nullcontext():
        times = [{name: bench.seconds(name) for name in bench.run} for _ in range(rounds)]
    records = []
    for name in bench.run:
        record: dict[str, Any] = {
            "system": name,
            "seconds": statistics.median(each[name]["whole"] for each in times),
            "passes": statistics.median(each[name]["whole"] / each[PASS]["whole"] for each in times),
        }
        if name in bench.dgcopt:
            it = bench.dgcopt[name]
            record |= {"bytes": dict(it.bytes), "selected": it.selected}
            phases = (*PHASES, "rest") if len(times[0][name]) > 2 else ("rest",)
            record["phases"] = {
                phase: statistics.median(each[name].get(phase, 0) for each in times) for phase in phases
            }
        records.append(record)
    return records


def tables(records: list[dict[str, Any]]) -> str:
    """All that was measured, in markdown."""
    lines = ["| one step | ms | passes |", "|---|---|---|"]
    lines += [f"| {r['system']} | {1e3 * r['seconds']:.1f} | {r['passes']:.2f}x |" for r in records]
    ours = [record for record in records if "bytes" in record]
    names = list(ours[0]["phases"])
    if "accumulate" in names:
        lines += ["", " | ".join(["| ms of", *names]) + " |", "|---" * (1 + len(names)) + "|"]
        for record in ours:
            cells = [f"{1e3 * record['phases'][name]:.1f}" for name in names]
            lines.append(" | ".join([f"| {record['system']}", *cells]) + " |")
    lines += ["", "| message of | bytes | of them vectors | selected | bits per selected | vectors included |"]
    lines.append("|---" * 6 + "|")
    for record in (record for record in ours if record["selected"]):
        whole, vectors, count = sum(record["bytes"].values()), record["bytes"]["vector"], record["selected"]
        bits = f"{8 * (whole - vectors) / count:.2f} | {8 * whole / count:.2f}"
        lines.append(f"| {record['system']} | {whole:,} | {vectors:,} | {count:,} | {bits} |")
    return "\n".join(lines)


class OneRank:
    """A compressor of the library on a rank of its own."""

    def __init__(self, kind: type[Compressor], model: Synthetic) -> None:
        self.named, self.gradients = list(model.named_parameters())[::-4], model.gradients[::-4]
        params = [param for _, param in self.named]
        self.numel = sum(param.numel() for param in params)
        self.compressor = kind()
        try:
            self.compressor.attach(SGD(params, lr=0.1))
        except ConfigError:
            adam = Adam(params)
            for param in params:
                moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.ones_like(param)}
                adam.state[param] = {"step": torch.tensor(float(LATE)), **moments}
            self.compressor.attach(adam)
        self.early, self.buckets = lay_out(self.named, self.compressor)
        self.contexts = [
            dgcopt.Context(Place(0, 1, "average", LATE, b.kind, b.segments), Memory(b.segments)) for b in self.buckets
        ]
        (self.comm,) = dgcopt.simulated_world(1)

    def seconds(self) -> float:
        """How long one step takes."""
        for (_, param), gradient in zip(self.named, self.gradients, strict=True):
            param.grad = gradient.clone()
        for bucket, context in zip(self.buckets, self.contexts, strict=True):
            context.certain = not self.early
            bucket.in_place = bucket.is_cpu and self.compressor.in_place(bucket.kind)
            if bucket.in_place:
                context.local = bucket.local(True, 1.0)
            else:
                for place, segment in enumerate(bucket.segments):
                    bucket.fill([place], [segment.param.grad])
        start = time.thread_time()
        grads = [torch.empty(0) if bucket.in_place else bucket.grad for bucket in self.buckets]
        if self.compressor.whole_model:
            self.compressor.prepare(grads, self.contexts)
        for grad, context in zip(grads, self.contexts, strict=True):
            self._finish(self.compressor.exchange(grad, context))
            context.commit()
            context.begin(context.step + 1)
        return time.thread_time() - start

    def _finish(self, exchange: Iterator[Collective] | Any) -> None:
        with contextlib.suppress(StopIteration):
            collective = next(exchange)
            while True:
                collective = exchange.send(self.comm.run(collective))


@contextlib.contextmanager
def in_torch() -> Iterator[None]:
    """Run the specification of all kernels."""
    with mock.patch.object(kernels.Kernel, "implementation", lambda kernel, *_: kernel.specification):
        yield


@torch.no_grad()
def compressor_table(names: list[str], rounds: int) -> list[dict[str, Any]]:
    """A record for each compressor; prints them as they are found."""
    print("| compressor | torch: ms per million | GB/s | kernels: ms per million | GB/s | in passes | |")
    print("|---|---|---|---|---|---|---|")
    model, records = Synthetic(rank=0), []
    flat = Flat(model.gradients[::-4])
    for kind in library():
        if names and kind.__name__ not in names:
            continue
        rank = OneRank(kind, model)
        turns = []
        for _ in range(WARMUP + rounds):
            start = now(flat.g.device)
            flat.touch()
            unit = now(flat.g.device) - start
            with in_torch():
                specified = rank.seconds()
            turns.append((unit, specified, rank.seconds()))
        unit, slow, fast = (statistics.median(column) for column in zip(*turns[WARMUP:], strict=True))
        passes = statistics.median(fast / unit for unit, _, fast in turns[WARMUP:])
        cells = [f"{1e9 * t / rank.numel:.2f} | {4e-9 * rank.numel / t:.2f}" for t in (slow, fast)]
        print(f"| {kind.__name__} | {cells[0]} | {cells[1]} | {passes:.2f}x | {slow / fast:.1f}x |", flush=True)
        record = {"compressor": kind.__name__, "numel": rank.numel, "torch": slow, "kernels": fast}
        records.append(record | {"pass": unit, "passes": passes})
    if records:
        unit = statistics.median(record["pass"] / record["numel"] for record in records)
        print(f"\nThe pass took {1e9 * unit:.2f} ms per million, {'in C' if flat.loop else 'by torch'}")
    return records


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Bars of passes over memory."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(9, 1 + 0.35 * len(records)))
    colors = ["C1" if "bytes" in record else "C0" for record in records]
    bars = panel.barh([r["system"] for r in records], [r["passes"] for r in records], color=colors)
    panel.bar_label(bars, fmt="%.2fx", padding=3, fontsize=8)
    panel.set(xlabel="time of one step, in passes over g, u and v")
    panel.margins(x=0.12)
    panel.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often the systems take turns")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, or cuda")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--plot", type=Path, help="file for a bar chart, such as kernels.png")
    parser.add_argument("--compressors", nargs="*", metavar="NAME", help="a row for each compressor, or for these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    load = os.getloadavg()[0]
    if arguments.compressors is not None:
        print(
            f"{os.cpu_count()} cores, load {load:.1f} at the start, one thread, {kernels.instructions() or 'torch'}\n"
        )
        found = compressor_table(arguments.compressors, arguments.rounds)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
        return
    bench = Bench(arguments.device)
    records = measure(bench, arguments.rounds)
    seconds = {record["system"]: record["seconds"] for record in records}
    megabytes = {name: streams * 4e-6 * len(bench.flat.g) for name, streams in ((PASS, 5), (COPY, 2))}
    speed = {name: 1e-3 * megabytes[name] / seconds[name] for name in megabytes if name in seconds}
    device = torch.cuda.get_device_name() if arguments.device.type == "cuda" else "one thread"
    print(f"{os.cpu_count()} cores, load {load:.1f} at the start, {device}")
    of_copy = f", {speed[PASS] / speed[COPY]:.0%} of what a copy reaches" if COPY in speed else ""
    by = "in C" if bench.in_c else "by torch" + ("" if device != "one thread" else ": there is no C compiler")
    print(f"The pass touches {megabytes[PASS]:.0f} MB at {speed[PASS]:.1f} GB/s{of_copy}, {by}\n")
    print(tables(records))
    if arguments.json:
        about = {"cores": os.cpu_count(), "load": load, "torch": torch.__version__, "device": device, "GB/s": speed}
        arguments.json.write_text(json.dumps({"machine": about, "records": records}, indent=1))
    if arguments.plot:
        plot(records, arguments.plot)


if __name__ == "__main__":
    main()
