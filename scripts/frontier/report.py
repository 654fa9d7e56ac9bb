"""The sweeps, tables and figure of docs/frontier.md, from the finished runs of bench_frontier.py."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from frontier.plan import METHODS, STEPS, Method, Results, Run, best_settings, loss_in, ready, run_of, survivors, swept

__all__ = ["plot", "status", "table_of_seeds", "table_of_sweeps"]


def status(results: Results) -> None:
    """Print the losses of all sweeps, and the next run."""
    print(f"{len(results.runs)} runs in {results.path}; task {results.task}")
    for name, method in METHODS.items():
        for ranks in (method.ranks[0], *method.sweeps):
            print(f"{name:45} {ranks} ranks: {told(swept(method, results, ranks)[0], results)}")
    print(f"next: {next(ready(results), 'nothing')}")


def told(runs: dict[Run, dict[str, float]], results: Results) -> str:
    """The settings of runs and their losses."""
    return ", ".join(f"{shown(settings)}: {loss_in(results.runs[run.key]):.3f}" for run, settings in runs.items())


def shown(settings: dict[str, float]) -> str:
    """The learning rate, then the outer one and the momentum if there are any."""
    return " / ".join(f"{value:g}" for value in settings.values())


def fewer(entry: dict[str, Any]) -> str:
    """The cells of bytes per sample, and how many times fewer they are than with fp32 and bf16."""
    sent, dense = entry["bytes_per_sample"], entry["dense_bytes_per_sample"]
    return f"{sent:,.0f} | {dense / sent:,.0f}x | {dense / 2 / sent:,.1f}x" if sent else "0 | | "


def table_of_sweeps(results: Results) -> str:
    """All sweeps in markdown; best settings that have a neighbour which has not run yet are marked with "..."."""
    lines = [
        f"{STEPS // 2} steps, seed 0; settings are lr, or lr / outer lr / outer momentum\n",
        "| method | ranks | bytes per sample | vs fp32 | vs bf16 | best | loss | vs dense | all settings: loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, method in METHODS.items():
        for ranks in (method.ranks[0], *method.sweeps):
            found, ahead = swept(method, results, ranks)
            if not found:
                continue
            best, settings = next(iter(found.items()))
            entry, open_end = results.runs[best.key], "" if ahead is None else " ..."
            dense = next(map(results.loss, swept(METHODS["dense"], results, ranks)[0]), None) or math.nan
            cells = f"{fewer(entry)} | {shown(settings)}{open_end} | {loss_in(entry):.3f}"
            lines.append(f"| {name} | {ranks} | {cells} | {loss_in(entry) / dense - 1:+.1%} | {told(found, results)} |")
    return "\n".join(lines)


def paired(method: Method, results: Results, ranks: int) -> list[dict[str, Any]]:
    """Return the entries of the best settings at all steps, by seed."""
    if not (settings := best_settings(method, results, ranks)):
        return []
    runs = [run_of(method, settings, ranks, STEPS, seed, results.task) for seed in range(3)]
    return [results.runs[run.key] for run in runs if run.key in results.runs]


def table_of_seeds(results: Results, ranks: int) -> str:
    """The best settings in markdown: mean loss, and mean (range) of the change against dense, paired by seed."""
    lines = [
        f"{ranks} ranks, {STEPS} steps\n",
        "| method | settings | seeds | bytes per sample | vs fp32 | vs bf16 | loss | vs dense, paired |",
        "|---|---|---|---|---|---|---|---|",
    ]
    dense = {entry["run"]["seed"]: loss_in(entry) for entry in paired(METHODS["dense"], results, ranks)}
    for name, method in METHODS.items():
        at = 1 if method.ranks == (1,) else ranks  # training alone is the other end of the scale
        if not (found := paired(method, results, at)):
            continue
        gaps = [loss_in(e) / dense[e["run"]["seed"]] - 1 for e in found if e["run"]["seed"] in dense]
        gap = f"{statistics.mean(gaps):+.1%} ({min(gaps):+.1%} to {max(gaps):+.1%})" if gaps else ""
        loss = statistics.mean(map(loss_in, found))
        settings = shown(best_settings(method, results, ranks))
        lines.append(f"| {name} | {settings} | {len(found)} | {fewer(found[0])} | {loss:.3f} | {gap} |")
    return "\n".join(lines)


COLOURS = {"adamw": "C0", "adamw0": "C9", "muon": "C1", "sgd": "C2"}
OPTIMIZER_NAMES = {"adamw": "AdamW", "adamw0": "AdamW without first moment", "muon": "Muon", "sgd": "SGD"}


def plot(results: Results, path: Path) -> None:
    """Loss over bytes per sample at the best settings: of the sweeps, and of the paired seeds.

    Methods that no other beats with as few bytes have a large point and name. Those worse than one rank are left out.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    best = {
        name: results.runs[run.key]
        for name, method in METHODS.items()
        for run in list(swept(method, results)[0])[:1]
        if results.runs[run.key]["loss"] is not None
    }
    ahead = survivors(results)
    worst = max(loss_in(entry) for entry in best.values() if not entry["bytes_per_sample"])
    figure, panel = plt.subplots(figsize=(10, 6))
    for name, entry in best.items():
        method = METHODS[name]
        seeds = paired(method, results, method.ranks[0])
        colour, sent, loss = COLOURS[method.optimizer], entry["bytes_per_sample"], loss_in(entry)
        if not sent:
            panel.axhline(loss, color=colour, linestyle="--", linewidth=1)
            panel.annotate(name, (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
            continue
        if loss > worst:
            continue
        size, look = (7, {"fontsize": 8}) if name in ahead else (4, {"fontsize": 6, "color": "gray"})
        panel.plot(sent, loss, "o", color=colour, markersize=size, markerfacecolor="none" if seeds else colour)
        if seeds:
            losses = [loss_in(found) for found in seeds]
            mean = statistics.mean(losses)
            bar = [[mean - min(losses)], [max(losses) - mean]]
            panel.errorbar(sent, mean, yerr=bar, fmt="D", color=colour, markersize=size, capsize=3)
        side = {"xytext": (-6, -2), "ha": "right"} if name in ahead or sent > 1e4 else {"xytext": (5, -2)}
        panel.annotate(name, (sent, loss), textcoords="offset points", **side, **look)
    for optimizer, colour in COLOURS.items():
        panel.plot([], [], "o", color=colour, label=OPTIMIZER_NAMES[optimizer])
    panel.set_xscale("log")
    panel.set_xlim(left=panel.get_xlim()[0] / 20)  # room for names
    panel.set(xlabel="bytes sent per rank and sample", ylabel="validation loss")
    panel.set_title(f"Best settings. Circles: {STEPS // 2} steps, one seed; diamonds: {STEPS} steps", fontsize=10)
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize=8, title="optimizer of a rank", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
