"""The numbers in an optimizer's parameter groups, such as learning rates, which must be equal on all ranks."""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..collectives import AllGather, Collective
from ..comm import Comm
from ..errors import CommError, ConfigError, MismatchError
from .agreement import DAMAGED, compare
from .divergence import OnDivergence

__all__ = ["GroupSettings", "check_may_differ"]

log = logging.getLogger("dgcopt")

REMEDY = (
    "Change settings alike on every rank: give a scheduler such as ReduceLROnPlateau a loss that is averaged over "
    "ranks. A setting that differs on purpose is named in may_differ=[...]."
)

NOT_COMPARED = frozenset({"params", "foreach", "fused"})
"""Keys left out of the comparison; the last two set how a step is computed, not its result."""

_SCALARS = (float, int, bool)


def check_may_differ(may_differ: Any, optimizer: Optimizer) -> tuple[str, ...]:
    """Raise ConfigError for anything but a sequence of the optimizer's setting names."""
    known = {*optimizer.defaults, *(name for group in optimizer.param_groups for name in group)} - NOT_COMPARED
    is_names = isinstance(may_differ, Sequence) and not isinstance(may_differ, str)
    if not is_names or not known.issuperset(may_differ):
        raise ConfigError(
            f"may_differ must be a sequence of settings of {type(optimizer).__name__}'s parameter groups, such as "
            f'("lr",), not {may_differ!r:.200}; there are {", ".join(sorted(known))}'
        )
    return tuple(may_differ)


class GroupSettings:
    """The numeric settings of an optimizer's parameter groups on one rank.

    Args:
        optimizer: the optimizer.
        may_differ: names of settings that ranks do not compare.
    """

    def __init__(self, optimizer: Optimizer, may_differ: Sequence[str] = ()) -> None:
        self._optimizer = optimizer
        self._skipped = NOT_COMPARED.union(may_differ)
        self._seen: list[Any] = []
        self._checksum = 0
        self._warned = False

    def checksum(self) -> int:
        """Return 32 bits that are equal on ranks with the same settings.

        Computed anew only if a setting has changed since the last call. A tensor on an accelerator is skipped, since
        its value is not known without a wait for the device.
        """
        seen = [
            value if type(value) in _SCALARS else _on_cpu(value)
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name not in self._skipped
        ]
        if seen != self._seen:
            self._seen = seen
            parts = [
                float(part)
                for group in self._optimizer.param_groups
                for name in sorted(group)
                if name not in self._skipped
                for part in _on_cpu(group[name])
            ]
            self._checksum = _crc(parts)
        return self._checksum

    def describe(self) -> list[str]:
        """Return a line for each setting."""
        return [
            f"{name} of parameter group {place}: {', '.join(map(str, parts))}"
            for place, group in enumerate(self._optimizer.param_groups)
            for name, value in sorted(group.items())
            if name not in self._skipped and (parts := _numbers(value))
        ]

    def agree(self, rank: int, comm: Comm, on_divergence: OnDivergence) -> Generator[Collective, Tensor, None]:
        """Compare all settings, after checksums have differed on any rank.

        Raises MismatchError, on all ranks, that names group, setting and rank. If `on_divergence` is not "raise", it is
        a warning, once; with "resync" all ranks take over the settings of `rank`, each time.
        """
        if self._warned and on_divergence != "resync":
            return
        try:
            yield from compare(self.describe(), comm.rank, "settings of parameter groups", REMEDY)
        except MismatchError as error:
            if on_divergence == "raise":
                raise
            self._warned = True
            log.warning("dgcopt: %s on_divergence=%r: training continues", error, on_divergence)
            if on_divergence == "resync":
                yield from self.take_over(rank, comm, comm.rank != rank)

    def take_over(self, rank: int, comm: Comm, takes: bool) -> Generator[Collective, Tensor, None]:
        """Broadcast the settings of `rank` in `comm`; this rank replaces its own by them if it `takes` them.

        Raises CommError for settings that arrive damaged.
        """
        places = [
            (group, name)
            for group in self._optimizer.param_groups
            for name, value in sorted(group.items())
            if name not in self._skipped and not any(isinstance(part, bool) for part in _numbers(value))
        ]
        mine = [float(part) for group, name in places for part in _numbers(group[name])]
        message = torch.tensor([*mine, _crc(mine)], dtype=torch.float64)
        *told, crc = (yield AllGather(message, group="control", label="learning rates"))[rank].tolist()
        if crc != _crc(told):
            raise CommError(
                f"rank {comm.rank}: the settings of parameter groups from rank {rank} are not those that it sent "
                f"({told[:8]} ...): {DAMAGED}"
            )
        theirs = iter(told)
        for group, name in places if takes else ():
            value = group[name]
            pairs = [(part, next(theirs)) for part in _numbers(value)]
            # an int may have become another number: an lr of 1, by a scheduler
            parts = [int(new) if new.is_integer() and isinstance(old, int) else new for old, new in pairs]
            if isinstance(value, Tensor):
                value.copy_(torch.tensor(parts, dtype=value.dtype).view_as(value))
            else:
                group[name] = type(value)(parts) if isinstance(value, tuple | list) else parts[0]


def _crc(numbers: Sequence[float]) -> int:
    return zlib.crc32(array("d", numbers).tobytes())


def _numbers(value: Any) -> tuple[Any, ...]:
    """Return the numbers in a setting, such as two betas or one learning rate; none for other settings."""
    if isinstance(value, Tensor):
        return tuple(value.flatten().tolist())
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    return parts if all(isinstance(part, int | float) for part in parts) else ()


def _on_cpu(value: Any) -> tuple[Any, ...]:
    """Return a setting's numbers without waiting for an accelerator."""
    return () if isinstance(value, Tensor) and value.device.type != "cpu" else _numbers(value)
