"""The settings of a DistributedOptimizer, checked before a wire is joined."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypeAlias

from torch import Tensor

from ..errors import ConfigError
from ..errors.checks import check_positive, check_whole, is_number
from ..exchange.divergence import OnDivergence
from ..exchange.parameters import split

__all__ = ["Op", "Settings", "check_groups", "check_op", "check_passes", "check_predivide"]


Op: TypeAlias = Literal["average", "sum", "adasum"]


@dataclass
class Settings:
    """The settings of an exchange of gradients, equal on all ranks; `DistributedOptimizer` explains each."""

    op: str = "average"
    backward_passes_per_step: int = 1
    gradient_predivide_factor: float = 1.0
    groups: dict[str, int] | None = None
    sparse_as_dense: bool = False
    bucket_mb: float | None = None
    first_bucket_mb: float | None = None
    check_replicas_every: int = 0
    on_divergence: OnDivergence = "raise"
    may_differ: tuple[str, ...] = ()

    def add_up(self, passes: Any) -> None:
        """Set the number of backward passes per exchange. Raises ConfigError for other values."""
        self.backward_passes_per_step = check_passes(passes)


def check_op(op: Any) -> Op:
    """Return our name of a reduction, given ours or Horovod's constant. Raises ConfigError for others."""
    if op in ("average", "sum", "adasum"):
        return op
    # horovod.common.basics: Average = 0, Sum = 1, Adasum = 2 in all versions that have process sets
    if is_number(op, Integral) and op in (0, 1, 2):
        return ("average", "sum", "adasum")[op]
    raise ConfigError(f'op must be "average", "sum" or "adasum", or Horovod\'s Average, Sum or Adasum, not {op!r}')


def check_passes(passes: Any) -> int:
    """Return the number of backward passes per step. Raises ConfigError unless it is a whole number above 0."""
    return check_whole(passes, "backward_passes_per_step", 1)


def check_predivide(factor: Any, op: Op) -> float:
    """Return the part of the division that is done before the sum. Raises ConfigError if nothing is divided."""
    factor = check_positive(factor, "gradient_predivide_factor")
    if factor != 1 and op != "average":
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    return factor


def check_groups(
    names: dict[Tensor, str], groups: int | Sequence[Sequence[Tensor]] | None, num_groups: int
) -> dict[str, int] | None:
    """Return each parameter's group by name, from lists or from a number of groups.

    `num_groups` is the name of that number in Horovod before 0.23. Raises ConfigError for both at once, unknown
    parameters, one in two groups, or a negative number.
    """
    if check_whole(num_groups, "num_groups", 0):
        if groups is not None:
            raise ConfigError("give groups or num_groups, not both")
        warnings.warn(f"num_groups is deprecated: say groups={num_groups}", DeprecationWarning, stacklevel=3)
        groups = num_groups
    if groups is None or isinstance(groups, Integral):
        count = check_whole(groups or 0, "groups", 0)
        if not count:
            return None
        trained = [name for param, name in names.items() if param.requires_grad]
        return {name: group for group, members in enumerate(split(trained, count)) for name in members}
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise ConfigError(
            f"groups should be a number or a list of lists of parameters, which share one bucket, not {groups!r:.80}"
        )
    group_of: dict[str, int] = {}
    for group, members in enumerate(groups):
        for param in members:
            if not isinstance(param, Tensor) or param not in names:
                raise ConfigError(f"groups[{group}] holds something that is no parameter of this optimizer")
            if names[param] in group_of:
                raise ConfigError(f"parameter {names[param]!r} is in groups twice")
            group_of[names[param]] = group
    return group_of
