"""Shows that gradients are on the wire while backward still computes others, in torch's own profile of a training.

    python scripts/trace_overlap.py --plot overlap.png         # as root: two ranks, 100 Mbit/s between them
    python scripts/trace_overlap.py --link 1gbit --trace dgc.json    # for chrome://tracing or ui.perfetto.dev

Two processes train a small CNN over Gloo, each in a network namespace of its own; without root or iproute2 over the
loopback interface, unshaped. On rank 0 torch.profiler records some steps: what the script marks (backward, compressing,
update), and the intervals "gloo:..." in which Gloo's own threads had a message under way. Of each compressor the median
step is drawn, pale where a message waits for one of Gloo's two threads, and medians over the steps are printed. --trace
keeps the profile of the first compressor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from links import Loopback, Namespaces, bits_per_second, lacking
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import dgcopt

ROOT = Path(__file__).resolve().parent.parent
COMPRESSORS = ("DGC(ratio=0.01, overlap=True)", "NoCompression()")
WARMUP, STEPS = 4, 7
SIZE = 2  # ranks
ITEMSIZES = {"unsigned char": 1, "float": 4}
WAITING = "#c6dbef"

# -- a rank ------------------------------------------------------------------------------------------------------------


def small_cnn(width: int = 64) -> nn.Sequential:
    """A CNN of 4.9 million parameters for 32 x 32 pixels: like most, small tensors in front and large ones behind."""
    layers: list[nn.Module] = []
    into = 3
    for out in (width, 2 * width, 4 * width, 8 * width, 8 * width):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        into = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(into, 2 * into), nn.ReLU(), nn.Linear(2 * into, 10))


def marked(exchange: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Generator[Any, Any, Any]]:
    """The same exchange, with its computation between collectives marked."""

    def outer(*args: Any) -> Generator[Any, Any, Any]:
        inner, result = exchange(*args), None
        while True:
            with record_function("decompress" if result is not None else "compress"):
                try:
                    collective = inner.send(result)
                except StopIteration as stop:
                    return stop.value
            result = yield collective

    return outer


def serve(compressor: str, path: Path) -> None:
    """One rank: train, and on rank 0 write a profile."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm: Any = dgcopt.init()
    chosen = eval(compressor, vars(dgcopt))
    type(chosen).exchange = marked(type(chosen).exchange)
    model = small_cnn()
    bare = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer: Any = dgcopt.DistributedOptimizer(
        bare, model.named_parameters(), chosen, comm=comm, bucket_mb=2, first_bucket_mb=1
    )
    start = comm.start

    def marked_start(collective: Any) -> Any:
        with record_function(f"start {collective.nbytes} {collective.label}"):
            return start(collective)

    comm.start = marked_start
    torch.manual_seed(comm.rank)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))

    def step() -> None:
        with record_function("step"):
            optimizer.zero_grad()
            with record_function("forward"):
                loss = nn.functional.cross_entropy(model(images), labels)
            with record_function("backward"):
                loss.backward()
            with record_function("synchronize"):
                optimizer.synchronize()
            with record_function("update"), optimizer.skip_synchronize():
                optimizer.step()

    for _ in range(WARMUP):
        step()
    if comm.rank:
        for _ in range(STEPS):
            step()
    else:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            for _ in range(STEPS):
                step()
        profiler.export_chrome_trace(str(path))
    dgcopt.shutdown()


