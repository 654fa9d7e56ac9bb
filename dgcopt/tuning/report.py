"""One HTML page about runs of train.py: loss, seconds, bytes, and where the time of a step goes. No server, no network.

Read from each run's folder: `history.jsonl` (entries by step), `result.json`, and traces `trace-*.json`, if there are.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..exchange.trace import ROWS

__all__ = ["Run", "read_run", "write_report"]

BUCKET = re.compile(r"bucket \d+(?: \([^)]*\))?")
Entry = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: of its folder.
        entries: of the history that hold a loss.
        result: of the whole run; empty before its end, also that of a resumed run.
        notes: lines of the history about choices, with their steps.
        phases: seconds by phase and step in the trace of each rank: `[rank][phase]`.
        sent: bytes of messages by bucket over the traced steps of rank 0.
        steps: number of traced steps.
    """

    name: str
    entries: Sequence[Entry]
    result: Entry = field(default_factory=dict)
    notes: Sequence[str] = ()
    phases: dict[int, Counter[str]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    steps: int = 0


NUMBERS = {"step", "steps", "loss", "accuracy", "seconds", "workers", "skipped", "sent_bytes", "ratio_fp32"}
NUMBERS |= {"residual_norm", "wait_seconds", "compress_seconds", "apply_seconds"}
"""Values of a history or result that the page counts with."""


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises ConfigError if it holds no history, or a damaged file; it names the file and line."""
    entries = [_checked(entry, place, ("step",)) for place, entry in _objects(folder / "history.jsonl")]
    path = folder / "result.json"
    text = _text(path) if path.exists() else "{}"
    try:
        result = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}. Delete it to see the history alone") from error
    result = _checked(result, path, ())
    if entries and result.get("steps", math.inf) < entries[-1]["step"]:
        result = {}  # of an earlier part of a run that was resumed, and has not ended
    notes = [str(one["note"]) for one in entries if "note" in one]
    # any bytes; of "." too
    name = os.fsencode(folder.name or folder.resolve().name).decode("utf-8", "backslashreplace")
    run = Run(name, [one for one in entries if "loss" in one], result, notes)
    for file in sorted(folder.glob("trace-*.json")):
        run = _with_trace(run, file)
    return run


def read_trace(path: Path) -> list[Entry]:
    """Return the events of a trace, whose closing bracket may be missing. Raises ConfigError for another file."""
    return [event for _, event in _objects(path)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Give a folder that train.py has written") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: it is no text. Delete it, or give another folder") from error


def _objects(path: Path) -> Iterator[tuple[str, Entry]]:
    """Yield the objects of a history or trace, one a line, each with its place; a killed run has cut the last line."""
    *lines, last = _text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if (text := line.strip().rstrip(",")) in ("", "[", "]"):
            continue
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}, is damaged: {error}. Delete the line") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path}, line {number}, is no object of JSON: train.py has not written it")
        yield f"{path}, line {number}", found
    if last.startswith("[{"):  # all on one line, as other programs write traces
        raise ConfigError(f"{path} is no history and no trace of dgcopt.trace, which have a line for each entry")


def _checked(entry: Entry, place: Path | str, needed: Sequence[str]) -> Entry:
    """Return an entry of a history or result. Raises ConfigError for one that train.py has not written."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{place} is no object of JSON: train.py has not written it")
    for name in (*needed, *(name for name in entry if name in NUMBERS)):
        if not _is_number(entry.get(name)):
            raise ConfigError(f"{place}: {name!r} is {entry.get(name)!r:.50}, no number: train.py has not written it")
    return entry


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _with_trace(run: Run, path: Path) -> Run:
    """Return a run with the phases of one rank's trace."""
    everything = read_trace(path)
    events = [event for event in everything if event.get("ph") == "X"]
    seconds: Counter[str] = Counter()
    sent: Counter[str] = Counter(run.sent)
    try:
        rank = int(events[0]["pid"]) if events else 0
        for event in events:
            row = ROWS[event["tid"]]
            seconds[row] += event["dur"] / 1e6
            if row == "queued" and rank == 0:
                found = BUCKET.search(event["name"])
                sent[found[0] if found else "other"] += event["args"]["bytes"]
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is no trace of dgcopt.trace: {error!r}") from error
    steps = sum(event.get("ph") == "i" for event in everything)
    return replace(run, phases={**run.phases, rank: seconds}, sent=sent, steps=max(run.steps, steps))


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write a page about runs. Raises ConfigError without matplotlib or jinja2, and for files that fail."""
    try:
        import jinja2
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"dgcopt report needs {error.name}: pip install matplotlib jinja2") from error
    matplotlib.use("Agg")  # no display needed
    matplotlib.rcParams["text.parse_math"] = False  # a dollar in a folder's name is one
    matplotlib.rcParams["svg.hashsalt"] = "dgcopt"  # the same page from the same runs
    runs = [read_run(folder) for folder in folders]
    template = jinja2.Environment(autoescape=True).from_string(
        Path(__file__).with_name("report.html").read_text("utf-8")
    )
    names = ", ".join(run.name for run in runs)
    page = template.render(title=f"dgcopt report: {names}", columns=COLUMNS, rows=_rows(runs), sections=_sections(runs))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


COLUMNS = ("run", "ranks", "steps", "accuracy", "last loss", "seconds", "sent, MB a step", "ratio to fp32", "skipped")


def _rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a line for each run."""
    rows = []
    for run in runs:
        last: Entry = run.entries[-1] if run.entries else {}
        found = {**last, **run.result}
        sent = found.get("sent_bytes")
        values = [found.get("workers"), found.get("steps", found.get("step")), found.get("accuracy"), last.get("loss")]
        values += [found.get("seconds"), sent and sent / 1e6, found.get("ratio_fp32"), found.get("skipped")]
        rows.append([run.name, *("" if value is None else f"{value:.4g}" for value in values)])
    return rows


