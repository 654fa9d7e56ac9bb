"""Accuracy and bytes of compressors against dense training, over paired seeds and equal budgets.

    python scripts/bench_accuracy.py                                      # digits: dense and the presets, three seeds
    python scripts/bench_accuracy.py --task stdlib_gpt --compressors none dgc:ratio=0.01,warmup=null --workers 4

Each run is `torchrun --nproc-per-node WORKERS train.py` with configs/tasks/TASK.yaml and a compressor's config; the
same seed gives every compressor the same weights and batches. Bytes are everything that a rank sends, warm-up included.
Prints a table and writes it as JSON under runs/; --plot draws loss over bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_library import split

ROOT = Path(__file__).resolve().parent.parent


def train(task: str, compressor: str, seed: int, workers: int, extra: list[str], folder: Path) -> dict[str, float]:
    """Train once, unless the result is there already; return it."""
    name, _, settings = compressor.partition(":")
    output = folder / re.sub("[^a-z0-9.]+", "-", compressor) / f"seed-{seed}"
    result = output / "result.json"
    if not result.exists():
        shutil.rmtree(output, ignore_errors=True)
        overrides = [f"--compressor.{setting}" for setting in split(settings)]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)),
            *(str(ROOT / "train.py"), "--config", str(ROOT / f"configs/tasks/{task}.yaml")),
            *("--config", str(ROOT / f"configs/compressors/{name}.yaml"), *overrides),
            *("--seed", str(seed), "--output", str(output), *extra),
        ]
        log = folder / f"{output.parent.name}-{seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
        if code:
            sys.exit(f"{' '.join(command)} failed with code {code}; the end of {log}:\n{log.read_text()[-2000:]}")
    return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits", help="a file of configs/tasks, without .yaml")
    parser.add_argument(
        "--compressors",
        nargs="+",
        default=["none", "dgc", "dgc_compact"],
        help="files of configs/compressors, the first being the reference, with settings after a colon",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="file for a picture, such as accuracy.png")
    parser.add_argument("extra", nargs="*", help="after --, further arguments of train.py")
    arguments = parser.parse_args()

    folder = ROOT / "runs" / "bench_accuracy" / f"{arguments.task}-{arguments.workers}"
    rows = []
    for compressor in arguments.compressors:
        runs = [
            train(arguments.task, compressor, seed, arguments.workers, arguments.extra, folder)
            for seed in arguments.seeds
        ]
        rows.append({"compressor": compressor, "runs": runs})
        print(f"{compressor}: {len(runs)} runs", file=sys.stderr)

    reference = rows[0]["runs"]
    print(f"{arguments.task}, {arguments.workers} workers, seeds {arguments.seeds}: mean over seeds (range)\n")
    print(
        "| compressor | accuracy | final loss | loss minus dense, paired | bytes per rank, step | vs fp32 | vs bf16 |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        runs = row["runs"]
        gaps = [run["test_loss"] - dense["test_loss"] for run, dense in zip(runs, reference, strict=True)]
        print(
            f"| {row['compressor']} | {spread([run['accuracy'] for run in runs], '{:.2%}')} "
            f"| {spread([run['test_loss'] for run in runs], '{:.4f}')} | {spread(gaps, '{:+.4f}')} "
            f"| {runs[0]['sent_bytes']:,.0f} | {runs[0]['ratio_fp32']:.1f}x | {runs[0]['ratio_bf16']:.1f}x |"
        )
    path = folder / "table.json"
    path.write_text(json.dumps({"task": arguments.task, "workers": arguments.workers, "rows": rows}, indent=1))
    print(f"\n{path.relative_to(ROOT)}")
    if arguments.plot:
        plot(rows, f"{arguments.task}, {arguments.workers} workers", arguments.plot)


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Final loss over bytes: a point per compressor, its bar from the best seed to the worst."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 4 + 0.2 * len(rows)), layout="constrained")
    for row in rows:
        losses = [run["test_loss"] for run in row["runs"]]
        mean = statistics.mean(losses)
        bar = [[mean - min(losses)], [max(losses) - mean]]
        panel.errorbar(row["runs"][0]["sent_bytes"], mean, yerr=bar, fmt="o", capsize=4, label=row["compressor"])
    panel.set(title=title, xlabel="bytes sent per rank and step, warm-up included", ylabel="final test loss")
    panel.set_xscale("log")
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8)
    figure.savefig(path, dpi=120)


def spread(values: list[float], form: str) -> str:
    """Mean and range."""
    return f"{form.format(statistics.mean(values))} ({form.format(min(values))} to {form.format(max(values))})"


if __name__ == "__main__":
    main()
