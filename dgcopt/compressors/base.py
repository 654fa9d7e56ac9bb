"""The base class of compressors: an exchange of one flat gradient, written as a generator of collectives.

A new compressor is a subclass with either

- `compress(grad, ctx) -> payload` and `decompress(payloads, ctx) -> grad`, with one collective in between, or
- `exchange(grad, ctx)`, a generator that yields collectives, receives their results and returns the averaged gradient.
"""

# no postponed annotations here or in other base classes: jsonargparse resolves the settings' types of dataclasses in
# the module of the subclass, and would not find them

import logging
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from ..collectives import AllGather, AllReduce, Collective
from ..comm import Comm
from ..errors import ConfigError
from ..errors.checks import check_settings
from ..flat.gradient import SparseSum
from .context import Context
from .own_step import updates_add_up
from .tuner import Tuner

__all__ = ["NAMED", "Compressor", "FirstMoment", "GradientExchange", "Source"]

log = logging.getLogger("dgcopt")

Source: TypeAlias = Literal["auto", "gradient", "update"]
"""Send the local gradient, or the optimizer's update from it; see `Compressor.source`."""

FirstMoment: TypeAlias = Literal["optimizer", "residual"]
"""The place of Adam's first moment where updates are sent: the optimizer's state, or only the residual.

With "residual" the optimizer makes its updates with b1 = 0 at every ratio below 1. The residual of a coordinate that is
sent every 1 / ratio steps averages as many updates, and b1 would delay each of them a second time. At ratio 1, as in a
warm-up, the optimizer uses its own b1.
"""

GradientExchange: TypeAlias = Generator[Collective, Tensor, Tensor | SparseSum]
"""The exchange of a gradient: yields collectives, receives their results, returns the common result of all ranks."""


NAMED: dict[str, Callable[[], "Compressor"]] = {}
"""Compressors that can be given by a name, as `compression="auto"`; modules of higher layers add theirs."""


