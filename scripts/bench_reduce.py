"""How a step grows with the number of ranks: bytes and work of one rank, and how much of the gradient is caught.

    python scripts/bench_reduce.py                                    # bytes and time on ResNet-50's shapes
    python scripts/bench_reduce.py --plot docs/reduce.png
    python scripts/bench_reduce.py --energy --ranks 4 16              # on digits, simulated ranks
    python scripts/bench_reduce.py --energy --task stdlib_gpt --ranks 16 --steps 150
    python scripts/bench_reduce.py --energy --task stdlib_gpt --ranks 16 --steps 150 --source update
    python scripts/bench_reduce.py --energy --ranks 4 16 64 --ways gather owner "owner 4 0.25" --plot docs/energy.png

The first table is of one rank among N, whose peers are made up: each sends what this rank sends, and an owner gets from
N ranks what it sends to N owners. Bytes are those of the collectives' own account: of the weights alone,
vectors apart. Time is this rank's CPU time to select, encode and decode, on one thread.

The second trains with N simulated ranks, and says in every 10th step which share of the energy (sum of squares) of the
k largest coordinates of all that waits on all ranks the step has caught, where k is `--ratio` of the whole model at
once; how many of the coordinates that ranks selected found no room; and how well the model does in the end. With "owner
4 0.25" each rank sends 4 k coordinates to owners, who forward a quarter of that, k in all. Batches are N times as many
for N ranks, of the same size together. All ways see the same batches and start from the same weights.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from synthetic import resnet50_shapes
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import dgcopt
from dgcopt.collectives import AllReduce, AllToAll, Broadcast, Collective
from dgcopt.compressors import Compressor, Memory, Place
from dgcopt.flat.buckets import build_buckets
from dgcopt.flat.gradient import GradientBucket

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COMPACT: dict[str, Any] = {"values": "int2", "indices": "rice"}
WAYS: dict[str, Compressor] = {
    "DGC, gather": dgcopt.DGC(0.001, **COMPACT),
    "DGC, owner": dgcopt.DGC(0.001, **COMPACT, reduce="owner"),
    "CLTK": dgcopt.CLTK(0.001),
    "PowerSGD": dgcopt.PowerSGD(start_step=0),
    "dense": dgcopt.NoCompression(),
}


class OneOfMany:
    """Rank 0 of `size`, with ResNet-50's matrices, and peers that are made up."""

    def __init__(self, compressor: Compressor, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.zeros(shape)) for shape in resnet50_shapes() if len(shape) > 1]
        self.compressor, self.size, self.bytes = compressor, size, 0
        compressor.attach(SGD(params, lr=0.1, momentum=0.9))
        named = [(f"p{place}", param) for place, param in enumerate(params)][::-1]
        # as DistributedOptimizer cuts them on a CPU: small where they leave while backward runs
        sizes = (25 * 2**20, 2**20) if compressor.overlaps(params[0].device) else (100 * 2**20, 100 * 2**20)
        self.buckets = build_buckets(named, compressor.kind, *sizes, None, GradientBucket)
        self.contexts = [
            dgcopt.Context(Place(0, size, "average", 9, b.kind, b.segments), Memory(b.segments)) for b in self.buckets
        ]
        self.gradients = [torch.randn(param.shape, generator=generator).pow_(3) for param in params][::-1]

    def step(self) -> float:
        """Seconds of CPU time; afterwards `bytes` are those that were sent."""
        self.bytes, seconds, given = 0, 0.0, iter(self.gradients)
        for bucket, context in zip(self.buckets, self.contexts, strict=True):
            for place in range(len(bucket.segments)):
                bucket.fill([place], [next(given)])
            exchange, result = self.compressor.exchange(bucket.grad, context), None
            context.certain = True
            while True:
                start = time.thread_time()
                try:
                    collective = exchange.send(result)  # type: ignore[arg-type]
                except StopIteration:
                    seconds += time.thread_time() - start
                    break
                seconds += time.thread_time() - start
                self.bytes += collective.sent(self.size)
                result = self.answer(collective)
            context.commit()
        return seconds

    def answer(self, collective: Collective) -> Tensor:
        tensor = collective.tensor
        if isinstance(collective, AllReduce | Broadcast):
            return tensor
        if isinstance(collective, AllToAll):
            return tensor  # what is for each owner arrives at this one, from each of them
        return tensor.expand(self.size, *tensor.shape).contiguous()


