"""Bytes against loss for averaging now and then: what H local steps between exchanges cost, beside compression alone.

    python scripts/bench_averaging.py --task digits --plot docs/averaging_digits.png
    python scripts/bench_averaging.py --task stdlib_gpt --seeds 0 --methods none local_sgd:every=32

Methods are files of configs/averaging or configs/compressors, with settings after a colon, also of the optimizer. As in
scripts/bench_library.py, whose results these extend: simulated ranks, a process per run and a run per core, equal
initial weights and batches for all methods of a seed. A run is measured by the weights of its first rank, which all
ranks share where H divides the steps; "alone" has no exchange at all. Bytes are all that a rank sends, per sample that
it has seen. Runs whose results are under runs/ are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import statistics
from pathlib import Path
from typing import Any

from bench_library import ROOT, evaluate, learn, run_all, settings_of, spread

import dgcopt

PLANS: dict[str, dict[str, Any]] = {
    "digits": {"workers": 4, "batch_size": 16, "steps": 1280, "warmup": 128},
    "stdlib_gpt": {"workers": 2, "batch_size": 16, "steps": 512, "warmup": 0},
}
"""A run of a task: learning rates warm up over so many steps, and fall to zero along a cosine."""

SPARSE = {
    "digits": "dgc:ratio=0.01,warmup=null,values=int2,indices=rice,vectors=int8",
    "stdlib_gpt": "topk:optimizer.betas=[0.0,0.95],values=int2,indices=rice",
}
EVERY = (1, 8, 32, 128)
"""Local steps between exchanges of weights."""

MOMENTUM = {1: "0.0,outer.init_args.nesterov=false,outer.init_args.lr=1.0", 8: "0.5", 32: "0.5", 128: "0.5"}
"""Of outer optimizers: 0.9, which is for far more outer steps than there are here, is worse than none."""

METHODS = {
    task: [
        "none",
        "alone",
        SPARSE[task],
        "powersgd",
        *(f"local_sgd:every={every}" for every in EVERY),
        *(f"slowmo:every={every},base.init_args.every={every}" for every in EVERY),
        *(f"diloco:every={every},outer.init_args.momentum={MOMENTUM[every]}" for every in EVERY),
        *(f"diloco_dgc:every={every},outer.init_args.momentum={MOMENTUM[every]}" for every in EVERY),
        *(f"diloco:every={every},outer.init_args.momentum=0.5,compression=dgcopt.OneBit" for every in (32, 128)),
        *(f"sparta:fraction={fraction}" for fraction in (0.01, 0.0001)),
    ]
    for task in PLANS
}
"""What is compared, dense training first."""


def train(task: str, method: str, seed: int, plan: dict[str, Any]) -> dict[str, Any]:
    """What comes of a method with a seed."""
    settings, workers, steps = settings_of(task, method), plan["workers"], plan["steps"]
    models = [copy.deepcopy(settings["model"]) for _ in range(workers)]
    optimizers: list[Any] = []
    for model, comm in zip(models, dgcopt.simulated_world(workers), strict=True):
        optimizer = settings["optimizer"](model.parameters())
        if settings["averaging"] is not None:
            settings["averaging"].attach(optimizer, model.named_parameters(), comm)
        elif method != "alone":
            dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), settings["compressor"], comm=comm)
        optimizers.append(optimizer)
    curve = learn(models, optimizers, settings, plan, seed)
    elements = sum(param.numel() for param in models[0].parameters())
    sender = getattr(optimizers[0], "averaging", optimizers[0])
    return {
        "sent_bytes": sender.telemetry.sent_bytes / steps if method != "alone" else 0.0,
        "dense_bytes": 2 * 4 * elements * (workers - 1) / workers,
        "curve": curve,
        **evaluate(models[0], settings["test_data"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits", choices=sorted(PLANS))
    parser.add_argument("--methods", nargs="+", help="files of configs/, with settings after a colon")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--workers", type=int, help="simulated ranks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--plot", type=Path, help="file for a picture of loss over bytes")
    arguments = parser.parse_args()
    plan = PLANS[arguments.task] | {k: value for k in ("steps", "workers") if (value := getattr(arguments, k))}
    methods = arguments.methods or METHODS[arguments.task]

    folder = ROOT / "runs" / "bench_averaging" / "-".join([arguments.task, *map(str, plan.values())])
    jobs = [(arguments.task, name, seed, plan) for seed in arguments.seeds for name in methods]
    runs = run_all(train, jobs, folder, arguments.jobs)
    title = f"{arguments.task}, {plan['workers']} workers, {plan['steps']} steps"
    print(f"{title}, seeds {arguments.seeds}: mean (range)\n")
    print("| method | bytes per sample | vs fp32 | final loss | vs dense | accuracy |\n|---|---|---|---|---|---|")
    rows = {name: [run for run in runs if run["method"] == name] for name in methods}
    dense = statistics.mean(run["test_loss"] for run in rows[methods[0]])
    for name, of in rows.items():
        sent, loss = of[0]["sent_bytes"], statistics.mean(run["test_loss"] for run in of)
        fewer = f"{of[0]['dense_bytes'] / sent:,.0f}x" if sent else "-"
        losses = spread([run["test_loss"] for run in of], "{:.3f}")
        accuracy = spread([run["accuracy"] for run in of], "{:.2%}")
        per_sample = sent / plan["batch_size"]
        print(f"| {name} | {per_sample:,.1f} | {fewer} | {losses} | {loss / dense - 1:+.1%} | {accuracy} |")
    if arguments.plot:
        plot(rows, plan["batch_size"], title, arguments.plot)


def plot(rows: dict[str, list[dict[str, Any]]], batch_size: int, title: str, path: Path) -> None:
    """Final loss over bytes: a line per algorithm, from H = 1 on the right to the largest on the left."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(9, 5.5))
    families: dict[str, list[tuple[float, list[float], str]]] = {}
    for name, runs in rows.items():
        family, _, settings = name.partition(":")
        if code := re.search(r"compression=dgcopt\.(\w+)", settings):
            family += f" {code[1]}"
        losses = [run["test_loss"] for run in runs]
        every = re.search(r"every=(\d+)", settings)
        if runs[0]["sent_bytes"]:
            entry = (runs[0]["sent_bytes"] / batch_size, losses, f"H={every[1]}" if every else family)
            families.setdefault(family, []).append(entry)
        else:
            panel.axhline(statistics.mean(losses), color="gray", linestyle=":", label=f"{name}: no exchange")
    for family, points in families.items():
        means = [statistics.mean(losses) for _, losses, _ in points]
        bars = [
            [mean - min(losses) for mean, (_, losses, _) in zip(means, points, strict=True)],
            [max(losses) - mean for mean, (_, losses, _) in zip(means, points, strict=True)],
        ]
        panel.errorbar([sent for sent, _, _ in points], means, yerr=bars, fmt="o-", capsize=3, label=family)
        for mean, (sent, _, label) in zip(means, points, strict=True):
            panel.annotate(label, (sent, mean), xytext=(4, 5), textcoords="offset points", fontsize=7)
    panel.set(title=title, xlabel="bytes sent per sample", ylabel="final test loss")
    panel.set_xscale("log")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
