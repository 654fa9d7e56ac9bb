"""Seconds, CPU seconds and bytes of a training step over slow links, for dgcopt and what else there is.

    python scripts/bench_step.py                                       # as root: 2 and 4 ranks, 100 Mbit/s, 1 Gbit/s
    python scripts/bench_step.py --systems local ddp "DGC(ratio=0.01)" --ranks 2 --links 100mbit --steps 3 --rounds 1
    python scripts/bench_step.py --systems ddp "NoCompression()" "NoCompression() over 4" --links 1gbit --delay 5
    python scripts/bench_step.py --systems local ddp ddp-hook "NoCompression() in ddp" "NoCompression()" --links none

Every rank is a process in a network namespace of its own; the links between them are shaped by tc. Without root or
iproute2 the ranks share the loopback interface, unshaped. The model has ResNet-50's 161 parameters; its gradients are
made once, heavy-tailed and different on each rank, and cost backward next to nothing: `local`, the same step without
any exchange, is the floor. Systems take turns, round after round, so that ratios hold on a machine with other work.
Prints a table per number of ranks and link; --json and --plot write files. Exit code 1 if a system failed.
"""

import argparse
import functools
import json
import logging
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shaped_ranks
import torch
import torch.distributed as dist
from links import Loopback, Namespaces, bits_per_second, lacking
from naive_dgc import NaiveDGC
from shaped_ranks import PATIENCE, note
from synthetic import Synthetic
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

DENSE = ("ddp", "ddp-hook", "ddp-fp16", "ddp-bf16", "horovod", "horovod-fp16")
PEERS = ("local", *DENSE, "powersgd-1", "powersgd-2", "naive-dgc")
PRESETS = (
    *("NoCompression()", "FP16()", "BF16()", "DGC.faithful(warmup=None)", "DGC.compact(warmup=None)"),
    "DGC.compact(warmup=None, overlap=True)",
)
HEADERS = 66  # bytes of Ethernet, IP and TCP with time stamps before the payload of a packet
WARMUP = 4  # DDP and dgcopt learn their buckets, PowerSGD begins with its third step

# -- who trains it -----------------------------------------------------------------------------------------------------


# torch compares the annotations of a hook with the types, so this file must not postpone them
def bf16_hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What torch's own hook does, which torch refuses to run without NCCL."""
    work = dist.all_reduce(bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def build(system: str, model: Synthetic) -> tuple[nn.Module, Optimizer]:
    """The module whose backward is run, and the optimizer that steps."""
    sgd = functools.partial(SGD, model.parameters(), lr=1e-6, momentum=0.9)
    if system == "local":
        return model, sgd()
    if system.endswith(" in ddp"):
        import dgcopt

        ddp, optimizer = DDP(model, gradient_as_bucket_view=True), sgd()
        compressor = eval(system.removesuffix(" in ddp"), vars(dgcopt))
        ddp.register_comm_hook(*dgcopt.ddp_hook(compressor, optimizer, model.named_parameters()))
        return ddp, optimizer
    if "(" in system:
        import dgcopt

        expression, _, streams = system.partition(" over ")
        dgcopt.init(streams=int(streams or 1))
        compressor = eval(expression, vars(dgcopt))
        return model, dgcopt.DistributedOptimizer(sgd(), model.named_parameters(), compressor)
    if system == "naive-dgc":
        return model, NaiveDGC(model.parameters(), lr=1e-6, momentum=0.9)
    if system.startswith("horovod"):
        hvd = start_horovod()
        compression = hvd.Compression.fp16 if system == "horovod-fp16" else hvd.Compression.none
        return model, hvd.DistributedOptimizer(sgd(), model.named_parameters(), compression=compression)
    if system.startswith("powersgd-"):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        # with several buckets the hook's exchanges meet those of the next bucket on Gloo, and it aborts
        ddp = DDP(model, bucket_cap_mb=1000)
        state = powerSGD_hook.PowerSGDState(None, int(system.removeprefix("powersgd-")), start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp, sgd()

    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

    ddp = DDP(model, gradient_as_bucket_view=True)
    if system != "ddp":
        hooks = {"ddp-hook": allreduce_hook, "ddp-fp16": fp16_compress_hook, "ddp-bf16": bf16_hook}
        ddp.register_comm_hook(None, hooks[system])
    return ddp, sgd()


def start_horovod() -> Any:
    """Start Horovod's Gloo controller as horovodrun would, each rank being a host of its own."""
    import horovod.torch as hvd
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    rank, size = dist.get_rank(), dist.get_world_size()
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        server = RendezvousServer()
        port += server.start()
        server.init(get_host_assignments([HostInfo(f"host{each}", 1) for each in range(size)], size))
    dist.broadcast(port, 0)
    world = {"RANK": rank, "SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": rank, "CROSS_SIZE": size}
    world |= {"HOSTNAME": f"host{rank}", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    world |= {"GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"], "GLOO_RENDEZVOUS_PORT": int(port)}
    world |= {"GLOO_IFACE": os.environ["GLOO_SOCKET_IFNAME"]}
    world |= {"GLOO_TIMEOUT_SECONDS": int(PATIENCE.total_seconds())}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in world.items()})
    hvd.init()
    return hvd


