"""The wrapped optimizer of an engine: settings that all ranks compare, its updates, and steps taken in its place."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ..compressors import Compressor
from ..errors import ConfigError
from ..exchange.buffers import Buffers
from ..exchange.commit import CommitMarker
from ..exchange.divergence import digests
from ..exchange.parameters import describe
from ..flat.gradient import HiddenGradients, Touched
from ..flat.local_shard import as_stepped, local
from ..kernels import is_dense, step_at
from .introspection import all_ddp_modules
from .layout import Layout
from .settings import Settings
from .subclass import bare_class

__all__ = ["Wrapped"]

log = logging.getLogger("dgcopt")


class Wrapped:
    """An optimizer whose gradients, or the updates that it makes of them, are exchanged.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        names: every parameter and its unique name, in an order that is the same on all ranks; may grow.
        compressor: the compressor of gradients or updates.
        own_step: the optimizer's own step, without any exchange or hook.
        step_without_data: takes the step of a rank that has run out of data.
        committed: called at the commit of an exchange: gradients are averaged.
        aborted: called at the abort of an exchange: no rank takes the step.
        failed: called after an exchange has failed.
        follow_groups: adds parameters to `names` that were put into the optimizer's groups by hand.

    Attributes:
        is_sgd: True for torch's SGD itself.
        commit: marker of a commit in progress, which an exception may interrupt.
        not_taken: number of exchanged steps since the optimizer has taken one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[Tensor, str],
        compressor: Compressor,
        own_step: Callable[[], Any],
        step_without_data: Callable[[], None],
        committed: Callable[[], None],
        aborted: Callable[[], None],
        failed: Callable[[], None],
        follow_groups: Callable[[], None],
    ) -> None:
        self.optimizer = optimizer
        self.names = names
        self.compressor = compressor
        self.own_step = own_step
        self.step_without_data = step_without_data
        self.committed = committed
        self.aborted = aborted
        self.failed = failed
        self.follow_groups = follow_groups
        self.is_sgd = bare_class(optimizer) is SGD
        self.commit = CommitMarker()
        self.not_taken = 0
        self._before_update: list[Callable[[], object]] = []
        self.buffers: Buffers | None = None  # of the model, equal in each step
        self.begin_anew()

    def count_exchanged(self) -> None:
        """Count a step with averaged gradients, for the optimizer to take."""
        self.not_taken += 1

    def count_taken(self) -> None:
        """Record that the optimizer has taken its step, or that state is restored."""
        self.not_taken = 0

    def sync_buffers(self, buffers: Buffers) -> None:
        """Synchronise buffers of the model in each step from now on."""
        self.buffers = buffers

    # -- the optimizer's own step ------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Reset: no step is in progress."""
        self._hidden = HiddenGradients()

    def skip_step(self) -> None:
        """Hide all gradients from a step that no rank takes.

        It may be called nonetheless, if it was bound before wrapping, and have other parameters to step.
        """
        self._hidden.hide(self.names)

    def prepare_step(self, layout: Layout, skipped: Iterable[Tensor]) -> bool:
        """Prepare the optimizer's own step after an exchange; return True if nothing is left for it to do.

        Hides gradients of parameters that are stepped here, and those of an earlier step that was `skipped`.
        """
        if self.compressor.sends == "update":
            self._hidden.hide(self.take_update(layout.trained))
            if all(param.grad is None for param in self.names):
                self.commit.end()
                return True
        if isinstance(self.optimizer, torch.optim.SparseAdam):  # the own step takes no other gradients, even dense ones
            for param in self.names:
                if param.grad is not None and not param.grad.is_sparse:
                    param.grad = param.grad.to_sparse(1)
        self._hidden.hide(skipped)
        self._hidden.hide(self.compressor.before_step(self.optimizer) or ())
        self._hidden.hide(self.step_touched(layout.touched()))
        self._align_gradients()
        return False

    def end_step(self) -> None:
        """Undo all temporary changes after a step, taken or not."""
        self._hidden.show()
        self.compressor.after_step(self.optimizer)

    def _align_gradients(self) -> None:
        """Copy gradients to the memory order of their parameters, which torch's fused kernels assume."""
        for group in self.optimizer.param_groups:
            for param in group["params"] if group.get("fused") else ():
                grad = param.grad
                if grad is not None and grad.layout == torch.strided and grad.stride() != param.stride():
                    param.grad = torch.empty_like(param).copy_(grad)

    # -- comparison over ranks ---------------------------------------------------------------------------------------

    def describe(self, settings: Settings, trained: Collection[Tensor] | None = None) -> list[str]:
        """Return the lines that must be equal at each bucket layout.

        `trained` are the parameters that travel: those that require a gradient if None.
        """
        told = {"compression": self.compressor, **vars(settings)}
        return describe(self.optimizer, self.names, told, trained)

    def describe_start(self, warn: bool) -> list[str]:
        """Return the further lines that must be equal before the first step, and stay so afterwards.

        Raises ConfigError for gradients that are views of DistributedDataParallel's buckets.
        """
        around = _ddp_around(self.names)
        has_views = any(param.grad is not None and param.grad._is_view() for param in self.names)
        if has_views and any(module.gradient_as_bucket_view for module in around):
            raise ConfigError(  # views would point to results, past the buckets
                "DistributedDataParallel has gradient_as_bucket_view=True, and DistributedOptimizer writes its results "
                "into gradients, not into DDP's buckets: train the bare model, or set gradient_as_bucket_view=False"
            )
        if warn and any(map(_averages, around)):
            log.warning(
                "dgcopt: DistributedDataParallel averages these parameters' gradients too, uncompressed: its bytes are "
                "not in telemetry, and nothing is saved. Give dgcopt.ddp_hook to DDP in place of DistributedOptimizer, "
                "or train the bare model"
            )
        states = {name: state for name, (_, *state) in self.replicated().items() if state}
        rows = digests(states).tolist() if states else []
        of_states = [f"state of parameter {name}: {bytes(row).hex()}" for name, row in zip(states, rows, strict=True)]
        buffers = (
            [] if self.buffers is None else [f"sync_buffers: {self.buffers.how}, every {self.buffers.every} steps"]
        )
        return buffers + of_states

    def replicated(self) -> dict[str, list[Tensor]]:
        """Return the tensors that are replicated on all ranks: parameters, and their state if gradients travel."""
        found, updated = {}, set(self.updated())
        for param, name in self.names.items():
            state = self.optimizer.state.get(as_stepped(param), {}) if param not in updated else {}
            kept = [local(value) for _, value in sorted(state.items()) if isinstance(value, Tensor)]
            found[name] = [param, *kept]
        return found

    # -- the update, for compressors that send it --------------------------------------------------------------------

    def updated(self) -> list[Tensor]:
        """Return the parameters that travel as updates."""
        if self.compressor.sends == "gradient":
            return []
        kind, sends_of = self.compressor.kind, self.compressor.sends_of
        return [param for param, name in self.names.items() if sends_of(kind(name, param)) == "update"]

    def hold_state(self) -> None:
        """Copy gradients and state that `make_update` changes; `rollback` restores them until the step is committed."""
        optimizer, restore = self.optimizer, self._before_update
        for group in optimizer.param_groups:
            settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            restore.append(functools.partial(group.update, settings))
        state = {param: copy.deepcopy(values) for param, values in optimizer.state.items()}
        restore += [optimizer.state.clear, functools.partial(optimizer.state.update, state)]
        for param in self.updated():
            grad = None if param.grad is None else param.grad.clone()
            restore.append(functools.partial(setattr, param, "grad", grad))

    def rollback(self) -> None:
        """Restore the copies of `hold_state`."""
        if self._before_update:
            for restore in self._before_update:
                restore()
            self.release_state()
            self.commit.end()

    def release_state(self) -> None:
        """Release the copies of `hold_state`."""
        self._before_update = []

    @torch.no_grad()
    def make_update(self, step: int, sparse_as_dense: bool, trained: Collection[Tensor]) -> None:
        """Replace gradients by the changes that the optimizer would make to `trained` parameters, if updates travel.

        But for decoupled weight decay, which is the same on all ranks and need not travel, and for the first moment
        where the compressor replaces it. All parameters stay; the optimizer's state moves, so the caller marks the end
        of the commit that begins here.
        """
        travels, hidden = set(trained), HiddenGradients()
        # an empty shard does not travel, but has a state like the other ranks' shards
        updated = [param for param in self.updated() if param in travels or not param.numel()]
        held = [(param, param.detach().clone()) for param in updated if param.grad is not None]
        if sparse_as_dense and not isinstance(self.optimizer, torch.optim.SparseAdam):
            for param, _ in held:
                param.grad = param.grad.to_dense() if param.grad is not None else None
        decays = [(group, group["weight_decay"]) for group in self.optimizer.param_groups if _decays_apart(group)]
        replaces = self.compressor.replaces_first_moment(step)
        betas = [(group, group["betas"]) for group in self.optimizer.param_groups if replaces and "betas" in group]
        self.commit.begin("weights and the optimizer's state")
        try:
            for group, _ in decays:
                group["weight_decay"] = 0.0
            for group, (_, *others) in betas:
                group["betas"] = (0.0, *others)
            if len(updated) < len(self.names):
                hidden.hide(set(self.names).difference(updated))
            self._align_gradients()
            self.own_step()
            for param, before in held:
                grad = param.grad
                if grad is None or grad.dtype != param.dtype or not is_dense(grad):
                    grad = torch.empty_like(param)
                param.grad = torch.sub(param, before, out=grad)
        finally:
            for param, before in held:
                param.copy_(before)
            hidden.show()
            for group, decay in decays:
                group["weight_decay"] = decay
            for group, own in betas:
                group["betas"] = own

    @torch.no_grad()
    def take_update(self, exchanged: Iterable[Tensor]) -> list[Tensor]:
        """Add the combined updates to the `exchanged` parameters; return the parameters that the own step must skip.

        These include frozen parameters, for which no update was made.
        """
        updated = self.updated()
        among = {*map(as_stepped, updated)}.intersection(map(as_stepped, exchanged))
        for group in self.optimizer.param_groups:
            kept = 1 - group["lr"] * group["weight_decay"] if _decays_apart(group) else 1.0
            for param in group["params"]:
                if param in among and param.grad is not None:
                    param.data.mul_(kept).add_(param.grad)
        return updated

    # -- SGD's step at the coordinates that arrived, for gradients that are zero elsewhere ---------------------------

    @torch.no_grad()
    def step_touched(self, touched: Iterable[Touched]) -> list[Tensor]:
        """Take SGD's step, w <- w - lr g, at the `touched` positions only; return the parameters that are done.

        Only for SGD itself, where it has neither momentum nor weight decay to apply (DGC takes its momentum over), and
        where nobody else is to see the gradients before the step.
        """
        optimizer, of_all = self.optimizer, getattr(torch_optimizer, "_global_optimizer_pre_hooks", {})
        touched = list(touched) if self.is_sgd else []
        if not touched or of_all or len(getattr(optimizer, "_optimizer_step_pre_hooks", {})) > 1:  # one is dgcopt's own
            return []
        more = ("momentum", "weight_decay", "differentiable", "fused")  # a fused kernel may round differently
        rate = {
            param: float(group["lr"]) * (1 if group["maximize"] else -1)
            for group in optimizer.param_groups
            if not any(group.get(setting) for setting in more)
            for param in group["params"]
        }
        done = []
        for left in touched:
            count = len(left.bucket.segments)
            weights: list[Tensor | None] = [None] * count
            rates = [0.0] * count
            for place, segment in left.unchanged():
                flat = segment.flatten(segment.param)
                param = segment.param if segment.param in rate else as_stepped(segment.param)
                if param in rate and flat.data_ptr() == segment.param.data_ptr():
                    weights[place], rates[place] = flat, rate[param]
                    done.append(segment.param)
            step_at(left.bucket.parts(weights), rates, left.positions, left.values)
        return done


def _ddp_around(params: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel modules that make gradients of `params`."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    ours = set(params)
    return [module for module in all_ddp_modules() if not ours.isdisjoint(module.parameters())]


def _averages(module: DistributedDataParallel) -> bool:
    """Return True if a module without a hook has averaged gradients over all processes."""
    size = torch.distributed.get_world_size(module.process_group)
    everyone = size == torch.distributed.get_world_size() > 1
    # False after a forward pass within DDP's no_sync()
    return everyone and getattr(module, "require_forward_param_sync", True) and not getattr(module, "_comm_hooks", [])


def _decays_apart(group: dict[str, Any]) -> bool:
    """True if the optimizer applies the group's weight decay apart from the gradient, as AdamW does."""
    return bool(group.get("decoupled_weight_decay")) and bool(group["weight_decay"])
