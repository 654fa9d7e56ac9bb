"""Figures of the exchange to use over bandwidth and number of ranks, the region where compression loses included."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .advise import BASELINES, Prediction

__all__ = ["RANKS", "RATES", "plot_regions", "pyplot"]

RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
RATES = tuple(bits / 8 for bits in (1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11))
"""Bytes per second of links of 100 Mbit/s to 100 Gbit/s."""

Choice = Callable[[int, float], tuple[Prediction, float]]
"""For ranks and bytes per second: the exchange to use, and how many times as fast as the best dense one it is."""


def pyplot() -> Any:
    """Return matplotlib's pyplot, for a machine without a display. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_regions(panels: Sequence[tuple[str, Choice]], names: Sequence[str], columns: int, path: Path) -> None:
    """Draw a panel for each title: in each cell the exchange to use, and how many times as fast as DDP its step is.

    `names` are those of all exchanges, whose colours are the same in all panels. Raises ConfigError without matplotlib,
    and for a file that cannot be written.
    """
    plt = pyplot()
    shades = [*(f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9)), "gold", "navy", "teal"]  # none is grey
    colours = dict(zip((name for name in names if name not in BASELINES), itertools.cycle(shades), strict=False))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(1 + 4.4 * columns, 1.4 + 3.4 * rows), squeeze=False)
    used = set()
    for axis, (title, choose) in zip(axes.flat, panels, strict=False):
        for row, size in enumerate(RANKS):
            for column, bandwidth in enumerate(RATES):
                best, gain = choose(size, bandwidth)
                used.add(best.name)
                shade = colours.get(best.name, "0.85")
                axis.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, color=shade, alpha=0.75))
                axis.text(column, row, f"{gain:.3g}", ha="center", va="center", fontsize=7)
        axis.set(xlim=(-0.5, len(RATES) - 0.5), ylim=(-0.5, len(RANKS) - 0.5), ylabel="ranks")
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(len(RATES)), [f"{8 * rate / 1e9:g}" for rate in RATES])
        axis.set_yticks(range(len(RANKS)), list(map(str, RANKS)))
        axis.set_xlabel("Gbit/s")
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name], alpha=0.75, label=name) for name in names if
               name in used and name in colours]  # fmt: skip
    handles.append(plt.Rectangle((0, 0), 1, 1, color="0.85", label="DDP: compression does not pay"))
    figure.legend(handles=handles, loc="lower center", ncols=min(3, len(handles)), fontsize=8)
    figure.suptitle("In each cell: the step of the best dense exchange over the one to use", fontsize=10)
    figure.tight_layout(rect=(0, 0.9 / (1.4 + 3.4 * rows), 1, 1))
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        plt.close(figure)
