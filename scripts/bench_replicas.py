"""Loss over bytes of a GPT on the source of Python's library: dense, averaged now and then, and sparse updates.

    python scripts/bench_replicas.py --device cuda --seconds 540 --plot replicas.png
    python scripts/bench_replicas.py --device cpu --shape 2 2 64 --context 32 --replicas 2 --steps 12

All replicas of a method train in one process, on simulated ranks, which gives the bits of real ones; a process per
method, all at once on the device. All methods start from the same weights and see the same batches. Learning rates rise
over a tenth of the steps and stay: after --seconds, methods stop where they are, and are compared at the last step that
all have reached. Bytes are all that one rank sends.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dgcopt
from dgcopt.tasks.stdlib_gpt import CharGPT, StdlibText

METHODS = {
    "dense": "NoCompression()",
    "LocalSGD": "LocalSGD(every=50)",
    "DiLoCo": "DiLoCo(every=50)",
    "SparseLoCo": "SparseLoCo(every=50)",
    "TopK of updates, 1%": "TopK(ratio=0.01, source='update')",
    "TopK of updates, 0.1%": "TopK(ratio=0.001, source='update')",
}
OFTEN = 25
"""Steps between two entries of a curve."""


def batch(text: Tensor, count: int, context: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Characters, and the next ones, from anywhere in a text."""
    starts = torch.randint(len(text) - context, (count, 1), generator=random)
    windows = text[(starts + torch.arange(context + 1)).to(text.device)].long()
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16):
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(method: str, plan: argparse.Namespace, path: Path) -> None:
    """Train until the last step or second; `path` holds the curve, of steps, bytes and losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device, end = plan.device, time.monotonic() + plan.seconds
    texts = {split: StdlibText(split, plan.context).text.to(device) for split in ("train", "validation")}
    model = CharGPT(*plan.shape, context=plan.context).to(device)
    models = [copy.deepcopy(model) for _ in range(plan.replicas)]
    chosen = eval(METHODS[method], vars(dgcopt))
    sparse = isinstance(chosen, dgcopt.TopK)  # of which what waits is momentum enough
    make = functools.partial(torch.optim.AdamW, betas=(0.0 if sparse else 0.9, 0.95), weight_decay=0.1)
    optimizers: list[Any] = []
    for replica, comm in zip(models, dgcopt.simulated_world(plan.replicas), strict=True):
        adam = make(replica.parameters(), lr=plan.lr, fused=device.type == "cuda")
        if isinstance(chosen, dgcopt.Averaging):
            optimizers.append(chosen.attach(adam, replica.named_parameters(), comm))
        else:
            optimizers.append(dgcopt.DistributedOptimizer(adam, replica.named_parameters(), chosen, comm=comm))
    sender = getattr(optimizers[0], "averaging", optimizers[0])
    random = torch.Generator().manual_seed(1)
    curve: list[list[float]] = []
    losses: list[Tensor] = []
    for step in range(1, plan.steps + 1):
        for replica, optimizer in zip(models, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = plan.lr * min(1.0, step / max(1, plan.steps // 10))
            optimizer.zero_grad()
            loss = loss_of(replica, *batch(texts["train"], plan.batch, plan.context, random))
            loss.backward()
            losses.append(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
        if step % OFTEN == 0 or step == plan.steps:
            mean, losses = float(torch.stack(losses).mean()), []
            curve.append([step, sender.telemetry.sent_bytes, mean, validation(models[0], texts, plan)])
            path.write_text(json.dumps({"method": method, "curve": curve}))
            if time.monotonic() > end:
                break


@torch.no_grad()
def validation(model: nn.Module, texts: dict[str, Tensor], plan: argparse.Namespace) -> float:
    """Loss on some text of other files, the same each time."""
    random = torch.Generator().manual_seed(2)
    return statistics.mean(
        float(loss_of(model, *batch(texts["validation"], 64, plan.context, random))) for _ in range(2)
    )


def table(runs: list[dict[str, Any]], millions: float, plan: argparse.Namespace) -> str:
    """In markdown, at the last step that all methods have reached."""
    last = min(run["curve"][-1][0] for run in runs)
    lines = [f"**A GPT of {millions:.1f} million parameters, {plan.replicas} replicas, after {last:.0f} steps**\n"]
    lines.append(
        "| method | bytes sent | per step | of dense | training loss | validation loss |\n|---|---|---|---|---|---|"
    )
    at = [next(entry for entry in run["curve"] if entry[0] == last) for run in runs]
    for run, (_, sent, loss, held_out) in zip(runs, at, strict=True):
        share = sent / at[0][1] if at[0][1] else math.nan
        cells = f"{sent:,.0f} | {sent / last:,.0f} | {share:.2%} | {loss:.3f} | {held_out:.3f}"
        lines.append(f"| {run['method']}: `{METHODS[run['method']]}` | {cells} |")
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Validation loss over bytes, and over steps."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for panel, column, title in zip(panels, (1, 0), ("bytes sent by a rank", "step"), strict=True):
        for run in runs:
            points = [(entry[column], entry[3]) for entry in run["curve"] if entry[column]]
            panel.plot(*zip(*points, strict=True), label=run["method"])
        panel.set(xlabel=title, ylabel="validation loss")
        panel.grid(alpha=0.3)
    panels[0].set_xscale("log")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, or cuda")
    parser.add_argument("--shape", nargs=3, type=int, default=[10, 8, 512], help="layers, heads and width of the GPT")
    parser.add_argument("--context", type=int, default=256, help="characters of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples of a replica and step")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which methods stop where they are")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--folder", type=Path, default=Path("runs/replicas"), help="folder for the curves")
    parser.add_argument("--plot", type=Path, help="file for a picture of the curves")
    plan = parser.parse_args()
    plan.folder.mkdir(parents=True, exist_ok=True)
    paths = {method: plan.folder / f"{list(METHODS).index(method)}.json" for method in plan.methods}
    for path in paths.values():
        path.unlink(missing_ok=True)
    start = multiprocessing.get_context("spawn")
    processes = {method: start.Process(target=train, args=(method, plan, path)) for method, path in paths.items()}
    for process in processes.values():
        process.start()
    for process in processes.values():
        process.join()
    failed = [method for method, process in processes.items() if process.exitcode]
    runs = [json.loads(path.read_text()) for method, path in paths.items() if method not in failed]
    numel = sum(p.numel() for p in CharGPT(*plan.shape, context=plan.context).parameters())
    if runs:
        print(table(runs, numel / 1e6, plan))
    if runs and plan.plot:
        plot(runs, plan.plot)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
