"""The clock of all measurements, and moments on a device's own clock."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["between", "mark", "now"]


def now() -> float:
    """Return the host's clock in seconds."""
    return time.perf_counter()


def mark(device: torch.device) -> Any:
    """Return a mark of this moment: on CUDA an event, which does not wait for the device."""
    if device.type != "cuda":
        return now()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Return the seconds from one mark to another of the same device."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end) / 1e3)