def growth(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    records = []
    for name, compressor in WAYS.items():
        for size in sizes:
            rank = OneOfMany(compressor, size)
            seconds = statistics.median([rank.step() for _ in range(rounds + 1)][1:])
            records.append({"way": name, "ranks": size, "bytes": rank.bytes, "seconds": seconds})
            print(records[-1], file=sys.stderr, flush=True)
    return records


def growth_table(records: list[dict[str, Any]], sizes: list[int]) -> str:
    lines = []
    cells = {
        "kB sent per step": lambda r: f"{r['bytes'] / 1e3:,.0f}",
        "ms of CPU": lambda r: f"{1e3 * r['seconds']:,.0f}",
    }
    for what, cell in cells.items():
        lines += [f"| {what} at N = | " + " | ".join(map(str, sizes)) + " |", "|---" * (len(sizes) + 1) + "|"]
        for name in WAYS:
            mine = {record["ranks"]: record for record in records if record["way"] == name}
            lines.append(f"| {name} | " + " | ".join(cell(mine[size]) for size in sizes) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(records: list[dict[str, Any]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for name in WAYS:
        mine = [record for record in records if record["way"] == name]
        left.loglog([r["ranks"] for r in mine], [r["bytes"] / 1e3 for r in mine], "o-", label=name)
        right.loglog([r["ranks"] for r in mine], [1e3 * r["seconds"] for r in mine], "o-", label=name)
    left.set(xlabel="ranks", ylabel="kB that a rank sends per step")
    right.set(xlabel="ranks", ylabel="ms of CPU per step")
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


# -- what is caught ----------------------------------------------------------------------------------------------------


TASKS: dict[str, tuple[int, Callable[[Iterable[Tensor]], Optimizer]]] = {
    "digits": (128, functools.partial(SGD, lr=0.2)),
    "stdlib_gpt": (32, functools.partial(torch.optim.AdamW, lr=1e-3, betas=(0.0, 0.95))),
}
"""Samples in all ranks' batches together, one for each at least, and the optimizer."""


def settings_of(task: str) -> Any:
    from train import make_parser

    parser = make_parser()
    return parser.instantiate(parser.parse_args([f"--config={ROOT}/configs/tasks/{task}.yaml"]))


def columns(data: Any, most: int | None = None) -> tuple[Tensor, Tensor]:
    """All inputs and all targets."""
    samples = itertools.islice(((x, torch.as_tensor(y)) for x, y in (data[i] for i in range(len(data)))), most)
    x, y = map(torch.stack, zip(*samples, strict=True))
    return x, y


def energy(
    task: str, size: int, way: str, ratio: float, keep: float, source: Any, steps: int, seed: int
) -> dict[str, Any]:
    """Train; returns shares of energy in every 10th step, of coordinates without room, and the test accuracy.

    No energy where updates travel. An allgather applies up to N k coordinates; "largest" is what the k largest of those
    that are applied catch, as "caught" is what all do, and "applied" their number in units of k.
    """
    settings, (batch, make) = settings_of(task), TASKS[task]
    reduce, *more = way.split()
    times, keep = map(float, more) if more else (1.0, keep)
    compressor = functools.partial(dgcopt.TopK, times * ratio, **COMPACT, reduce=reduce, keep=keep, source=source)
    batch = max(batch, size)  # a sample for each rank
    torch.manual_seed(seed)
    start = copy.deepcopy(settings.model)
    for module in start.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    inputs, targets = columns(settings.train_data)
    models, optimizers = [], []
    for comm in dgcopt.simulated_world(size):
        model = copy.deepcopy(start)
        whole = {"bucket_mb": 1000.0, "first_bucket_mb": 1000.0, "comm": comm}
        named, chooser = model.named_parameters(), compressor(granularity="bucket")
        wrapped = dgcopt.DistributedOptimizer(make(model.parameters()), named, chooser, **whole)
        models.append(model)
        optimizers.append(wrapped)
    caught, largest, applied = [], [], []
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        chosen = torch.randint(len(inputs), (batch,), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank, model in enumerate(models):
            mine = chosen[rank::size]
            output = model(inputs[mine])
            nn.functional.cross_entropy(output.flatten(0, -2), targets[mine].flatten()).backward()
        to_check = step % 10 == 9 and source == "gradient"
        if to_check:
            waiting = all_that_waits(models, optimizers)
            count = math.ceil(ratio * len(waiting))
            best = waiting.square().topk(count).values.sum()
        for optimizer in optimizers:
            optimizer.step()
        if to_check:
            there = (torch.cat([param.grad.flatten() for param in models[0].parameters()]) * size).square()
            caught.append(float(there.sum() / best))
            largest.append(float(there.topk(count).values.sum() / best))
            applied.append(float(there.count_nonzero()) / count)
    overflow = statistics.mean(optimizer.telemetry.overflow for optimizer in optimizers)
    inputs, targets = columns(settings.test_data, 400)
    models[0].eval()
    with torch.no_grad():
        output = torch.cat([models[0](part) for part in inputs.split(50)])
    right = (output.argmax(-1) == targets).double().mean()
    last = {"caught": caught[-1:], "largest": largest[-1:], "applied": applied[-1:]}
    record = {"task": task, "size": size, "way": way, "seed": seed, "overflow": overflow, "accuracy": float(right)}
    print({**record, **last}, file=sys.stderr, flush=True)
    return {**record, "caught": caught, "largest": largest, "applied": applied}


def all_that_waits(models: list[nn.Module], optimizers: list[Any]) -> Tensor:
    """The sum over ranks of gradients and residuals, flat."""
    total = torch.zeros(sum(param.numel() for param in models[0].parameters()))
    for model, optimizer in zip(models, optimizers, strict=True):
        memory = optimizer.state_dict()["dgcopt"]["memory"]
        residuals = [by_name for kind, by_name in memory.items() if kind.startswith("residual")]
        total += torch.cat(
            [
                param.grad.flatten() + sum(held[name].flatten() for held in residuals if name in held)
                for name, param in model.named_parameters()
            ]
        )
    return total


def energy_table(records: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | way | coordinates applied, in k | energy caught, first third | last third | "
        "by its k largest, first third | last third | overflow | accuracy (range) |"
    ]
    lines.append("|---" * 9 + "|")
    key = lambda r: (r["size"], r["way"])  # noqa: E731
    for (size, way), group in itertools.groupby(sorted(records, key=key), key):
        runs = list(group)
        cells = [mean_of(runs, "applied", slice(None), ".1f")]
        third = max(1, len(runs[0]["caught"]) // 3)
        for name in ("caught", "largest"):
            cells += [mean_of(runs, name, part) for part in (slice(third), slice(-third, None))]
        overflow = statistics.mean(run["overflow"] for run in runs)
        found = [100 * run["accuracy"] for run in runs]
        spread = f"{statistics.mean(found):.2f}% ({min(found):.2f}-{max(found):.2f})"
        lines.append(f"| {size} | {way} | {' | '.join(cells)} | {overflow:.2%} | {spread} |")
    return "\n".join(lines)


def mean_of(runs: list[dict[str, Any]], name: str, part: slice, form: str = ".2f") -> str:
    """Over seeds and a part of the steps that were looked at."""
    found = [number for run in runs for number in run[name][part]]
    return format(statistics.mean(found), form) if found else ""


def plot_energy(records: list[dict[str, Any]], path: str) -> None:
    """The share that is caught over the steps, mean over seeds: a panel per task and number of ranks."""
    import matplotlib.pyplot as plt

    places = sorted({(record["task"], record["size"]) for record in records})
    colors = {way: f"C{place}" for place, way in enumerate(sorted({record["way"] for record in records}))}
    rows, columns = -(-len(places) // 3), min(3, len(places))
    size = (4 * columns, 3 * rows + 0.5)
    figure, panels = plt.subplots(rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for place, panel in zip(places, panels.flat, strict=False):
        mine = [record for record in records if (record["task"], record["size"]) == place]
        for way, (name, line) in itertools.product(
            sorted({record["way"] for record in mine}), (("caught", "-"), ("largest", ":"))
        ):
            runs = [record[name] for record in mine if record["way"] == way]
            means = [statistics.mean(shares) for shares in zip(*runs, strict=True)]
            label = way if name == "caught" else f"{way}, its k largest"
            panel.plot(range(10, 10 * len(means) + 1, 10), means, colors[way] + line, label=label)
        panel.set(title=f"{place[0]}, {place[1]} ranks", xlabel="step")
    panels[0][0].set(ylim=(0, None))
    figure.supylabel("energy caught, of the k largest that wait")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3, help="steps that are measured")
    parser.add_argument("--energy", action="store_true", help="the second table")
    parser.add_argument("--task", choices=TASKS, default="digits", help="what the second table is trained on")
    parser.add_argument("--ways", nargs="+", default=["gather", "owner"], help="gather, owner, partition, or as above")
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--source", choices=("gradient", "update"), default="gradient", help="what travels")
    parser.add_argument("--keep", type=float, default=1.0, help="how many sums owners forward, see DGC(keep=)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", help="where records are written")
    parser.add_argument("--plot", help="where a picture of the table is written")
    parser.add_argument("--drawn", nargs="+", default=[], help="files of --json whose records are drawn, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.energy:
        jobs = itertools.product(args.ranks, args.ways, range(args.seeds))
        how = (args.ratio, args.keep, args.source, args.steps)
        records = [energy(args.task, size, way, *how, seed) for size, way, seed in jobs]
        print(energy_table(records))
        if args.plot:
            drawn = [record for path in args.drawn for record in json.loads(Path(path).read_text())]
            plot_energy(drawn + records, args.plot)
    else:
        records = growth(args.ranks, args.rounds)
        print(growth_table(records, args.ranks))
        if args.plot:
            plot(records, args.plot)
    if args.json:
        Path(args.json).write_text(json.dumps(records))


if __name__ == "__main__":
    main()
