"""The account of a run of train.py: history.jsonl, TensorBoard and a progress bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

__all__ = ["Record", "per_step"]


class Record:
    """Rank 0's account of the run: a progress bar, TensorBoard scalars and a line of JSON per entry."""

    def __init__(self, output: Path, step: int, steps: int) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.path = output / "history.jsonl"
        # A run that died after its last checkpoint has recorded steps that are now taken again.
        lines = self.path.read_text(errors="replace").split("\n") if step and self.path.exists() else [""]
        kept = []
        for number, line in enumerate(lines[:-1], start=1):  # the last is empty, or the run died while it wrote it
            try:
                kept += [line + "\n"] if json.loads(line)["step"] <= step else []
            except (ValueError, TypeError, KeyError) as error:
                print(f"{self.path}, line {number}, is damaged and left out ({error})")
        part = output / "history.jsonl.part"  # a full disk, or an interruption, must not cost the history
        part.write_text("".join(kept))
        part.replace(self.path)
        self.tensorboard = SummaryWriter(str(output / "tensorboard"), purge_step=step + 1)
        self.bar = tqdm(total=steps, initial=step, unit="step", disable=None)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add an entry, and show it beside the progress bar."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)
        self.bar.set_postfix({name: values[name] for name in ("loss", "ratio_fp32", "accuracy") if name in values})
        self.bar.update(step - self.bar.n)

    def note(self, step: int, words: str) -> None:
        """Add a line of words to the history."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "note": words}) + "\n")

    def close(self) -> None:
        """Write what is still to be written; another rank, or this one, may go on."""
        self.tensorboard.close()
        self.bar.close()


def per_step(now: Any, before: Any) -> dict[str, float]:
    """Traffic and time of a mean step between two readings of the optimizer's telemetry."""
    steps = max(1, now.steps - before.steps)
    sent, dense = now.sent_bytes - before.sent_bytes, now.dense_bytes - before.dense_bytes
    counted = ("sent_bytes", "payload_bytes", "compress_seconds", "wait_seconds", "apply_seconds")
    ratios = {"ratio_fp32": dense / sent, "ratio_bf16": dense / sent / 2} if sent else {}
    return {name: (getattr(now, name) - getattr(before, name)) / steps for name in counted} | ratios