def trace(compressor: str, hosts: Loopback, path: Path) -> None:
    """Train with one rank per host; `path` holds rank 0's profile afterwards."""
    port = hosts.port()
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ranks = [
        subprocess.Popen(
            [*hosts.enter(rank), sys.executable, __file__, "--serve", compressor, "--trace", str(path)],
            env={**os.environ, **hosts.environment(rank, port), **more},
        )
        for rank in range(hosts.size)
    ]
    try:
        codes = [process.wait(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"{compressor}: exit codes {codes}")


# -- what the profile says ---------------------------------------------------------------------------------------------


@dataclass
class Span:
    """An interval of a step, in milliseconds from the start of its backward."""

    name: str
    start: float
    end: float


@dataclass
class Message(Span):
    """A collective on the wire. `handed_over` is when Gloo got it, which has two threads to work on them."""

    handed_over: float


@dataclass
class Step:
    """What happened in one step: spans of computation by name, buckets on the wire in their order, and the vote."""

    marks: dict[str, list[Span]]
    wire: list[Message]
    vote: Message

    @property
    def backward(self) -> Span:
        return self.marks["backward"][0]

    @property
    def end(self) -> float:
        return self.marks["update"][0].end

    def summary(self) -> dict[str, float]:
        over, compress = self.backward.end, self.marks["compress"]
        return {
            "buckets": len(self.wire),
            "handed to Gloo before backward ended": sum(message.handed_over < over for message in self.wire),
            "on the wire before backward ended": sum(message.start < over for message in self.wire),
            "arrived before backward ended": sum(message.end < over for message in self.wire),
            "ms from first on the wire to end of backward": over - min(message.start for message in self.wire),
            "ms of backward with messages on the wire": covered(self.wire, over),
            "ms from end of backward to last arrival": max(message.end for message in self.wire) - over,
            "ms of backward": over,
            "ms of compressing in it": sum(span.end - span.start for span in compress if span.start < over),
            "ms of the step": self.end - self.marks["step"][0].start,
        }


def covered(spans: Sequence[Span], until: float) -> float:
    """How long at least one of them lasts."""
    total, last = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        end = min(span.end, until)
        total += max(0.0, end - max(span.start, last))
        last = max(last, end)
    return total


def steps_of(path: Path) -> list[Step]:
    """The steps in the Chrome trace of a rank."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    events.sort(key=lambda event: event["ts"])
    steps = []
    for whole in (event for event in events if event["name"] == "step"):
        within = [event for event in events if 0 <= event["ts"] - whole["ts"] <= whole["dur"]]
        zero = next(event["ts"] for event in within if event["name"] == "backward")
        marks: dict[str, list[Span]] = {"compress": [], "decompress": []}
        handed_over: list[tuple[int, str, float]] = []
        wire = []
        for event in within:
            name = event["name"]
            span = Span(name, (event["ts"] - zero) / 1e3, (event["ts"] + event["dur"] - zero) / 1e3)
            if match := re.fullmatch(r"start (\d+) (.*)", name):
                handed_over.append((int(match[1]), match[2], span.start))
            elif name.startswith("gloo:"):
                # Gloo does not know what it carries, but takes messages of one size in the order of their starts; few
                # bytes go to all ranks at once, as a copy for each
                nbytes = math.prod(event["args"]["Input Dims"][0]) * ITEMSIZES[event["args"]["Input type"][0]]
                mine = next(each for each in handed_over if nbytes in (each[0], each[0] * SIZE))
                handed_over.remove(mine)
                wire.append(Message(mine[1], span.start, span.end, mine[2]))
            else:
                marks.setdefault(name, []).append(span)
        votes = [message for message in wire if message.name.endswith(" vote")]
        steps.append(Step(marks, [message for message in wire if message not in votes], votes[-1]))
    return steps


def table(steps: dict[str, list[Step]]) -> str:
    lines = ["| median of a step |" + "".join(f" {name} |" for name in steps), "|---" * (1 + len(steps)) + "|"]
    summaries = {name: [step.summary() for step in each] for name, each in steps.items()}
    for key in next(iter(summaries.values()))[0]:
        medians = [statistics.median(each[key] for each in summary) for summary in summaries.values()]
        digits = ".1f" if key.startswith("ms ") else "g"
        lines.append(f"| {key} |" + "".join(f" {value:{digits}} |" for value in medians))
    return "\n".join(lines)


def median(steps: list[Step]) -> Step:
    """The one of median length."""
    return sorted(steps, key=lambda step: step.end)[len(steps) // 2]


def plot(steps: dict[str, list[Step]], link: str, path: Path) -> None:
    """A timeline of the median step of each compressor, computation above, messages below."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    chosen = {name: median(each) for name, each in steps.items()}
    heights = [4 + len(step.wire) for step in chosen.values()]
    figure, panels = plt.subplots(
        len(chosen), 1, figsize=(10, 1 + 0.3 * sum(heights)), squeeze=False, height_ratios=heights
    )
    for (name, step), panel in zip(chosen.items(), panels[:, 0], strict=True):
        marks = step.marks
        rows: list[tuple[str, list[tuple[list[Span], str]]]] = [
            ("backward", [([step.backward], "C7")]),
            ("compress, decompress", [(marks["compress"], "C1"), (marks["decompress"], "C3")]),
        ]
        for message in step.wire:
            waiting = Span("waiting", message.handed_over, message.start)
            title = re.sub(r".*(bucket \d+).*", r"\1 on the wire", message.name)
            rows.append((title, [([waiting], WAITING), ([message], "C0")]))
        rows.append(("vote", [([step.vote], "C4")]))
        rows.append(("synchronize(), step()", [(marks["synchronize"], "C9"), (marks["update"], "C2")]))
        for place, (_, bars) in enumerate(rows):
            for spans, color in bars:
                panel.broken_barh([(s.start, s.end - s.start) for s in spans], (place - 0.4, 0.8), color=color)
        panel.axvspan(0, step.backward.end, color="C7", alpha=0.15, lw=0)
        panel.set_yticks(range(len(rows)), [row for row, _ in rows], fontsize=8)
        panel.set(xlim=(-0.01 * step.end, 1.02 * step.end), title=f"{name}, 2 ranks, {link}")
        panel.invert_yaxis()
    panels[-1, 0].set(
        xlabel="ms since backward began (shaded while it runs; pale: waiting for one of Gloo's two threads)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressors", nargs="+", default=COMPRESSORS, help="as expressions, such as 'FP16()'")
    parser.add_argument("--link", default="100mbit", help="rate as tc writes it, or none")
    parser.add_argument("--trace", type=Path, help="file for the Chrome trace of the first compressor")
    parser.add_argument("--json", type=Path, help="file for what the table is made from")
    parser.add_argument("--plot", type=Path, help="file for the timelines, such as overlap.png")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        return serve(arguments.serve, arguments.trace)
    try:
        bits_per_second(arguments.link)
    except ValueError as error:
        parser.error(str(error))

    # an exit by signal, too, must leave the blocks that remove processes and namespaces
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    reason = lacking()
    link = "loopback" if reason else "unshaped" if arguments.link == "none" else arguments.link
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {link}{reason and f': {reason}'}\n")
    steps = {}
    with tempfile.TemporaryDirectory() as folder, (Loopback if reason else Namespaces)(SIZE) as hosts:
        hosts.shape(arguments.link)
        for number, compressor in enumerate(arguments.compressors):
            keep = number == 0 and arguments.trace
            path = arguments.trace if keep else Path(folder) / "trace.json"
            trace(compressor, hosts, path)
            steps[compressor] = steps_of(path)
    print(table(steps))
    if arguments.json:
        summaries = {name: [step.summary() for step in each] for name, each in steps.items()}
        arguments.json.write_text(json.dumps({"link": link, "steps": summaries}, indent=1))
    if arguments.plot:
        plot(steps, link, arguments.plot)


if __name__ == "__main__":
    main()
