"""The ratio of sent coordinates: its schedule, and the exact selection of the k = ceil(ratio * n) largest."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ...errors import ConfigError
from ...errors.checks import check_positive, check_settings, check_whole, is_number
from ...flat.buckets import Segment
from ...kernels import Groups, select, select_ahead
from ..base import Compressor
from ..context import Context

__all__ = ["ScheduledRatio", "Selection", "Warmup", "check_ratio", "count_of"]

Chosen = TypeVar("Chosen")


def check_ratio(ratio: float, name: str = "ratio") -> float:
    """Return `ratio` if it is in (0, 1]. Raises ConfigError otherwise."""
    if not is_number(ratio) or not 0 < ratio <= 1:
        raise ConfigError(
            f"{name} is the fraction of coordinates that is sent and must lie in (0, 1], like 0.001; it is {ratio!r}"
        )
    return float(ratio)


def count_of(ratio: float, numel: int) -> int:
    """Return k = ceil(ratio * n), the number of coordinates that a tensor of `numel` elements sends."""
    return min(numel, math.ceil(ratio * numel))


@dataclass
class Warmup:
    """Ratio warm-up: one stage for each of `ratios`, then the compressor's own ratio.

    The default is the paper's: sparsity 75%, 93.75%, 98.4375%, 99.6%, an epoch each, then 99.9% (Lin et al., 2018,
    section 3.3). The stage follows from the optimizer's step count, which is in its `state_dict()`.

    Args:
        ratios: densities in (0, 1], one per stage.
        steps: optimizer steps per stage; None counts in epochs.
        epochs: epochs per stage, if `steps` is None. Raise `steps` or `epochs` for a gentler start.
        steps_per_epoch: optimizer steps per epoch; set it before training by `set_steps_per_epoch` of the compressor,
            or of the copy made at wrapping (`optimizer.compressor`, `state.compressor`).

    Raises ConfigError for ratios outside (0, 1], empty stages, or an unknown `steps_per_epoch`.
    """

    ratios: tuple[float, ...] = (0.25, 0.0625, 0.015625, 0.004)
    steps: int | None = None
    epochs: float = 1
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.ratios, Sequence) or isinstance(self.ratios, str):
            raise ConfigError(f"ratios must be densities, one per stage, like (0.25, 0.0625), not {self.ratios!r}")
        self.ratios = tuple(check_ratio(ratio, "a warm-up ratio") for ratio in self.ratios)
        check_positive(self.epochs, "a warm-up's epochs")
        if self.steps is not None:
            check_whole(self.steps, "a warm-up's steps", 1)
        if self.steps_per_epoch is not None:
            check_whole(self.steps_per_epoch, "steps_per_epoch", 1)
        check_settings(self)

    def set_steps_per_epoch(self, steps: int) -> None:
        """Set the number of optimizer steps per epoch."""
        self.steps_per_epoch = check_whole(steps, "steps_per_epoch", 1)

    def stage_steps(self) -> int:
        """Return the optimizer steps per stage."""
        if self.steps is not None:
            return self.steps
        if self.steps_per_epoch is None:
            raise ConfigError(
                "the ratio warm-up counts epochs but does not know how long one is. Call "
                "compressor.set_steps_per_epoch(len(loader)) before wrapping, which took a copy, or after it "
                "optimizer.compressor.set_steps_per_epoch(...), with dgcopt.ddp_hook state.compressor's; or give "
                "Warmup(steps=...)"
            )
        return max(1, math.ceil(self.epochs * self.steps_per_epoch))

    def ratio_at(self, step: int, final: float) -> float:
        """Return the ratio at optimizer step `step`, counted from 0; `final` after the last stage."""
        stage = step // self.stage_steps()
        return self.ratios[stage] if stage < len(self.ratios) else final


class ScheduledRatio(Compressor):
    """A compressor with a `ratio` and an optional `warmup`.

    A subclass is a dataclass with both settings and calls `ratio_at(ctx.step)`. Raises ConfigError for a ratio outside
    (0, 1] and for an invalid warm-up, and at wrapping for `first_moment="residual"` without updates of a first moment.
    """

    ratio: float
    warmup: Warmup | None

    def __post_init__(self) -> None:
        self.ratio = check_ratio(self.ratio)
        if self.warmup is not None and not isinstance(self.warmup, Warmup):
            raise ConfigError(
                f"warmup must be a dgcopt.Warmup, which says which ratios come first and for how long, such as "
                f"Warmup(epochs=1) or Warmup((0.25, 0.0625), steps=500), not {self.warmup!r}"
            )
        super().__post_init__()

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        has_moment = any("betas" in group for group in optimizer.param_groups)
        if self.first_moment == "residual" and not (self.sends == "update" and has_moment):
            raise ConfigError(
                f'{type(self).__name__}(first_moment="residual") needs an optimizer with betas whose updates are sent, '
                f"such as AdamW. {self.sends.capitalize()}s of {type(optimizer).__name__} are sent: remove first_moment"
            )

    def replaces_first_moment(self, step: int) -> bool:
        return self.first_moment == "residual" and self.sends == "update" and self.ratio_at(step) < 1

    def set_steps_per_epoch(self, steps: int) -> None:
        """See `Compressor.set_steps_per_epoch`."""
        check_whole(steps, "steps_per_epoch", 1)
        if self.warmup is not None:
            self.warmup.set_steps_per_epoch(steps)

    def ratio_at(self, step: int) -> float:
        """Return the current ratio at optimizer step `step`, counted from 0."""
        return self.ratio if self.warmup is None else self.warmup.ratio_at(step, self.ratio)

    def chooser(self, ctx: Context, make: Callable[[float], Chosen]) -> Chosen:
        """Return the bucket's selection for the current ratio; `make` builds it, and again when the ratio changes."""
        ratio = self.ratio_at(ctx.step)
        if "chooser" not in ctx.scratch or ctx.scratch["chooser"][0] != ratio:
            ctx.scratch["chooser"] = ratio, make(ratio)
        return ctx.scratch["chooser"][1]


class Selection:
    """Selects the largest magnitudes of each segment of a bucket, or of the whole bucket, exactly.

    Args:
        segments: the tensors of the bucket.
        ratio: fraction of elements to select.
        together: apply the ratio to the whole bucket instead of each tensor.
    """

    def __init__(self, segments: Sequence[Segment], ratio: float, together: bool = False) -> None:
        spans = [(segment.start, segment.stop) for segment in segments]
        pieces = [spans] if together else [[span] for span in spans]
        counts = [count_of(ratio, sum(stop - start for start, stop in group)) for group in pieces]
        self.count = sum(counts)
        """Number of selected coordinates."""
        self._groups = Groups(pieces, counts, segments[0].param.device)

    def largest(self, flat: Tensor, maxima: Tensor) -> Tensor:
        """Return positions of the largest magnitudes of `flat`, given its block maxima: int64, ascending.

        Ties go to the first positions. NaN counts as largest.
        """
        return select(flat, maxima, self._groups)

    def largest_of(self, rows_of: Callable[[Tensor], Tensor], maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Select from blocks that `rows_of` computes on demand; return positions and values."""
        return select_ahead(rows_of, maxima, self._groups)
