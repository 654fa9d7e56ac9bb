"""The tables and the figure of bench_time_to_loss.py: steps to the loss times the seconds of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from time_to_loss.losses import AUTO, SYSTEMS, Losses, Record, records

__all__ = ["LINKS", "table"]

LINKS = ("100mbit", "1gbit", "none")


def rows(seeds: Sequence[int]) -> Iterator[Record]:
    """Yield, for every cell with both measurements, the seconds until the loss is reached, seed by seed."""
    for one in records("steps"):
        known = Losses(one["task"], one["ranks"])
        method = SYSTEMS.get(one["system"], one["system"])
        start, before = 0.0, 0
        if one["system"] == AUTO:
            method, start, before = one["choice"], one["until"], one["in"]
        step = statistics.median(one["seconds"])
        times: list[float] = []
        for seed in seeds:
            try:
                reached = known.steps_to_target(method, seed)
            except KeyError:
                continue
            times.append(math.inf if reached is None else start + step * max(0, reached[0] - before))
        yield {**one, "method": method, "step": step, "times": times}


def words(times: Sequence[float]) -> str:
    """Return the median of seconds with their range."""
    if not times:
        return "no losses yet"
    if not math.isfinite(statistics.median(times)):
        return f"not reached ({sum(map(math.isinf, times))} of {len(times)})"
    return f"{statistics.median(times):.1f} ({min(times):.1f} - {max(times):.1f})"


def show(systems: Sequence[str], cell: Callable[[str, str], str]) -> None:
    """Print a table with a row for each system and a column for each link."""
    print("| system |" + "".join(f" {link} |" for link in LINKS))
    print("|---" * (1 + len(LINKS)) + "|")
    for system in systems:
        print(f"| {system} | " + " | ".join(cell(system, link) for link in LINKS) + " |")


def show_steps(known: Losses, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Print the steps that each method takes to the loss, seed by seed, at its learning rate."""
    print("| method | learning rate |" + "".join(f" seed {seed} |" for seed in seeds))
    print("|---" * (2 + len(seeds)) + "|")
    for method in methods:
        try:
            reached = [known.steps_to_target(method, seed) for seed in seeds]
        except KeyError:
            continue
        cells = ["not reached" if one is None else f"{one[0]} of {one[1] * known.task.steps:.0f}" for one in reached]
        print(f"| {method} | {known.best_rate(method):g} | " + " | ".join(cells) + " |")


def table(seeds: Sequence[int], figure: Path | None) -> None:
    """Print the tables of each task and number of ranks, and draw the figure."""
    found = list(rows(seeds))
    for task, size, speed in sorted({(one["task"], one["ranks"], one["speed"]) for one in found}):
        group = [one for one in found if (one["task"], one["ranks"], one["speed"]) == (task, size, speed)]
        mine = {(one["system"], one["link"]): one for one in group}
        systems = list(dict.fromkeys(system for system, _ in mine))

        def step(system: str, link: str, mine: Mapping[tuple[str, str], Record] = mine) -> str:
            one = mine.get((system, link))
            chosen = f" {one['choice']} after {one['until']:.0f} s" if one and system == AUTO else ""
            return f"{1e3 * one['step']:.0f}{chosen}" if one else ""

        def seconds(system: str, link: str, mine: Mapping[tuple[str, str], Record] = mine) -> str:
            one, bf16 = mine.get((system, link)), mine.get(("DDP bf16", link))
            text = words(one["times"]) if one else ""
            if one and bf16 and one["times"] and bf16["times"]:
                gain = statistics.median(bf16["times"]) / statistics.median(one["times"])
                text += f", {gain:.1f}x" if gain > 0 and math.isfinite(gain) else ""
            return text

        print(f"\n**{task}, {size} ranks, forward and backward {1e3 * group[0]['compute']:.3g} ms**")
        print("\nMilliseconds of a step:\n")
        show(systems, step)
        print("\nSeconds to the loss, and how many times faster than with DDP's bf16:\n")
        show(systems, seconds)
        print("\nSteps to the loss, of those of the run:\n")
        show_steps(Losses(task, size), list(dict.fromkeys(one["method"] for one in group)), seeds)
    for one in records("check"):
        where = f"{one['task']}, {one['ranks']} ranks, {one['link']}, {one['system']}"
        print(f"check: {where}: loss {one['loss']:.4f} after {one['steps']} steps, {one['seconds']:.1f} s")
    if figure is not None:
        plot(found, figure)


def plot(found: Sequence[Record], path: Path) -> None:
    """Bars of seconds: a panel for each task and number of ranks with losses of bf16, a group of bars for each link.

    All peers and `auto` are shown, and those of dgcopt's methods that are its fastest in a cell.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    known = [one for one in found if one["times"]]
    kinds = sorted({(one["task"], one["ranks"]) for one in known if one["system"] == "DDP bf16"})
    fastest: dict[tuple[str, int, str], Record] = {}
    for one in known:
        cell = one["task"], one["ranks"], one["link"]
        before = fastest.setdefault(cell, one) if one["system"] not in (*SYSTEMS, AUTO) else one
        if statistics.median(one["times"]) < statistics.median(before["times"]):
            fastest[cell] = one
    shown = {*SYSTEMS, AUTO, *(one["system"] for one in fastest.values())}
    systems = [system for system in dict.fromkeys(one["system"] for one in known) if system in shown]
    colours = dict(zip(systems, [*(f"C{place}" for place in range(10)), "black", "gold", "navy", "teal"], strict=False))
    figure, panels = plt.subplots(1, len(kinds), figsize=(1 + 4 * len(kinds), 4.6), squeeze=False, sharey=True)
    for panel, (task, ranks) in zip(panels[0], kinds, strict=True):
        for place, system in enumerate(systems):
            for group, link in enumerate(LINKS):
                about = {"task": task, "ranks": ranks, "system": system, "link": link}
                times = next((one["times"] for one in known if about.items() <= one.items()), None)
                if times is None:
                    continue
                at, colour = group + 0.8 * place / len(systems), colours[system]
                if math.isfinite(seconds := statistics.median(times)):
                    panel.bar(at, seconds, 0.8 / len(systems), color=colour)
                else:
                    panel.annotate("x", (at, 0.01), xycoords=("data", "axes fraction"), color=colour, ha="center")
        panel.set(title=f"{task}, {ranks} ranks", yscale="log")
        panel.set_xticks(
            [group + 0.4 for group in range(len(LINKS))],
            [{"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "none": "unshaped"}[link] for link in LINKS],
        )
    panels[0][0].set_ylabel("seconds to dense loss (x: not reached)")
    patches = [Patch(color=colour, label=system) for system, colour in colours.items()]
    figure.legend(handles=patches, loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, dpi=110)