def _sections(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the sections of the page: those for which the runs hold numbers."""
    return [
        *_curves(runs, "loss", "Loss", [STEP, ("seconds", "seconds", 1.0), ("sent_total", "MB sent by a rank", 1e6)]),
        _phases(runs),
        _buckets(runs),
        *_curves(runs, "ratio_fp32", "Ratio to dense fp32"),
        *_curves(runs, "residual_norm", "Norm of the residual"),
        *_curves(runs, "skipped", "Skipped steps"),
        *[
            {"title": f"Choices of {run.name}", "lines": run.notes, "note": 'by compression="auto"'}
            for run in runs
            if run.notes
        ],
    ]


def _figure(columns: int, draw: Callable[[Any], None], height: float = 3.2) -> str:
    """Return a figure as SVG."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(1 + 3.6 * columns, height), squeeze=False)
    draw(axes[0])
    figure.tight_layout()
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


STEP = ("step", "step", 1.0)


def _curves(
    runs: Sequence[Run], value: str, title: str, over: Sequence[tuple[str, str, float]] = (STEP,)
) -> Iterable[dict[str, Any]]:
    """Yield a section of curves, if any run holds the value; `over` has names, labels and units of horizontal axes."""
    panels = [panel for panel in over if any(value in e and panel[0] in e for run in runs for e in _totalled(run))]
    if not panels:
        return

    def draw(axes: Any) -> None:
        for axis, (name, label, unit) in zip(axes, panels, strict=True):
            for run in runs:
                points = [(e[name] / unit, e[value]) for e in _totalled(run) if name in e and value in e]
                if points:
                    marker = "." if len(points) < 3 else ""
                    axis.plot(*zip(*points, strict=True), label=_label(run.name), marker=marker)
            axis.set(xlabel=label, ylabel=title.lower())
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)

    yield {"title": title, "id": value, "svg": _figure(len(panels), draw)}


def _label(name: str) -> str:
    """Return a run's name for a legend, which leaves names with an underscore in front out."""
    return f" {name}" if name.startswith("_") else name


def _totalled(run: Run) -> list[Entry]:
    """Return the entries with the bytes sent so far."""
    total, before, found = 0.0, 0, []
    for entry in run.entries:
        total += entry.get("sent_bytes", 0.0) * (entry["step"] - before)
        before = entry["step"]
        found.append({**entry, "sent_total": total})
    return found


def _phases(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the section about where a step's time goes: by traces, or by telemetry without them."""
    rows: list[list[str]] = []
    bars: list[tuple[str, dict[str, float]]] = []
    for run in runs:
        for rank, seconds in sorted(run.phases.items()):
            each = {row: seconds[row] / max(1, run.steps) for row in ROWS}
            bars.append((f"{run.name}, rank {rank}", each))
        if not run.phases and run.entries:
            names = {"waiting": "wait_seconds", "compress": "compress_seconds", "apply": "apply_seconds"}
            each = {row: statistics.median(e.get(name, 0.0) for e in run.entries) for row, name in names.items()}
            bars.append((f"{run.name}, rank 0", each))
    for name, each in bars:
        rows.append([name, *(f"{1e3 * each[row]:.3g}" if row in each else "" for row in ROWS)])

    def draw(axes: Any) -> None:
        axes[1].axis("off")  # room for the legend
        for place, (_, each) in enumerate(bars):
            left = 0.0
            for number, row in enumerate(("compress", "waiting", "apply")):
                axes[0].barh(
                    place, 1e3 * each.get(row, 0.0), left=left, color=f"C{number}", label=row if not place else None
                )
                left += 1e3 * each.get(row, 0.0)
        axes[0].set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
        axes[0].set_xlabel("ms a step")
        axes[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))

    return {
        "title": "Where the exchange's part of a step goes",
        "id": "phases",
        "svg": _figure(2, draw, 1.2 + 0.5 * len(bars)) if bars else "",
        "table": [["ms a step", *ROWS], *rows],
        "note": "Queued and wire run beside backward, and beside each other; compress, waiting and apply are this "
        "rank's own time. Wire ends when the result was waited for. Without a trace: medians of telemetry.",
    }


def _buckets(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the section about bytes by bucket."""
    rows = [
        [f"{run.name}: {name}", f"{count / max(1, run.steps):,.0f}"]
        for run in runs
        for name, count in sorted(run.sent.items())
    ]
    return {
        "title": "Bytes of messages by bucket",
        "table": [["bucket", "bytes a step"], *rows] if rows else [],
        "note": "" if rows else "No run has a trace: train.py --trace_steps writes some.",
    }
