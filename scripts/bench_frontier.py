"""Loss per byte of a small GPT: every method with tuned settings, on simulated ranks, resumable across days.

    chrt -i 0 nice -n 19 python scripts/bench_frontier.py run            # continue the plan; once per free core
    python scripts/bench_frontier.py status                              # finished runs, and the next ones
    python scripts/bench_frontier.py table --plot docs/frontier.png      # the tables and the figure of docs/frontier.md

A finished run is one line of docs/frontier.jsonl. A run that is killed leaves nothing and is repeated; a run whose
settings are in the file is not. So `run` may be killed at any moment, and adding a method to METHODS extends the plan.
Processes share the plan by a lock for each run, which the system frees when they end.

The plan has stages: sweeps of each method's settings, then paired seeds of the best, then more ranks
(frontier/plan.py). All ranks of a run train in one process and one thread (frontier/training.py).
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import time
from pathlib import Path

import torch
from frontier.plan import METHODS, Results, Run, ready
from frontier.report import plot, status, table_of_seeds, table_of_sweeps
from frontier.training import task_id, train

import dgcopt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "frontier.jsonl"


def work(results: Results, seconds: float) -> None:
    """Make the runs of the plan that no other process makes, and wait for those on which the next ones depend."""
    torch.set_num_threads(1)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        results.read()
        runs = [*ready(results)]
        if not runs:
            return
        for run in runs:
            with results.claimed(run) as ours:
                if ours:
                    make(run, results, commit)
                    break
        else:
            time.sleep(10)


def make(run: Run, results: Results, commit: str) -> None:
    """Make one run and add its result."""
    print(f"{time.strftime('%H:%M:%S')} {run.exchange} {run.optimizer} lr={run.lr:g} ", end="", flush=True)
    print(f"ranks={run.ranks} steps={run.steps} seed={run.seed}", end=": ", flush=True)
    try:
        result = train(run)
    except dgcopt.DivergenceError as error:
        result = {"loss": None, "error": str(error)[:200]}
    results.add(run, result, commit)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{result['loss']} in {result.get('cpu_seconds')} s of CPU, {memory:.1f} GB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "status", "table"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished runs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after so many seconds")
    parser.add_argument("--task", help="report an earlier version of the task, by the id in its lines")
    parser.add_argument("--plot", type=Path, help="file for a picture of loss over bytes")
    arguments = parser.parse_args()
    if arguments.task and arguments.command == "run":
        parser.error("--task is for reports: runs are of the current version")
    results = Results(arguments.results, arguments.task or task_id())
    if arguments.command == "run":
        work(results, arguments.seconds)
    elif arguments.command == "status":
        status(results)
    else:
        print(table_of_sweeps(results))
        for ranks in sorted({ranks for method in METHODS.values() for ranks in method.ranks} - {1}):
            print(f"\n{table_of_seeds(results, ranks)}")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
