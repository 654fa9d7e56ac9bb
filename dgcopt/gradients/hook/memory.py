"""Memory of a `ddp_hook` on one rank, and the parts of DDP's buckets that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...comm import Comm
from ...compressors import Context
from ...errors import ConfigError
from ...exchange.agreement import compare
from ...exchange.link import measure_link
from ...exchange.parameters import check_trainable, describe
from ...exchange.scheduler import CollectiveScheduler, claim, context_of
from ...flat.optimizer_state import check_owner
from ...flat.store import Store, check_format
from .bucket import Part, gradients_of, parts_of
from .settings import HookSettings

if TYPE_CHECKING or torch.distributed.is_available():
    from torch.distributed import GradBucket
else:
    GradBucket = Any

__all__ = ["HookMemory"]

Names = tuple[str, ...]

KEYS = ("rank", "world_size", "step", "shapes", "attached", "memory", "shared", "made_of")
"""Keys of a state, besides its format."""


class HookMemory:
    """Memory by parameter name, and its assignment to the parts of DDP's buckets.

    Args:
        settings: the hook's settings.

    Attributes:
        step: number of committed steps.
        names: the parameters that DDP has brought so far, with their names.
        layout: the parts of each DDP bucket, by the names of its parameters.
        contexts: the memory of each part.
    """

    def __init__(self, settings: HookSettings) -> None:
        self._settings = settings
        self.step = 0
        self.names: dict[Tensor, str] = {}
        self.layout: dict[Names, list[Part]] = {}
        self.contexts: dict[Part, Context] = {}
        self._store = Store()
        self._saved: dict[str, Any] | None = None  # the restored state, until it is checked
        self._shapes: dict[str, list[int]] = {}  # of the parameters that it knows

    @property
    def averaged(self) -> set[Tensor]:
        """The parameters that DDP has averaged so far."""
        return set(self.names if self.layout else ())

    @property
    def keeps_any(self) -> bool:
        """True if some part has memory."""
        return any(context.memory or context.memory.shards for context in self.contexts.values())

    # -- persistence -------------------------------------------------------------------------------------------------

    def state(self, comm: Comm | None) -> dict[str, Any]:
        """Return a copy in plain tensors and numbers, for `restore`."""
        saved = self._saved or {}
        known = {**self._frozen(), **self.names} if self.names else {}
        return {
            "rank": comm.rank if comm is not None else saved.get("rank"),
            "world_size": comm.size if comm is not None else saved.get("world_size"),
            "step": self.step,
            "shapes": self._shapes | {name: list(param.shape) for param, name in known.items()},
            "attached": self._settings.attached is not None or saved.get("attached", False),
            **self._store.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`, between steps. The next backward pass checks that it belongs here.

        Raises ConfigError, and changes nothing, for a state that was not saved by a `ddp_hook`.
        """
        check_format(state)
        if lacking := [key for key in KEYS if key not in state]:
            raise ConfigError(
                f"this state lacks {', '.join(lacking)}, which ddp_hook saves: load the state of a ddp_hook, or start "
                f"without it"
            )
        self._store.restore(state)
        self.layout, self.contexts = {}, {}
        self._saved = {key: state[key] for key in ("rank", "world_size", "attached")}
        self._shapes = dict(state["shapes"])
        self.step = state["step"]

    def check_rank(self, comm: Comm) -> None:
        """Raise ConfigError if the restored state is another rank's."""
        if self._saved is not None and self._saved.get("rank") is not None:
            check_owner(
                self._saved,
                *(comm.rank, comm.size),
                owner=" of ddp_hook",
                why="each rank has its own residual. Let every rank save and load its own file, or start with a new "
                "ddp_hook, which loses the residual.",
            )

    def check_adopted(self) -> None:
        """Raise ConfigError if DDP has brought all buckets, and the restored state has memory of other parameters.

        Memory of frozen parameters waits.
        """
        if self._saved is None:
            return
        frozen = {name: param for param, name in self._frozen().items()}
        for kind, name in self._store.waiting():
            if name not in frozen:
                raise ConfigError(
                    f"the restored state of ddp_hook holds {kind} of parameter {name!r}, which DDP does not train: "
                    f"build the same model, or name its parameters (named_parameters)"
                )
            self._check_shape(name, frozen[name])
        self._saved = None

    def _frozen(self) -> dict[Tensor, str]:
        """Return the named parameters that are frozen now."""
        named = {**(self._settings.names or {}), **self.names}
        return {param: name for param, name in named.items() if not param.requires_grad}

    # -- within a step -----------------------------------------------------------------------------------------------

    def count_step(self) -> None:
        """Count a step that was committed."""
        self.step += 1

    # -- assignment to buckets ---------------------------------------------------------------------------------------

    def parts_of(self, bucket: GradBucket, scheduler: CollectiveScheduler, first: int) -> tuple[Names, list[Part]]:
        """Return the names of a bucket's parameters, and its parts; lay it out if it is new.

        Args:
            bucket: one of DDP's buckets.
            scheduler: starts the collectives of a comparison over ranks.
            first: the index of its first part among all that are exchanged.
        """
        params = bucket.parameters()
        for param in params:
            if param not in self.names:
                self.names[param] = self._name(param)
        names = tuple(self.names[param] for param in params)
        if names not in self.layout:
            self.layout[names] = self._lay_out(bucket, names, scheduler, first)
        return names, self.layout[names]

    def _name(self, param: Tensor) -> str:
        given = self._settings.names
        if given is not None and param not in given:
            given = self._settings.number_added()
        if given is not None:
            if param not in given:
                raise ConfigError(
                    f"DDP trains a parameter of shape {tuple(param.shape)} that is not among those given to ddp_hook: "
                    f"give it named_parameters and the optimizer of the whole model"
                )
            return given[param]
        known = list(self._shapes) if self._saved is not None else []
        place = len(self.names)
        return known[place] if place < len(known) else f"parameter{place}"

    def _lay_out(
        self, bucket: GradBucket, names: Sequence[str], scheduler: CollectiveScheduler, first: int
    ) -> list[Part]:
        """Lay out one DDP bucket, after comparing it over ranks; memory of its parameters moves here."""
        by_name = dict(zip(bucket.parameters(), names, strict=True))
        self._check(by_name)
        settings, compressor, comm = self._settings, self._settings.compressor, scheduler.comm
        lines = describe(
            settings.attached.optimizer if settings.attached is not None else None,  # type: ignore[arg-type]  # its class
            by_name,
            {"compression": compressor, "scaler": settings.scaler is not None},
        )
        lines += settings.groups.describe() if settings.groups is not None else []
        scheduler.drive(scheduler.through(compare(lines, comm.rank, "settings of ddp_hook")))
        scheduler.drive(scheduler.through(measure_link(comm, compressor, bucket.buffer().device)))
        for others in [key for key in self.layout if not set(key).isdisjoint(names)]:  # as DDP had them before
            for part in self.layout.pop(others):
                self._store.release([part.bucket])
                del self.contexts[part]
        if bucket.buffer().is_sparse:
            self._store.remove(names)
            return []

        def stays(kind: Any) -> bool:
            return not compressor.whole_model and compressor.in_place(kind)

        grads = gradients_of(bucket.parameters(), bucket.buffer())
        parts = parts_of(by_name, grads, compressor.kind, stays, first)
        claim(self._store, [part.bucket for part in parts], compressor, comm.rank)
        for part in parts:
            if compressor.adds_up(part.bucket.kind):  # divided while it is copied, not in a pass of its own
                self.contexts[part] = context_of(part.bucket, comm, "sum", self._store, 1 / comm.size)
            else:
                self.contexts[part] = context_of(part.bucket, comm, "average", self._store)
        self._store.remove(names)
        return parts

    def _check(self, names: dict[Tensor, str]) -> None:
        """Raise ConfigError for parameters that cannot be averaged, or that a restored state does not fit."""
        check_trainable(names)
        attached, saved = self._settings.attached, self._saved
        stepped = attached.params if attached is not None else {*names}
        for name in [name for param, name in names.items() if param not in stepped]:
            raise ConfigError(
                f"DDP trains parameter {name!r}, which is not in the optimizer given to ddp_hook: give it the "
                f"optimizer of the whole model, or none"
            )
        if saved is None:
            return
        if saved["attached"] and attached is None:
            raise ConfigError(
                "this state of ddp_hook had an optimizer: give it the new one, ddp_hook(state, optimizer=optimizer)"
            )
        for param, name in names.items():
            self._check_shape(name, param)

    def _check_shape(self, name: str, param: Tensor) -> None:
        """Raise ConfigError if the restored state has another shape for a parameter."""
        shape = self._shapes.get(name)
        if self._shapes and shape != list(param.shape):
            raise ConfigError(
                f"the restored state of ddp_hook knows parameter {name!r} with shape {shape}, DDP has "
                f"{list(param.shape)}: build the same model, or name its parameters (named_parameters)"
            )
