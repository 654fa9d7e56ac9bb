"""Settings of a `ddp_hook`: the compressor, the optimizer behind DDP, parameter names, the wire and the scaler."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...comm import Comm, current_comm
from ...compressors import Compressor, NoCompression, accept
from ...compressors.own_step import updates_add_up
from ...errors import ConfigError
from ...exchange.group_settings import GroupSettings, check_may_differ
from ...exchange.held import held
from ...exchange.parameters import check_trainable, inner_optimizer, unique_names
from ..introspection import ddp_modules_of_hook
from .attached import AttachedOptimizer, parameters_of

__all__ = ["HookSettings"]

log = logging.getLogger("dgcopt")


class HookSettings:
    """The settings of one `ddp_hook` on one rank.

    Args:
        compression: the compressor of gradients, copied; None sends them uncompressed.

    Attributes:
        compressor: the copy.
        names: the given names of parameters; None if DDP's order numbers them.
        attached: the optimizer behind DDP; None if it is not known.
        groups: the numbers in its parameter groups; None without an optimizer.
        scaler: the loop's GradScaler, or None.
    """

    def __init__(self, compression: Compressor | Any) -> None:
        self.compressor: Compressor = NoCompression() if compression is None else copy.deepcopy(accept(compression))
        self.names: dict[Tensor, str] | None = None
        self.attached: AttachedOptimizer | None = None
        self.groups: GroupSettings | None = None
        self.scaler: Any = None
        self._may_differ: Sequence[str] = ()
        self._comm: Comm | None = None
        self._would_send_updates = self.compressor.source == "auto"
        if self._would_send_updates:
            self.compressor.source = "gradient"
        if self.compressor.sends == "update":
            raise ConfigError(
                f"{type(self.compressor).__name__} sends the updates that the optimizer makes, and DDP exchanges "
                f"gradients: use dgcopt.DistributedOptimizer, without DDP"
            )

    @property
    def known_comm(self) -> Comm | None:
        """The wire; None before it is joined."""
        return self._comm

    def join(self, hook_state: Any) -> Comm:
        """Return the wire: the given one, or that of `dgcopt.init()`.

        Raises ConfigError if the DistributedDataParallel that has `hook_state` averages among other ranks or skips
        buckets, or if several models have it.
        """
        self._comm = self._comm or current_comm()
        modules = ddp_modules_of_hook(hook_state)
        if len({frozenset(module.parameters()) for module in modules}) > 1:
            raise ConfigError(
                "one state of ddp_hook is registered with several DistributedDataParallel modules, and would count a "
                "step for each: call ddp_hook once per module"
            )
        module = modules[0] if modules else None
        if module is not None and module.process_group.size() != self._comm.size:
            raise ConfigError(
                f"this DistributedDataParallel averages among {module.process_group.size()} rank(s), and its ddp_hook "
                f"among {self._comm.size}: give ddp_hook the same ranks, comm=dgcopt.init().among([...])"
            )
        if getattr(module, "skip_all_reduce_unused_params", False):  # older torch has no such setting
            raise ConfigError(
                "DistributedDataParallel with skip_all_reduce_unused_params=True keeps buckets from ddp_hook, which "
                "waits for the last one forever. Leave it out: unused parameters cost next to nothing with "
                "compression. Or freeze them (requires_grad=False) before DDP is made"
            )
        return self._comm

    def use(self, names: dict[Tensor, str] | None, comm: Comm | None, scaler: Any, may_differ: Sequence[str]) -> None:
        """Set the parameters' names, the wire, the loop's GradScaler and the settings that may differ, where given."""
        if names:
            self._set_names(names)
        self._comm = comm or self._comm
        self.scaler = scaler if scaler is not None else self.scaler
        self._may_differ = may_differ or self._may_differ

    def _set_names(self, names: dict[Tensor, str]) -> None:
        self.names = names
        self.compressor.see_parameters(names)

    def number_added(self) -> dict[Tensor, str] | None:
        """Return the names, with those of parameter groups added to the optimizer since if its groups number them."""
        if self.attached is not None and self.names is not None:
            numbered = unique_names(self.attached.optimizer, None)
            if self.names.items() <= numbered.items():
                self.attached.names.update(numbered)
                self._set_names(numbered)
        return self.names

    def attach(self, optimizer: Optimizer, is_alone: Callable[[], bool], averaged: Callable[[], set[Tensor]]) -> None:
        """Let the compressor take over its part of the optimizer's step; see `HookState.attach`.

        Args:
            optimizer: the optimizer behind DDP.
            is_alone: returns True if there is only one rank.
            averaged: returns the parameters that DDP has averaged so far.
        """
        optimizer = inner_optimizer(optimizer)
        if held(optimizer).gradients is not None:
            raise ConfigError("the optimizer exchanges gradients by itself: give ddp_hook the one that is not wrapped")
        others = self.attached is not None and self.attached.params != parameters_of(optimizer)
        if others or averaged():
            raise ConfigError("attach one optimizer, before the first backward pass")
        numbered = unique_names(optimizer, None)
        names = {param: (self.names or {}).get(param, name) for param, name in numbered.items()}
        check_trainable(names)
        self.groups = GroupSettings(optimizer, check_may_differ(self._may_differ, optimizer))
        if self.attached is not None:
            self.attached.detach()
        if self.names is None:
            self._set_names(numbered)
        self.compressor.attach(optimizer)
        if self._would_send_updates and updates_add_up(optimizer):
            log.info(
                "dgcopt: ddp_hook sends gradients, so %s's moments are of the compressed mean. "
                "dgcopt.DistributedOptimizer without DDP sends updates from complete local gradients instead",
                type(optimizer).__name__,
            )
        self.attached = AttachedOptimizer(optimizer, self.compressor, is_alone, averaged, names)
