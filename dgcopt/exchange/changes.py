"""Changes of gradients outside of the exchange, such as clipping on some ranks only."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import Tensor

from ..errors import MismatchError
from .divergence import OnDivergence
from .vote import Verdict

__all__ = ["Changes", "Snapshot"]

log = logging.getLogger("dgcopt")


class Snapshot:
    """Identities and versions of gradients at one moment; torch counts the changes of a tensor."""

    def __init__(self, grads: Iterable[Tensor | None]) -> None:
        self._seen = [(grad, 0 if grad is None else grad._version) for grad in grads]

    def has_changed(self, grads: Iterable[Tensor | None]) -> bool:
        """True if a gradient was replaced or changed in place since the snapshot."""
        now = zip(grads, self._seen, strict=False)
        return any(grad is not seen or (grad is not None and grad._version != version) for grad, (seen, version) in now)


class Changes:
    """The check that all ranks change gradients, or none.

    Args:
        rank: this rank.
        on_divergence: "raise" an error where weights have come apart; otherwise warn, once.
    """

    def __init__(self, rank: int, on_divergence: OnDivergence) -> None:
        self._rank = rank
        self._on_divergence = on_divergence
        self._warned: set[str] = set()

    def check(self, verdict: Verdict, step: int) -> None:
        """Raise MismatchError if some ranks have changed averaged gradients; warn of local ones, which may be meant."""
        if verdict.averaged_changed:
            words = (
                f"rank {self._rank}: rank(s) {verdict.averaged_changed} changed the averaged gradients of step "
                f"{step - 1} (clipping, scaling) and other ranks did not, so weights differ between ranks. Run that "
                f"code on every rank, and go on from a checkpoint"
            )
            if self._on_divergence == "raise":
                raise MismatchError(words)
            self._warn("averaged", words)
        if verdict.own_changed:
            self._warn(
                "own",
                f"rank {self._rank}, step {step}: rank(s) {verdict.own_changed} changed their gradients between "
                f"backward() and the exchange (clipping, scaling) and other ranks did not: the mean is of both. Run "
                f"that code on every rank, not within 'if rank == 0:', unless each rank decides by its own gradients",
            )

    def _warn(self, which: str, words: str) -> None:
        if which not in self._warned:
            self._warned.add(which)
            log.warning("dgcopt: %s", words)