# -- a rank ------------------------------------------------------------------------------------------------------------


class Rank:
    """One rank: builds a system and warms it up, then measures its steps."""

    def __init__(self, system: str, build: Callable[[str, Synthetic], tuple[nn.Module, Optimizer]]) -> None:
        self.module, self.optimizer = build(system, Synthetic(dist.get_rank()))
        self.counters = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics")
        for _ in range(WARMUP):
            self.step()

    def step(self) -> float:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.module().backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def used(self) -> dict[str, float]:
        cpu = resource.getrusage(resource.RUSAGE_SELF)  # of all threads
        sent, packets = (int((self.counters / name).read_text()) for name in ("tx_bytes", "tx_packets"))
        values = {"cpu": cpu.ru_utime + cpu.ru_stime, "sent": sent, "payload": sent - HEADERS * packets}
        return values | (
            {"ledger": self.optimizer.telemetry.sent_bytes} if hasattr(self.optimizer, "telemetry") else {}
        )

    def measure(self, steps: int) -> dict[str, Any]:
        """Run steps; return the seconds of each, and what a mean step has used."""
        dist.barrier()
        before = self.used()
        seconds = [self.step() for _ in range(steps)]
        cpu = self.used()["cpu"]
        dist.barrier()  # what this rank sent is out when all have received it
        after = self.used() | {"cpu": cpu}
        return {"seconds": seconds, **{name: (after[name] - before[name]) / steps for name in before}}


def serve(system: str, build: Callable[[str, Synthetic], tuple[nn.Module, Optimizer]] = build) -> None:
    """Measure one rank's steps on command."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # for `choices`
    shaped_ranks.serve(lambda: Rank(system, build))


class Ranks(shaped_ranks.Ranks):
    """The ranks of one system, warmed up."""

    script = __file__

    def __init__(self, system: str, network: Loopback) -> None:
        super().__init__([self.script, "--serve", system], network)

    def choices(self) -> list[str]:
        """What `reduce="auto"` has chosen, as the log has it."""
        self.errors.seek(0)
        return [line.strip() for line in self.errors if 'reduce="auto"' in line]

    def measure(self, steps: int) -> dict[str, Any]:
        """Run `steps` steps; the mean over ranks of what they took."""
        replies = self.call("measure", steps)
        seconds = [statistics.mean(each) for each in zip(*(reply.pop("seconds") for reply in replies), strict=True)]
        return {"seconds": seconds, **{name: statistics.mean(reply[name] for reply in replies) for name in replies[0]}}


# -- the benchmark -----------------------------------------------------------------------------------------------------


def run(network: Loopback, arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Measure everything among the ranks of one network; per link a record of each system."""
    size = network.size
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    for number in range(arguments.rounds):
        for system in arguments.systems:
            if system in failures:
                continue
            note(f"{size} ranks, round {number + 1} of {arguments.rounds}: {system}")
            measures_link = "auto" in system  # and so needs ranks of its own on each, shaped before they start
            starts = [(link, [link]) for link in arguments.links] if measures_link else [("none", arguments.links)]
            try:
                for at_start, links in starts:
                    network.shape(at_start)
                    with Ranks(system, network) as ranks:
                        for link in links:
                            network.shape(link)
                            once = ranks.measure(1)["seconds"][0]
                            steps = max(1, min(arguments.steps, int(arguments.seconds / once)))
                            runs.setdefault((link, system), []).append(ranks.measure(steps))
                        for line in ranks.choices():
                            note(f"{at_start}: {line}")
            except (RuntimeError, OSError) as error:
                failures[system] = str(error)
                note(f"{system} failed: {error}")
    for link in arguments.links:
        about = {"ranks": size, "link": link}
        yield [
            {**about, "system": system, "error": failures.get(system)}
            | summary(runs.get((link, system), []), network.can_shape)
            for system in arguments.systems
        ]


def summary(rounds: list[dict[str, Any]], has_counters: bool) -> dict[str, Any]:
    """Medians over all steps and rounds."""
    if not rounds:
        return {"rounds": []}
    values = {name: statistics.median(each[name] for each in rounds) for name in rounds[0] if name != "seconds"}
    values["seconds"] = statistics.median(second for each in rounds for second in each["seconds"])
    if not has_counters:
        del values["sent"], values["payload"]
    return {**values, "rounds": rounds}


