"""The sweeps, tables and figure of docs/frontier.md, from the finished runs of bench_frontier.py."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from frontier.plan import METHODS, STEPS, Method, Results, Run, best_settings, loss_in, ready, run_of, swept

__all__ = ["plot", "status", "table_of_seeds", "table_of_sweeps"]


def status(results: Results) -> None:
    """Print the losses of all sweeps, and the next run."""
    print(f"{len(results.runs)} runs in {results.path}; task {results.task}")
    for name, method in METHODS.items():
        print(f"{name:45} {told(swept(method, results)[0], results)}")
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
    dense = min((loss_in(results.runs[run.key]) for run in swept(METHODS["dense"], results)[0]), default=math.nan)
    for name, method in METHODS.items():
        found, ahead = swept(method, results)
        if not found:
            continue
        best, settings = next(iter(found.items()))
        entry, open_end = results.runs[best.key], "" if ahead is None else " ..."
        cells = f"{fewer(entry)} | {shown(settings)}{open_end} | {loss_in(entry):.3f}"
        lines.append(
            f"| {name} | {method.ranks[0]} | {cells} | {loss_in(entry) / dense - 1:+.1%} | {told(found, results)} |"
        )
    return "\n".join(lines)


def paired(method: Method, results: Results, ranks: int) -> list[dict[str, Any]]:
    """Return the entries of the best settings at all steps, by seed."""
    if not (settings := best_settings(method, results)):
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
        settings = shown(best_settings(method, results))
        lines.append(f"| {name} | {settings} | {len(found)} | {fewer(found[0])} | {loss:.3f} | {gap} |")
    return "\n".join(lines)


def plot(results: Results, path: Path) -> None:
    """Loss over bytes per sample at the best settings: of the sweeps, and of the paired seeds above them."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(9, 5.5))
    for number, (name, method) in enumerate(METHODS.items()):
        best = [results.runs[run.key] for run in list(swept(method, results)[0])[:1]]
        seeds = paired(method, results, method.ranks[0])
        colour = f"C{number % 10}"
        for entries, style in ((best, "o"), (seeds, "D")):
            losses = [loss_in(entry) for entry in entries if entry["loss"] is not None]
            if not losses:
                continue
            mean, sent = statistics.mean(losses), entries[0]["bytes_per_sample"]
            if not sent:
                line, told = "--" if style == "o" else "-", f"{name}, {entries[0]['run']['steps']} steps"
                panel.axhline(mean, color="gray", linestyle=line, linewidth=1, label=told)
                continue
            bar = [[mean - min(losses)], [max(losses) - mean]]
            fill = "none" if style == "o" else colour
            panel.errorbar(sent, mean, yerr=bar, fmt=style, color=colour, markerfacecolor=fill, capsize=3)
            panel.annotate(name, (sent, mean), xytext=(5, 4), textcoords="offset points", fontsize=7)
    panel.set_xscale("log")
    panel.margins(x=0.2)  # room for names
    panel.set(xlabel="bytes sent per rank and sample", ylabel="validation loss")
    panel.set_title(f"Best settings. Circles: {STEPS // 2} steps, one seed; diamonds: {STEPS} steps", fontsize=10)
    panel.grid(alpha=0.3, which="both")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