class Compressor:
    """A rule for the exchange of gradients. Instances hold settings; memory per parameter lives in `Context.memory`."""

    carrier: ClassVar[type[AllReduce] | type[AllGather]] = AllGather
    """The collective of a one-round compressor: AllReduce sums payloads, AllGather returns every rank's."""

    overlap: bool | Literal["auto"] = True
    """False to launch no exchange before `step()`; "auto" lets the device decide, see `overlaps`."""

    whole_model: bool = False
    """True if `prepare` needs all gradients of the step before the first exchange: no overlap with backward."""

    in_turn: bool = False
    """True if one bucket's exchange must end before the second round of the next bucket starts."""

    sizes: tuple[float, float] | None = None
    """Megabytes per bucket and in the first one, unless the user sets them; None lets the layout choose."""

    source: Source = "gradient"
    """Send the gradient, or the update that the wrapped optimizer makes from the local gradient.

    An averaged update is added to the parameters directly, and nothing overlaps with backward. "auto" is "update" for
    Adam and torch's other elementwise optimizers (Adadelta, Adagrad, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop,
    SparseAdam), since Adam's moments degrade with mostly missing coordinates. The residual acts as momentum then, so
    turn off the first moment, by `first_moment="residual"` or betas=(0.0, b2) (docs/compressors.md). If a wire fails,
    the optimizer's state already contains the lost step, so the next one raises InterruptedStep: restore a checkpoint.
    A step that is skipped because NaN or Inf arrived stays in that state.

    "auto" is "gradient" for SGD, where the two differ by a factor of lr, and for all other optimizers, whose updates
    may not be additive. Set "update" for a user-defined optimizer if only its `step()` changes weights, uses only
    gradients and its own state, and changes nothing else that must be equal on all ranks. This cannot be checked: an
    optimizer that computes weights from its own state, such as the z of schedule-free ones in `eval()`, then has
    different weights on each rank. An optimizer whose `step()` is known to communicate, such as
    ZeroRedundancyOptimizer, is refused with "update".
    """

    first_moment: FirstMoment = "optimizer"
    """The place of Adam's first moment where updates are sent."""

    _decided: Source = "auto"

    def __post_init__(self) -> None:
        """Check the settings of a dataclass against their annotations. Raises ConfigError for others."""
        check_settings(self)

    @property
    def sends(self) -> Literal["gradient", "update"]:
        """The kind of data to send: `source`, or for "auto" the choice of `attach`; before that gradients.

        Raises ConfigError for an invalid source.
        """
        if self.source not in ("auto", "gradient", "update"):
            raise ConfigError(f'source must be "auto", "gradient" or "update", not {self.source!r}')
        chosen = self._decided if self.source == "auto" else self.source
        return "update" if chosen == "update" else "gradient"

    @property
    def clips_model(self) -> bool:
        """True if `prepare` clips the norm of all gradients together, which is in `Context.norm` for shards."""
        return False

    def sends_of(self, kind: Hashable) -> Literal["gradient", "update"]:
        """Return the kind of data to send for parameters of a kind; `sends` is "update" if it is for any kind."""
        return self.sends

    def residual_content(self, kind: Hashable) -> str:
        """Name the content of the residual for parameters of a kind, such as "gradients".

        A checkpoint's residual with another content is dropped with a warning, since its scale would be wrong.
        """
        return f"{self.sends_of(kind)}s"

    def as_gradient(self, unsent: Tensor, ctx: Context) -> Tensor:
        """Return the extra gradient equivalent to this rank's unsent memory; may overwrite `unsent`.

        By default the unsent memory itself, which consists of gradients or updates.
        """
        return unsent

    def replaces_first_moment(self, step: int) -> bool:
        """Return True if updates of optimizer step `step` are made without the first moment, as by betas=(0.0, b2)."""
        return False

    @property
    def conserves(self) -> bool:
        """True if the applied sum and all memory of kinds that start with "residual" add up to the gradients."""
        return False

    @property
    def mixes(self) -> bool:
        """True if `exchange` applies `Context.mixture` while it reads the gradient and writes the result."""
        return False

    def adds_up(self, kind: Hashable) -> bool:
        """True if the exchange is a plain sum for parameters of a kind, so gradients may be pre-divided.

        They are pre-divided while they are copied into the bucket; `Context.op` is "sum" then.
        """
        return False

    @property
    def asks_link(self) -> bool:
        """True if `Place.link` must be measured before the first step."""
        return False

    def tuner(self, names: Mapping[Tensor, str], comm: Comm, fixed_sizes: bool) -> Tuner | None:
        """Return the state machine that changes this compressor between steps; None for one that never changes.

        Called once for each wire that `DistributedOptimizer` joins. `names` are all parameters, whose number may grow.
        With `fixed_sizes` the user has set the sizes of buckets.
        """
        return None

    def parts(self) -> Iterator["Compressor"]:
        """Yield this compressor and all inner ones."""
        yield self

    def see_parameters(self, names: Mapping[Tensor, str], others: Iterable[str] = ()) -> None:
        """See all parameters of the optimizer with their names, frozen ones too: before `attach` and after additions.

        `others` are known names of the model's other parameters. Raises ConfigError if settings do not fit the names.
        """

    def __repr__(self) -> str:
        """Return the settings; ranks compare them when an optimizer is wrapped."""
        settings = [f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")]
        return f"{type(self).__name__}({', '.join(settings)})"

    def overlaps(self, device: torch.device) -> bool:
        """Return True if exchanges may be launched during backward on a device; with "auto" not on a CPU."""
        return device.type != "cpu" if self.overlap == "auto" else self.overlap

    def kind(self, name: str, param: Tensor) -> Hashable:
        """Return the parameter's kind; parameters of different kinds never share a bucket."""
        return None

    def attach(self, optimizer: Optimizer) -> None:
        """See the wrapped optimizer once before training, and decide `sends`.

        Raises ConfigError for an optimizer or a `source` that the compressor does not support.
        """
        self._doubt_ratio()
        self._decided = "update" if updates_add_up(optimizer) else "gradient"
        sends, name = self.sends, type(optimizer).__name__
        if self.source != "auto":
            return
        if sends == "update":
            log.info("dgcopt: updates of %s on each rank are sent, not gradients", name)
            has_moment = any("betas" in group and group["betas"][0] for group in optimizer.param_groups)
            if has_moment and self.first_moment == "optimizer":
                log.info("dgcopt: the residual acts as momentum already: betas=(0.0, ...) should do better")
        elif not isinstance(optimizer, SGD | LBFGS):
            log.info(
                "dgcopt: gradients are sent, as updates of %s may not be additive: if they are, and weights depend on "
                "nothing else, set source='update' in the compressor",
                name,
            )

    def _doubt_ratio(self) -> None:
        """Warn about a ratio of 1, which may have been meant as 1%."""
        if getattr(self, "ratio", None) == 1:
            log.warning("dgcopt: %s: ratio 1 sends everything; 1%% is 0.01", type(self).__name__)

    def set_steps_per_epoch(self, steps: int) -> None:
        """Set the number of optimizer steps per epoch, for schedules that count epochs."""

    def in_place(self, kind: Hashable) -> bool:
        """Return True if `exchange` can read gradients of a kind from `Context.local`, which saves a copy on a CPU.

        Its `grad` is empty then.
        """
        return False

    def prepare(self, grads: Sequence[Tensor], contexts: Sequence[Context]) -> None:
        """Change all local gradients of the step before any is exchanged. Called only if `whole_model`."""

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        """Exchange one bucket: yield collectives, return the gradient averaged (or summed) over ranks.

        `grad` is flat; it may be overwritten and returned. Its gaps are zero: the caller guarantees it (`Bucket.fill`,
        or `PerTensor.clear_gaps` before an inner compressor). The result may hold anything in the gaps. All ranks must
        return the same bits, as a SparseSum if nearly all are zero.
        """
        payload = self.compress(grad, ctx)
        if self.carrier is AllReduce:
            return self.decompress((yield AllReduce(payload, op=ctx.op)), ctx)
        return self.decompress((yield AllGather(payload)), ctx)

    def compress(self, grad: Tensor, ctx: Context) -> Tensor:
        """Return this rank's message."""
        raise NotImplementedError(f"{type(self).__name__} must define exchange(), or compress() and decompress()")

    def decompress(self, payloads: Tensor, ctx: Context) -> Tensor:
        """Return the flat gradient, averaged (or summed, see `ctx.op`).

        `payloads` is the reduced message if the carrier is AllReduce, else `[size, ...]`, one row per rank.
        """
        raise NotImplementedError(f"{type(self).__name__} must define exchange(), or compress() and decompress()")

    def payload_bytes(self, ctx: Context) -> int | None:
        """Return the bytes of this rank's messages in one exchange; None if they depend on data."""
        return None

    def before_step(self, optimizer: Optimizer) -> Iterable[Tensor] | None:
        """Prepare the optimizer's own update, after the exchange.

        Return parameters that the compressor has updated itself; the optimizer skips them.
        """
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """Clean up after the optimizer's own update."""

    def return_momentum(self, momenta: Mapping[Tensor, Tensor]) -> None:
        """Return momentum by parameter to the optimizer it was taken over from, after the final exchange."""
