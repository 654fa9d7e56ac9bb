"""Seconds of a training step with one rank's compression in the loop, against the bare optimizer, on real models.

    python scripts/bench_models.py --device cuda --trace overlap.json --plot overlap.png
    python scripts/bench_models.py --device cpu --models tiny --rounds 3

Models: `resnet50` (torchvision's, bf16 autocast, synthetic images), `gpt` and `gpt-32` (350 million parameters, bf16
autocast, 4,096 and 16,384 tokens), and `tiny`, to try it. The other ranks are an echo (scripts/echo.py): a rank
compresses its gradients, decodes as many messages as there are ranks, and no network has to be waited for. Systems take
turns, so that ratios hold on a machine with other work; times are medians. Those of the host last until
`step()` returns and include its waits for the device. --trace keeps torch's profile of two steps, --plot
draws it, a row per stream.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from echo import Echo
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import dgcopt
from dgcopt.tasks.stdlib_gpt import CharGPT

BARE = "the bare optimizer"
SYSTEMS = (
    BARE,
    "NoCompression()",
    "BF16()",
    "DGC(ratio=0.001)",
    "DGC(ratio=0.001, overlap=False)",
    "DGC.compact(ratio=0.001, warmup=None)",
    "DGC(ratio=0.01)",
    "TopK(ratio=0.01)",
    "PowerSGD(rank=4, start_step=0)",
    "QSGD()",
)
WARMUP = 5
SHAPES = {"gpt": (28, 16, 1024, 512, 8), "gpt-32": (28, 16, 1024, 512, 32), "tiny": (2, 2, 64, 64, 2)}
"""Layers, heads, width, context and batch of a GPT."""


def resnet50(device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The model, and a loss on 64 images."""
    import torchvision

    images = torch.randn(64, 3, 224, 224, device=device)
    labels = torch.randint(1000, (64,), device=device)
    return torchvision.models.resnet50(), lambda model: nn.functional.cross_entropy(model(images), labels)


