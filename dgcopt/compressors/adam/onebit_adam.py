"""1-bit Adam (Tang et al., ICML 2021)."""

from __future__ import annotations

from ..base import Compressor
from ..quantised.onebit_reduce import OneBitReduce
from .base import FrozenAdam

__all__ = ["OneBitAdam"]


class OneBitAdam(FrozenAdam):
    """Adam on dense gradients for `warmup_steps`; then its variance is frozen and its momentum is sent in one bit.

    The rule is that of `FrozenAdam`; `OneBitReduce` sends the momentum, with error feedback for both roundings. For
    Adam on slow links, if v settles early.

    Args:
        warmup_steps: T; 15 to 25% of all steps in the paper. Raise it if the loss jumps afterwards.
        inner: compressor of the momentum; None is OneBitReduce(). `Hierarchical(OneBitReduce())` for several ranks per
            machine.

    In float32, gradients above 5.8e20 (at b2 = 0.999) overflow v, as Adam's, and a sum over ranks above 3.4e38 in the
    warm-up makes weights NaN: clip gradients that may come near.

    Costs 2 bits per parameter and a few bytes per tensor at any world size, after T steps at 4 bytes. Raises the errors
    of `FrozenAdam`, and PayloadError for a damaged message. Source: Tang et al., "1-bit Adam: Communication Efficient
    Large-Scale Training with Adam's Convergence Speed", ICML 2021, arXiv:2102.02888, algorithm 1.
    """

    def __init__(self, warmup_steps: int = 100, inner: Compressor | None = None) -> None:
        super().__init__(warmup_steps, OneBitReduce() if inner is None else inner)
