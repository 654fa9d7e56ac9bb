"""What every compressor is: an exchange of one flat gradient, written as a generator of collectives.

A new compressor is a subclass with either

- `compress(grad, ctx) -> payload` and `decompress(payloads, ctx) -> grad`, where one collective carries it, or
- `exchange(grad, ctx)`, a generator that yields collectives, is sent their results and returns the averaged gradient.
"""

# with annotations postponed here, or by another base class, config files could not tell the settings' types of
# subclasses that are dataclasses: jsonargparse looks them up in the subclass's own module

import logging
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from ..checks import check_settings
from ..collectives import AllGather, AllReduce, Collective
from ..errors import ConfigError
from ..flat.gradient import SparseSum
from .context import Context
from .own_step import updates_add_up

__all__ = ["Compressor", "GradientExchange", "Source"]

log = logging.getLogger("dgcopt")

Source: TypeAlias = Literal["auto", "gradient", "update"]
"""What travels: the local gradient, or the update that the wrapped optimizer makes of it; see `Compressor.source`."""

GradientExchange: TypeAlias = Generator[Collective, Tensor, Tensor | SparseSum]
"""What exchanges a gradient: yields collectives, is sent their results, returns what all ranks share."""


class Compressor:
    """How gradients travel. Instances hold settings; what persists per parameter lives in `Context.memory`."""

    carrier: ClassVar[type[AllReduce] | type[AllGather]] = AllGather
    """The collective of the one-round case: AllReduce adds payloads up on the way, AllGather brings everyone's."""

    overlap: bool | Literal["auto"] = True
    """False if no exchange is to start before the step is called for; "auto" if the device decides, see `overlaps`."""

    whole_model: bool = False
    """True if `prepare` needs every gradient of the step before the first exchange: no overlap with backward."""

    in_turn: bool = False
    """True if one bucket's exchange must end before the next one's second round starts."""

    source: Source = "gradient"
    """What travels: the gradient, or the update that the wrapped optimizer makes of the local one, by itself.

    An update is added to the parameters as it arrives, and nothing overlaps with backward. "auto" becomes "update" for
    Adam and torch's other optimizers whose update is made coordinate by coordinate (Adadelta, Adagrad, Adamax, AdamW,
    NAdam, RAdam, RMSprop, Rprop, SparseAdam), as Adam's moments are no use with gradients of which most coordinates are
    missing. Give Adam no first moment then, betas=(0.0, b2): what waits to be sent is momentum enough
    (docs/compressors.md). If a wire fails, the step is lost, but the optimizer's own state, and what waits, have taken
    in its gradient.

    "auto" becomes "gradient" for SGD, where the two differ by a factor of lr, and for all others, of which it is not
    known that their updates add up. Say "update" for one of your own if nothing but its `step()` changes weights, if
    that uses only the gradients and what it keeps of them, and changes nothing that is to be equal on all ranks but the
    weights. This cannot be checked: an optimizer that makes weights from its own state, such as the z of schedule-free
    ones in `eval()`, makes other ones on each rank then. One whose `step()` is known to exchange weights with other
    ranks, such as ZeroRedundancyOptimizer, is refused with "update".
    """

    _decided: Source = "auto"

    def __post_init__(self) -> None:
        """Settings of a subclass that is a dataclass are what their annotations say. Raises ConfigError for others."""
        check_settings(self)

    @property
    def sends(self) -> Literal["gradient", "update"]:
        """What travels: `source`, or where that is "auto" what `attach` has decided; until then gradients.

        Raises ConfigError for a source that is none of them.
        """
        if self.source not in ("auto", "gradient", "update"):
            raise ConfigError(f'source must be "auto", "gradient" or "update", not {self.source!r}')
        chosen = self._decided if self.source == "auto" else self.source
        return "update" if chosen == "update" else "gradient"

    def sends_of(self, kind: Hashable) -> Literal["gradient", "update"]:
        """What travels of parameters of a kind; `sends` is "update" if updates of any do."""
        return self.sends

    def holds_back(self, kind: Hashable) -> str:
        """What memory of a kind's parameters consists of, in words.

        Memory that a checkpoint holds of anything else is dropped with a warning, as it would count for too much or too
        little.
        """
        return f"{self.sends_of(kind)}s"

    def as_gradient(self, unsent: Tensor, ctx: Context) -> Tensor:
        """What a rank's gradient would have had to be more for all that is unsent to have been sent; may overwrite it.

        Unsent memory as it is, where it is made of gradients, or of updates.
        """
        return unsent

    @property
    def conserves(self) -> bool:
        """Whether nothing is lost: the sum applied and all memory whose kind starts with "residual" add up to the
        gradients."""
        return False

    @property
    def mixes(self) -> bool:
        """Whether `exchange` heeds `Context.mixture`, while it reads the gradient and writes the result."""
        return False

    def adds_up(self, kind: Hashable) -> bool:
        """Whether an exchange does no more than add gradients of a kind up, so that they can be divided before it too.

        They are then, while they are copied anyway, and `Context.op` is "sum".
        """
        return False

    @property
    def asks_link(self) -> bool:
        """Whether `Context.link` is to be measured before the first step."""
        return False

    def parts(self) -> Iterator["Compressor"]:
        """This one, and all that are inside it."""
        yield self

    def see_parameters(self, names: Mapping[Tensor, str], others: Iterable[str] = ()) -> None:
        """See all of the optimizer's parameters and their names, trained or not: before `attach`, and when some come.

        `others` are the names of the model's other ones, as far as they were given. Raises ConfigError for names that
        settings do not fit.
        """

    def __repr__(self) -> str:
        """The settings, alike on all ranks that have the same: they are compared when an optimizer is wrapped."""
        settings = [f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")]
        return f"{type(self).__name__}({', '.join(settings)})"

    def overlaps(self, device: torch.device) -> bool:
        """Whether gradients on a device may be sent while backward runs; where "auto" is asked for, not on a CPU."""
        return device.type != "cpu" if self.overlap == "auto" else self.overlap

    def kind(self, name: str, param: Tensor) -> Hashable:
        """Parameters of different kinds never share a bucket."""
        return None

    def attach(self, optimizer: Optimizer) -> None:
        """See the wrapped optimizer once, before training; `sends` is decided afterwards.

        Raises ConfigError for an optimizer, or a `source`, that the compressor cannot go with.
        """
        self._doubt_ratio()
        self._decided = "update" if updates_add_up(optimizer) else "gradient"
        sends, name = self.sends, type(optimizer).__name__
        if self.source != "auto":
            return
        if sends == "update":
            log.info("dgcopt: what travels are the updates that %s makes on each rank", name)
            if any("betas" in group and group["betas"][0] for group in optimizer.param_groups):
                log.info("dgcopt: what waits to be sent is momentum enough: betas=(0.0, ...) should do better")
        elif not isinstance(optimizer, SGD | LBFGS):
            log.info(
                "dgcopt: what travels are gradients, as it is not known that updates of %s add up: if they do, and "
                "weights depend on nothing else, give the compressor source='update'",
                name,
            )

    def _doubt_ratio(self) -> None:
        """Say what a ratio of 1 is, where 1% may have been meant."""
        if getattr(self, "ratio", None) == 1:
            log.warning("dgcopt: %s: ratio 1 sends everything; 1%% is 0.01", type(self).__name__)

    def set_steps_per_epoch(self, steps: int) -> None:
        """Tell schedules that count epochs how many optimizer steps one has."""

    def in_place(self, kind: Hashable) -> bool:
        """Whether `exchange` can read gradients of a kind from `Context.local`, so that on a CPU none is copied for it.

        Its `grad` is empty then.
        """
        return False

    def prepare(self, grads: Sequence[Tensor], contexts: Sequence[Context]) -> None:
        """Change the step's local gradients, all at once, before any is exchanged. Only if `whole_model`."""

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        """Exchange one bucket: yields collectives, returns the gradient averaged (or summed) over ranks.

        `grad` is flat, may be overwritten and returned. Between parameters it is zero: who calls guarantees it, as
        `Bucket.fill` does, and so does who hands on to a compressor inside what another exchange returned
        (`PerTensor.clear_gaps`). The result may hold anything there. All ranks must return the same bits; as a
        SparseSum if they know nearly all of them to be zero.
        """
        payload = self.compress(grad, ctx)
        if self.carrier is AllReduce:
            return self.decompress((yield AllReduce(payload, op=ctx.op)), ctx)
        return self.decompress((yield AllGather(payload)), ctx)

    def compress(self, grad: Tensor, ctx: Context) -> Tensor:
        """One rank's message."""
        raise NotImplementedError(f"{type(self).__name__} must define exchange(), or compress() and decompress()")

    def decompress(self, payloads: Tensor, ctx: Context) -> Tensor:
        """The flat gradient, averaged (or summed, see `ctx.op`).

        `payloads` is the reduced message if the carrier is AllReduce, else `[size, ...]`, one row per rank.
        """
        raise NotImplementedError(f"{type(self).__name__} must define exchange(), or compress() and decompress()")

    def payload_bytes(self, ctx: Context) -> int | None:
        """Bytes of all messages that this rank hands to collectives in one exchange; None if data decide."""
        return None

    def before_step(self, optimizer: Optimizer) -> Iterable[Tensor] | None:
        """Runs between the exchange and the optimizer's own update.

        Returns parameters whose update it has made itself, over which the optimizer then passes.
        """
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """Runs after the optimizer's own update."""

    def give_back(self, momenta: Mapping[Tensor, Tensor]) -> None:
        """No exchange comes any more: memory called "momentum", by parameter, is the optimizer's again if it was."""