def gpt(name: str, device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The model, and a loss on a batch of random characters."""
    layers, heads, width, context, batch = SHAPES[name]
    text = torch.randint(256, (batch, context + 1), device=device)
    inputs, targets = text[:, :-1], text[:, 1:].flatten()
    return (
        CharGPT(layers, heads, width, context),
        lambda model: nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets),
    )


class Training:
    """A model in the hands of one system."""

    def __init__(self, system: str, name: str, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        device = self.device = arguments.device
        with device:  # one CPU core needs seconds for the weights of a GPT, and each turn of a system makes it anew
            made = resnet50(device) if name == "resnet50" else gpt(name, device)
        self.model, self.loss = made[0].to(device), made[1]
        sgd = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.optimizer: Any = sgd
        if system != BARE:
            self.optimizer = dgcopt.DistributedOptimizer(
                sgd,
                self.model.named_parameters(),
                eval(system, vars(dgcopt)),
                comm=Echo(arguments.ranks),
                bucket_mb=arguments.bucket_mb,
            )

    def step(self) -> None:
        self.optimizer.zero_grad()
        with record_function("forward"), torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(self.model)
        with record_function("backward"):
            loss.backward()
        with record_function("step"):
            self.optimizer.step()

    def seconds(self) -> tuple[float, float]:
        """How long a step takes, and how long the host takes to return from it."""
        start = now(self.device)
        self.step()
        returned = time.perf_counter()
        return now(self.device) - start, returned - start


def now(device: torch.device) -> float:
    """A clock, read when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak(device: torch.device) -> float:
    """The most memory that was in use, in GB."""
    return torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else float("nan")


def allocations(device: torch.device) -> int:
    """The number of calls of cudaMalloc so far; each makes the device wait."""
    return int(torch.cuda.memory_stats()["num_device_alloc"]) if device.type == "cuda" else 0


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record per system, which take turns; each is made anew, so that the memory of one is enough."""
    records = []
    device, found = arguments.device, {}
    for turn in range(arguments.turns):
        for system in arguments.systems:
            gc.collect()  # what the system before has left in cycles
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            training = Training(system, name, arguments)
            for _ in range(WARMUP):
                training.step()
            times = found.setdefault(system, {"seconds": [], "host": [], "allocations": 0})
            before = allocations(device)
            turns, host = zip(*(training.seconds() for _ in range(arguments.rounds)), strict=True)
            times["seconds"] += turns
            times["host"] += host
            times["allocations"] += allocations(device) - before
            print(f"{name}, turn {turn + 1}, {system}: {1e3 * statistics.median(turns):.2f} ms", file=sys.stderr)
            times |= {"memory": peak(device), "numel": sum(p.numel() for p in training.model.parameters())}
            if system != BARE and turn == 0:
                telemetry = training.optimizer.telemetry
                times["sent"] = telemetry.sent_bytes / telemetry.steps
            del training
    bare = statistics.median(found[BARE]["seconds"])
    for system, times in found.items():
        seconds = statistics.median(times["seconds"])
        records.append({"model": name, "system": system, **times, "median": seconds, "over": seconds / bare})
    return records


def table(records: list[dict[str, Any]], ranks: int) -> str:
    """In markdown."""
    millions = records[0]["numel"] / 1e6
    lines = [f"**{records[0]['model']}, {millions:.1f} million parameters, as one of {ranks} ranks**\n"]
    heads = ("system", "ms per step", "over the bare optimizer", "more, ms", "host ms")
    heads += ("bytes sent", "peak GB", "cudaMalloc calls")
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for r in records:
        more = 1e3 * (r["median"] - records[0]["median"])
        cells = (r["system"], f"{1e3 * r['median']:.2f}", f"{r['over']:.3f}x", f"{more:+.2f}")
        cells += (f"{1e3 * statistics.median(r['host']):.2f}", f"{r.get('sent', 0):,.0f}")
        cells += (f"{r['memory']:.1f}", f"{r['allocations']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# -- what runs beside what ---------------------------------------------------------------------------------------------


def trace(name: str, arguments: argparse.Namespace, path: Path) -> None:
    """Profile two steps of a compressor that sends while backward runs."""
    training = Training("DGC(ratio=0.01, overlap=True)", name, arguments)
    for _ in range(WARMUP):
        training.step()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (arguments.device.type == "cuda")
    with profile(activities=activities) as profiler:
        for _ in range(2):
            training.step()
        now(arguments.device)
    profiler.export_chrome_trace(str(path))


def spans_of(path: Path) -> dict[str, list[tuple[str, float, float]]]:
    """What ran where in the last step of a trace: names, starts and lengths in ms, by stream, and of the host."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in ("forward", "backward", "step")]
    zero = max(e["ts"] for e in marks if e["name"] == "forward")
    rows: dict[str, list[tuple[str, float, float]]] = {}
    for e in events:
        row = "host" if e in marks else f"stream {e['args']['stream']}" if e.get("cat") in DEVICE_WORK else None
        if row is not None and e["ts"] >= zero:
            rows.setdefault(row, []).append((e["name"], (e["ts"] - zero) / 1e3, e["dur"] / 1e3))
    return rows


DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def color(name: str) -> str:
    """Of a span: compression in orange, what copies in blue, the rest in grey."""
    if name in ("forward", "backward", "step"):
        return {"forward": "C8", "backward": "C7", "step": "C2"}[name]
    return "C1" if name.startswith("_") else "C0" if "copy" in name.lower() else "0.6"


def plot(rows: dict[str, list[tuple[str, float, float]]], path: Path) -> None:
    """A row for the host and for each stream."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(11, 1.2 + 0.6 * len(rows)))
    for place, spans in enumerate(rows.values()):
        for shade in sorted({color(name) for name, _, _ in spans}):
            bars = [(start, length) for name, start, length in spans if color(name) == shade]
            panel.broken_barh(bars, (place - 0.4, 0.8), color=shade)
    panel.set_yticks(range(len(rows)), list(rows))
    panel.set_xlabel("ms; host: forward, backward, step; orange: dgcopt's kernels, blue: copies, grey: the model's")
    panel.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def overlap(rows: dict[str, list[tuple[str, float, float]]]) -> str:
    """How much of what the other streams did ran while the busiest stream was busy too."""
    streams: Sequence[list[tuple[str, float, float]]] = [spans for row, spans in rows.items() if row != "host"]
    if len(streams) < 2:
        return "One stream only: nothing ran beside the model."
    main, *others = sorted(streams, key=lambda spans: -sum(length for _, _, length in spans))
    total = beside = 0.0
    for spans in others:
        for _, start, length in spans:
            total += length
            beside += sum(max(0.0, min(start + length, at + ms) - max(start, at)) for _, at, ms in main)
    return f"Messages took {total:.2f} ms on their own stream, {beside:.2f} ms of it beside the model's kernels."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, or cuda")
    parser.add_argument("--models", nargs="+", default=["resnet50", "gpt"], choices=["resnet50", *SHAPES])
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, help="compressors of dgcopt as expressions")
    parser.add_argument("--ranks", type=int, default=8, help="of how many ranks messages are decoded")
    parser.add_argument("--bucket-mb", type=float, help="size of buckets; the compressor's own without it")
    parser.add_argument("--rounds", type=int, default=10, help="steps measured in a turn")
    parser.add_argument("--turns", type=int, default=2, help="how often the systems take turns")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--trace", type=Path, help="file for a profile of the first model")
    parser.add_argument("--plot", type=Path, help="file for a picture of that, such as overlap.png")
    arguments = parser.parse_args()
    arguments.systems = list(dict.fromkeys([BARE, *arguments.systems]))
    records = []
    for name in arguments.models:
        found = measure(name, arguments)
        print(f"{table(found, arguments.ranks)}\n", flush=True)
        records += found
        if arguments.json:
            arguments.json.write_text(json.dumps(records, indent=1))
    if arguments.trace:
        trace(arguments.models[0], arguments, arguments.trace)
        rows = spans_of(arguments.trace)
        print(overlap(rows))
        if arguments.plot:
            plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
