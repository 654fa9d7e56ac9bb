"""What the exchanges of one optimizer cost on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = ["Telemetry"]


@dataclass
class Telemetry:
    """What was sent and how long it took, on this rank, added up over all steps.

    Attributes:
        steps: exchanges of the whole model.
        skipped: steps and rounds that no rank took, because some rank's gradients, or what arrived, were not finite.
        repeated: exchanges made again, because gradients changed after they had been sent.
        payload_bytes: bytes of this rank's messages.
        sent_bytes: bytes that this rank put on the wire, by the algorithm that the wire has for each collective, see
            `Comm.sent`.
        dense_bytes: what a ring allreduce of the same gradients in float32 would have put there.
        selected: coordinates that sparse compressors have chosen. left_out: those of them for which a message had no
            room; they wait in the residual.
        compress_seconds: making messages. wait_seconds: waiting for other ranks. apply_seconds: reading messages.
    """

    steps: int = 0
    skipped: int = 0
    repeated: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    selected: int = 0
    left_out: int = 0
    compress_seconds: float = 0.0
    wait_seconds: float = 0.0
    apply_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense float32; 1.0 before anything was sent."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0

    @property
    def overflow(self) -> float:
        """Which share of what was selected found no room in a message; 0.0 before anything was."""
        return self.left_out / self.selected if self.selected else 0.0

    def with_those_of(self, others: Iterable[Telemetry]) -> Telemetry:
        """A copy, with what `others` cost besides; the steps, and what they would cost dense, are this one's."""
        total = replace(self)
        for other in others:
            for name, value in vars(other).items():
                if name not in ("steps", "dense_bytes"):
                    setattr(total, name, getattr(total, name) + value)
        return total
