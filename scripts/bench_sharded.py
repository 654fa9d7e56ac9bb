"""Seconds and bytes of a step of sharded parameters: two machines of two ranks each, and a slow link between them.

    python scripts/bench_sharded.py                            # as root: 100 Mbit/s between the machines
    python scripts/bench_sharded.py --systems hsdp-bf16 "DGC.compact(warmup=None)" --steps 3 --rounds 1

Each machine is a network namespace with one link, shaped by tc; its two ranks reach each other by its loopback
interface. FSDP2 shards ResNet-50's 161 parameters inside a machine, in groups (--groups), with weights and gradients of
forward and backward in bfloat16, and keeps weights from forward for backward. Systems: `fsdp`, inside each machine and
without any exchange between them, is the floor, which every other system has in it; `hsdp-bf16`, FSDP2's own averaging
on a mesh of two dimensions; `hsdp`, the same in float32; a compressor of dgcopt, by `DistributedOptimizer(...,
mesh=mesh["replicate"])`; the same `unsharded`, with one rank on each machine, for its bytes. Gradients are made once
and cost next to nothing. Bytes are those that leave a machine's interface, headers included. CPU seconds are a rank's,
of all its threads. Systems take turns, round after round. --json writes all that was measured.
"""

import argparse
import functools
import json
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from bench_step import Ranks, serve
from links import Machines, bits_per_second, lacking
from shaped_ranks import note
from synthetic import Layer, Synthetic
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, Optimizer

NATIVE = ("fsdp", "hsdp", "hsdp-bf16")
ALONE = "unsharded "
SHARDS = 2
GROUPS = "DGCOPT_BENCH_GROUPS"
"""Environment variable of the ranks: the number of FSDP2's groups."""
PRESETS = (*NATIVE, "BF16()", "DGC.compact(warmup=None)", f"{ALONE}DGC.compact(warmup=None)")


class Part(nn.Module):
    """Some of the parameters, and their gradients."""

    def __init__(self, params: list[nn.Parameter], gradients: list[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)
        self.gradients = gradients

    def forward(self, signal: Tensor) -> Tensor:
        for param, gradient in zip(self.params, self.gradients, strict=True):
            signal = Layer.apply(signal, param, lambda gradient=gradient: gradient)
        return signal


class Parts(nn.Module):
    """The parameters of `Synthetic` in groups of about equal size."""

    def __init__(self, model: Synthetic) -> None:
        super().__init__()
        params, total, seen = [*model.params], sum(param.numel() for param in model.params), 0
        groups = int(os.environ[GROUPS])
        members: list[list[int]] = [[] for _ in range(groups)]
        for place, param in enumerate(params):
            members[min(groups - 1, seen * groups // total)].append(place)
            seen += param.numel()
        self.parts = nn.ModuleList(
            Part([params[place] for place in group], [model.gradients[place] for place in group]) for group in members
        )

    def forward(self) -> Tensor:
        signal = torch.zeros(())
        for part in self.parts:
            signal = part(signal)
        return signal


def build(system: str, model: Synthetic) -> tuple[nn.Module, Optimizer]:
    """The module whose backward is run, and the optimizer that steps."""
    import dgcopt

    sgd = functools.partial(SGD, lr=1e-6, momentum=0.9)
    if system.startswith(ALONE):
        dgcopt.init()
        compressor = eval(system.removeprefix(ALONE), vars(dgcopt))
        return model, dgcopt.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), compressor)
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
    dtype = None if system == "hsdp" else torch.bfloat16
    model.gradients = [gradient.to(dtype) for gradient in model.gradients]
    policy, parts = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype), Parts(model)
    over = mesh if system.startswith("hsdp") else mesh["shard"]
    for module in (*parts.parts, parts):
        fully_shard(module, mesh=over, mp_policy=policy, reshard_after_forward=False)
    optimizer = sgd(parts.parameters())
    if system not in NATIVE:
        dgcopt.init()
        compressor = eval(system, vars(dgcopt))
        dgcopt.DistributedOptimizer(optimizer, parts.named_parameters(), compressor, mesh=mesh["replicate"])
    return parts, optimizer


