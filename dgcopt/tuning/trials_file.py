"""The CSV file of trials: a row for each candidate of each choice of `Auto`."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from .candidate import Candidate

__all__ = ["append_trials"]

log = logging.getLogger("dgcopt")

COLUMNS = (
    *("step", "compressor", "hierarchical", "overlap", "bucket_mb", "first_bucket_mb"),
    *("predicted_seconds", "measured_seconds", "chosen"),
)
"""Columns of the file of trials."""


def append_trials(
    path: Path,
    step: int,
    candidates: Mapping[str, Candidate],
    predicted: Mapping[str, float],
    tried: Mapping[str, float],
    chosen: str,
) -> None:
    """Append a row for each candidate. A file that cannot be written is a warning: training goes on."""
    try:
        is_new = not path.exists() or not path.stat().st_size
        with path.open("a", newline="") as file:
            rows = csv.writer(file)
            if is_new:
                rows.writerow([*COLUMNS])
            for name, seconds in predicted.items():
                one = asdict(candidates[name])
                sizes = one.pop("sizes") or ("", "")
                rows.writerow([step, *one.values(), *sizes, seconds, tried.get(name, ""), name == chosen])
    except OSError as error:
        log.warning("dgcopt: auto: cannot write trials to %s: %s", path, error.strerror)
