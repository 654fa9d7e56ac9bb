"""The rule of an averaging algorithm: its schedule and its exchange of weights, as a generator of collectives."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from ..collectives import Exchange
from ..comm import Comm
from ..errors import ConfigError
from .weights import Weights

__all__ = ["Rule", "refuse_with_losses"]


class Rule:
    """The schedule and the exchange of an algorithm, as a round calls them. `Averaging` attaches it to an optimizer."""

    warmup_steps: int = 0
    """Number of first steps in which a DistributedOptimizer averages gradients instead.

    The last of them flushes the compressor's residuals. A step that all ranks skip (NaN, Inf) does not count.
    """

    overlap: bool = False
    """True if a round runs during the next forward and backward pass and ends before the next update."""

    delay: int = 0
    """Number of local steps by which a round is launched before it is due (`DiLoCo`)."""

    quorum: int | None = None
    """Number of ranks that a round waits for, if it does not wait for all (`DiLoCo`)."""

    grace: float = 0.0
    """Seconds that these wait for the others."""

    meets: bool = True
    """True if all ranks take part in every round, so that they can vote on it; gossip waits for its peers only."""

    in_turn: bool = False
    """True if ranks make different numbers of collectives, so one bucket's exchange must end before the next begins."""

    prepares: bool = False
    """True if `before_step` must be called before each local step."""

    by_bucket: bool = True
    """True if the algorithm only exchanges buckets after local steps, so that SlowMo can build on it."""

    def __repr__(self) -> str:
        """The settings. Ranks compare them when an optimizer is wrapped."""
        settings = [f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")]
        return f"{type(self).__name__}({', '.join(settings)})"

    def check(self, comm: Comm, names: Sequence[str]) -> None:
        """Raise ConfigError if the algorithm does not support these ranks or parameter names."""

    def check_survives(self) -> None:
        """Raise ConfigError unless these settings support lost ranks (`dgcopt.init(survive=True)`)."""
        raise ConfigError(
            f"{type(self).__name__} does not support dgcopt.init(survive=True). Leave survive out, average weights by "
            f"LocalSGD, SlowMo or DiLoCo, or average gradients at every step (dgcopt.DistributedOptimizer)."
        )

    def set_steps_per_epoch(self, steps: int) -> None:
        """Set the number of local steps per epoch, for schedules that count epochs."""

    def kind(self, name: str, param: Tensor) -> Hashable:
        """Return the parameter's kind; parameters of different kinds never share a bucket."""
        return None

    def due(self, step: int) -> bool:
        """Return True if a round follows local step `step`."""
        raise NotImplementedError(f"{type(self).__name__} must define due()")

    def start(self, x: Tensor, ctx: Weights) -> None:
        """Receive the weights before the first local step, and again after a state was loaded."""

    def before_step(self, x: Tensor, ctx: Weights) -> None:
        """Receive the weights right before each local step, if `prepares`."""

    def exchange(self, x: Tensor, ctx: Weights) -> Exchange:
        """Exchange one bucket: yield collectives, return the new weights.

        `x` is a flat copy of this rank's weights; it may be overwritten and returned.
        """
        raise NotImplementedError(f"{type(self).__name__} must define exchange()")

    def identical(self, step: int) -> bool:
        """Return True if all ranks hold the same weights after the round that follows step `step`."""
        return False

    def arrives_alike(self, step: int) -> bool:
        """Return True if all ranks receive the same numbers in the round that follows step `step`.

        All of them then notice NaN or Inf. Otherwise they vote once more, before the round changes anything.
        """
        return self.identical(step)

    def reaches_all(self, step: int) -> bool:
        """Return True if the round that follows step `step` spreads each rank's progress to all other ranks.

        A rank that has run out of data counts as active until such a round has included its last step (`dgcopt.join`),
        so it must be true for some rounds; in gossip, where progress spreads from rank to rank, for all.
        """
        return True

    def saved(self, ctx: Weights) -> dict[str, Tensor]:
        """Return flat tensors that a checkpoint needs beyond `ctx.memory`; `start` finds them there after loading."""
        return {}

    def merges(self, kind: str) -> bool:
        """Return True if another number of ranks resumes from the mean of this kind of memory."""
        return True


def refuse_with_losses(rule: Rule, **settings: object) -> None:
    """Raise ConfigError if a setting of the rule differs from the value that supports lost ranks."""
    for name, value in settings.items():
        if getattr(rule, name) != value:
            raise ConfigError(
                f"{type(rule).__name__}({name}={getattr(rule, name)!r}) does not support dgcopt.init(survive=True). "
                f"Set {name}={value!r}, or leave survive out."
            )