class ShardedRanks(Ranks):
    """The processes of one system, which this script serves."""

    script = __file__


def measure(system: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a system's ranks on two machines, and measure its steps."""
    ranks_each = 1 if system.startswith(ALONE) else SHARDS
    with Machines(2, ranks_each, arguments.delay / 2) as network, ShardedRanks(system, network) as ranks:
        network.shape(arguments.link)
        ranks.measure(1)
        return ranks.measure(arguments.steps)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """One row per system, with its seconds and those beyond the floor, against `hsdp-bf16`."""
    medians = {system: statistics.median(s for each in of for s in each["seconds"]) for system, of in runs.items()}
    sent, cpu = (
        {system: statistics.median(each[name] for each in of) for system, of in runs.items()}
        for name in ("sent", "cpu")
    )
    lines = [
        "| system | s per step | CPU s per rank | bytes per step that leave a machine | times faster than hsdp-bf16 "
        "| s beyond fsdp | CPU s beyond fsdp |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, seconds in medians.items():
        is_sharded = ALONE not in system
        faster = f"{medians['hsdp-bf16'] / seconds:.1f}" if "hsdp-bf16" in medians and is_sharded else ""
        has_floor = "fsdp" in medians and is_sharded and system != "fsdp"
        beyond = [f"{of[system] - of['fsdp']:.3f}" if has_floor else "" for of in (medians, cpu)]
        cells = [system, f"{seconds:.3f}", f"{cpu[system]:.3f}", f"{sent[system]:,.0f}", faster, *beyond]
        lines.append(f"| {' | '.join(cells)} |")
    for system in runs:
        if ALONE + system in sent:
            apart = sent[system] / sent[ALONE + system] - 1
            lines.append(
                f"\nBytes per rank of {system}: unsharded / {SHARDS} {apart:+.1%} (a machine's {SHARDS} ranks together "
                f"send {sent[system]:,.0f}, one rank unsharded {sent[ALONE + system]:,.0f})"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit", help="rate between the machines, as tc writes it")
    parser.add_argument("--delay", type=float, default=0, help="milliseconds from a machine to another")
    parser.add_argument("--systems", nargs="+", default=[*PRESETS], metavar="SYSTEM", help="see above")
    parser.add_argument("--groups", type=int, default=10, help="FSDP2's groups of about equal size")
    parser.add_argument("--steps", type=int, default=5, help="steps measured per system and round")
    parser.add_argument("--rounds", type=int, default=3, help="how often the systems take turns")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        return serve(arguments.serve, build)
    for system in arguments.systems:
        if system not in NATIVE and "(" not in system:
            parser.error(f"unknown system {system!r}: {', '.join(NATIVE)}, or a compressor such as 'DGC(ratio=0.01)'")
    try:
        bits_per_second(arguments.link)
    except ValueError as error:
        parser.error(str(error))
    if reason := lacking():
        parser.exit(1, f"two machines need shaped links: {reason}\n")
    os.environ[GROUPS] = str(arguments.groups)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    load, runs = os.getloadavg()[0], dict[str, list[dict[str, Any]]]()
    for number in range(arguments.rounds):
        for system in arguments.systems:
            note(f"round {number + 1} of {arguments.rounds}: {system}")
            runs.setdefault(system, []).append(measure(system, arguments))
    print(f"2 machines of {SHARDS} ranks, {arguments.link}, {os.cpu_count()} cores, load {load:.1f} at the start\n")
    print(table(runs))
    if arguments.json:
        about = {"cores": os.cpu_count(), "load": load, "torch": torch.__version__, "link": arguments.link}
        arguments.json.write_text(json.dumps({"machine": about, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
