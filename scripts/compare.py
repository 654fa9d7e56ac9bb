"""Print what several runs of train.py came to, and draw their loss curves.

    python scripts/compare.py runs/digits_dense runs/digits_dgc --plot runs/digits.png

The runs must have had two workers or more: one alone sends nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt


def problem_with(run: Path) -> str:
    """Why a run cannot be compared; nothing if it can."""
    if not (run / "history.jsonl").is_file():
        return f"{run} is not the output folder of a run of train.py: it has no history.jsonl"
    if not (run / "result.json").is_file():
        return f"{run} has no result.json: the run has not ended; end it with train.py --resume"
    if "ratio_fp32" not in json.loads((run / "result.json").read_text()):
        return f"{run} is a run of one worker, which sends nothing: compare runs of two workers or more"
    if not any("ratio_fp32" in entry for entry in history(run)):
        return f"{run} has no step in its history.jsonl: let it log one, with train.py --log_steps"
    return ""


def history(run: Path) -> list[dict[str, Any]]:
    """The entries of a run, oldest first."""
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def table(runs: list[Path]) -> str:
    """One line per run; traffic is what one worker sends in a mean step of all, and of the last that were logged."""
    rows = ["run                accuracy    bytes/step  vs fp32  vs bf16     at the end  vs fp32  vs bf16  seconds"]
    for run in runs:
        whole = json.loads((run / "result.json").read_text())
        end = [entry for entry in history(run) if "loss" in entry][-1]
        row = f"{run.name:<18} {whole['accuracy']:>8.2%}"
        for part in (whole, end):
            row += f"  {part['sent_bytes']:>12,.0f} {part['ratio_fp32']:>7.1f}x {part['ratio_bf16']:>7.1f}x"
        rows.append(f"{row} {whole['seconds']:>8.1f}")
    return "\n".join(rows)


def other_budgets(runs: list[Path]) -> str:
    """The steps and workers of the runs, if they are not the same; nothing if they are."""
    results = {run.name: json.loads((run / "result.json").read_text()) for run in runs}
    budgets = {name: f"{whole['steps']} steps of {whole['workers']} workers" for name, whole in results.items()}
    if len(set(budgets.values())) == 1:
        return ""
    return "not the same budget: " + ", ".join(f"{name} {budget}" for name, budget in budgets.items())


def plot(runs: list[Path], path: Path) -> None:
    """Training loss on the left, test loss on the right, both over epochs."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for panel, key, title in zip(panels, ("loss", "test_loss"), ("training loss", "test loss"), strict=True):
        for run in runs:
            points = [(entry["epoch"], entry[key]) for entry in history(run) if key in entry]
            panel.plot(*zip(*points, strict=True), label=run.name)
        panel.set(title=title, xlabel="epoch", yscale="log")
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of train.py")
    parser.add_argument("--plot", type=Path, help="file for the loss curves, such as losses.png")
    arguments = parser.parse_args()
    for problem in filter(None, map(problem_with, arguments.runs)):
        parser.exit(2, f"{parser.prog}: {problem}\n")
    print(table(arguments.runs))
    if budgets := other_budgets(arguments.runs):
        print(f"\n{budgets}")
    if arguments.plot:
        plot(arguments.runs, arguments.plot)
