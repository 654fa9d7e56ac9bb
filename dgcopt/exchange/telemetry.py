"""Bytes and seconds of the exchanges of one optimizer on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

__all__ = ["Telemetry"]


@dataclass
class Telemetry:
    """Bytes and seconds on this rank, added up over all steps.

    Attributes:
        steps: number of exchanges of the whole model.
        skipped: number of steps and rounds that no rank took, because some gradients or results were not finite.
        repeated: number of exchanges that were repeated, because gradients changed after they had been sent.
        payload_bytes: bytes of this rank's messages.
        sent_bytes: bytes that this rank put on the wire, by the wire's algorithm for each collective; see `Comm.sent`.
        dense_bytes: bytes of a ring allreduce of the same gradients in float32.
        selected: number of coordinates that sparse compressors have selected.
        left_out: number of selected coordinates without room in a message; they stay in the residual.
        lost_steps: number of steps that a lost rank aborted and that were repeated.
        lost_seconds: seconds of these steps, up to the end of the recovery.
        compress_seconds: seconds of making messages.
        wait_seconds: seconds of waiting for other ranks.
        apply_seconds: seconds of decoding and adding messages.
    """

    steps: int = 0
    skipped: int = 0
    repeated: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    selected: int = 0
    left_out: int = 0
    lost_steps: int = 0
    lost_seconds: float = 0.0
    compress_seconds: float = 0.0
    wait_seconds: float = 0.0
    apply_seconds: float = 0.0

    def count(self, numbers: Mapping[str, int]) -> None:
        """Add numbers to the attributes of these names."""
        for name, number in numbers.items():
            setattr(self, name, getattr(self, name) + number)

    def count_step(self, dense_bytes: int) -> None:
        """Count a step that a dense allreduce would have made with `dense_bytes`."""
        self.steps += 1
        self.dense_bytes += dense_bytes

    def count_skipped(self) -> None:
        """Count a step or round that no rank takes."""
        self.skipped += 1

    def count_repeated(self) -> None:
        """Count exchanges that are made again."""
        self.repeated += 1

    def count_lost(self, seconds: float, aborted: bool) -> None:
        """Count the seconds of a step in which a rank was lost, and the step if it was aborted."""
        self.lost_steps += aborted
        self.lost_seconds += seconds

    def count_message(self, payload_bytes: int, sent_bytes: int) -> None:
        """Count a message of this rank."""
        self.payload_bytes += payload_bytes
        self.sent_bytes += sent_bytes

    def count_seconds(self, compress: float = 0.0, wait: float = 0.0, apply: float = 0.0) -> None:
        """Count seconds of making messages, of waiting for other ranks, or of reading messages."""
        self.compress_seconds += compress
        self.wait_seconds += wait
        self.apply_seconds += apply

    @property
    def ratio(self) -> float:
        """Ratio of dense float32 bytes to sent bytes; 1.0 before anything was sent."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def goodput(self, seconds: float) -> float:
        """Return the share of a training time of `seconds` that lost ranks did not cost this one."""
        return max(0.0, 1.0 - self.lost_seconds / seconds) if seconds > 0 else 1.0

    @property
    def overflow(self) -> float:
        """Share of the selected coordinates that found no room in a message; 0.0 before any was."""
        return self.left_out / self.selected if self.selected else 0.0

    def with_those_of(self, others: Iterable[Telemetry]) -> Telemetry:
        """Return a copy that includes the costs of `others`; steps and dense bytes are those of this one."""
        total = replace(self)
        for other in others:
            for name, value in vars(other).items():
                if name not in ("steps", "dense_bytes"):
                    setattr(total, name, getattr(total, name) + value)
        return total