def table(records: list[dict[str, Any]]) -> str:
    """One row per system of one number of ranks and link, with its seconds over those of the ones to compare with."""
    seconds = {record["system"]: record["seconds"] for record in records if "seconds" in record}
    dense = {system: seconds[system] for system in DENSE if system in seconds}
    best = min(dense, key=lambda system: dense[system]) if dense else None
    against = [name for name in ("local", "powersgd-1", "naive-dgc", best) if name in seconds]
    titles = [f"vs {name}{' (best dense)' if name == best else ''}" for name in against]
    lines = [f"**{records[0]['ranks']} ranks, {records[0]['link']}**\n"]
    lines.append(
        " | ".join(["| system", "s per step", "CPU s", "bytes sent", "without headers", "ledger", *titles]) + " |"
    )
    lines.append("|---" * (6 + len(titles)) + "|")
    for record in records:
        if "seconds" not in record:
            lines.append(f"| {record['system']} | failed" + " | " * (4 + len(titles)) + " |")
            continue
        sent, payload, noted = (record.get(name) for name in ("sent", "payload", "ledger"))
        cells = [f"{record['seconds']:.3f}", f"{record['cpu']:.3f}"]
        cells += ["" if count is None else f"{count:,.0f}" for count in (sent, payload, noted)]
        if noted and payload:
            cells[-1] += f" ({noted / payload - 1:+.1%})"
        cells += [f"{record['seconds'] / seconds[name]:.2f}x" for name in against]
        lines.append(" | ".join([f"| {record['system']}", *cells]) + " |")
    return "\n".join(lines)


def plot(groups: list[list[dict[str, Any]]], path: Path) -> None:
    """Bars of seconds per step: a row of panels per number of ranks, a column per link."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    sizes, links = (list(dict.fromkeys(group[0][key] for group in groups)) for key in ("ranks", "link"))
    height = 1 + 0.28 * max(map(len, groups))
    area = (2 + 3.5 * len(links), height * len(sizes))
    figure, panels = plt.subplots(len(sizes), len(links), figsize=area, sharex=True, sharey=True, squeeze=False)
    for records in groups:
        size, link = records[0]["ranks"], records[0]["link"]
        panel = panels[sizes.index(size)][links.index(link)]
        done = [record for record in records if "seconds" in record]
        names = [record["system"] for record in done]
        colors = ["C7" if name == "local" else "C1" if "(" in name else "C0" for name in names]
        bars = panel.barh(names, [record["seconds"] for record in done], color=colors)
        panel.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
        panel.set(title=f"{size} ranks, {'unshaped' if link == 'none' else link}", xlabel="seconds per step")
    # all panels share both axes: systems from top to bottom, and room for the numbers behind the bars
    seconds = [record["seconds"] for group in groups for record in group if "seconds" in record]
    if seconds:
        panels[0][0].set(xscale="log", xlim=(min(seconds) / 2, max(seconds) * 4))
    panels[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit", "none"], help="rates as tc writes them")
    parser.add_argument(
        "--systems",
        nargs="+",
        default=[*PEERS, *PRESETS],
        metavar="SYSTEM",
        help=f"{', '.join(PEERS)}, or a compressor of dgcopt as an expression, such as 'DGC(ratio=0.01)', or "
        "'DGC(ratio=0.01) over 4' streams",
    )
    parser.add_argument("--delay", type=float, default=0, help="milliseconds from a rank to another")
    parser.add_argument("--steps", type=int, default=20, help="steps measured per system, link and round")
    parser.add_argument("--seconds", type=float, default=10, help="fewer steps where they would take longer than this")
    parser.add_argument("--rounds", type=int, default=3, help="how often the systems take turns")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--plot", type=Path, help="file for a bar chart, such as step.png")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        return serve(arguments.serve)
    for system in arguments.systems:
        if system not in PEERS and "(" not in system:
            parser.error(f"unknown system {system!r}: {', '.join(PEERS)}, or a compressor such as 'DGC(ratio=0.01)'")
    for link in arguments.links:
        try:
            bits_per_second(link)
        except ValueError as error:
            parser.error(str(error))

    # an exit by signal, too, must leave the blocks that remove processes and namespaces
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    reason = lacking()
    if reason:
        note(f"no shaped links: {reason}. All ranks share the loopback interface instead.")
        arguments.links = ["none"]
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} at the start, {'loopback' if reason else 'network namespaces'}")
    groups = []
    for size in arguments.ranks:
        with Loopback(size) if reason else Namespaces(size, arguments.delay / 2) as network:
            for records in run(network, arguments):
                groups.append(records)
                print(f"\n{table(records)}", flush=True)
    everything = [record for records in groups for record in records]
    if arguments.json:
        about = {"cores": os.cpu_count(), "load": load, "torch": torch.__version__, "shaped": not reason}
        arguments.json.write_text(json.dumps({"machine": about, "records": everything}, indent=1))
    if arguments.plot:
        plot(groups, arguments.plot)
    sys.exit(any(record["error"] for record in everything))


if __name__ == "__main__":
    main()
