"""One rank's memory from step to step, by kind and parameter name: flat in buckets, or waiting for buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels import norm_of
from ..version import FORMAT, __version__
from .buckets import Bucket
from .memory import Memory, is_unsent

__all__ = ["NamedTensors", "Store", "check_format"]

NamedTensors = dict[str, dict[str, Tensor]]
"""Tensors by kind and parameter name, in the parameters' shapes: `{"residual": {"fc.weight": ...}}`."""


class Store:
    """All memory of one rank's algorithm.

    The memory of parameters in buckets is in flat tensors of their layout. After a change of buckets, or when state was
    loaded, it waits by parameter name for new buckets.

    Attributes:
        shared: small tensors that are the same on all ranks.
        made_of: content of unsent memory by parameter name; see `claim`.
    """

    def __init__(self) -> None:
        self.shared: NamedTensors = {}
        self.made_of: dict[str, str] = {}
        self._waiting: NamedTensors = {}
        self._adopted: dict[Bucket, Memory] = {}

    def adopt(self, bucket: Bucket) -> Memory:
        """Return a new bucket's memory, with the waiting memory of its parameters; the rest is zero."""
        memory = Memory(bucket.segments, self.shared)
        for kind, by_name in self._waiting.items():
            held = [(segment, by_name[segment.name]) for segment in bucket.segments if segment.name in by_name]
            if held:
                # parameters that had other compressors may have memory of another precision
                flat = bucket.empty().to(reduce(torch.promote_types, (tensor.dtype for _, tensor in held)))
                for segment, tensor in held:
                    segment.view(flat).copy_(tensor)
                memory.put(kind, flat, [segment for segment in bucket.segments if segment.name not in by_name])
        self._adopted[bucket] = memory  # in both until `remove`; `release` would write the same again
        self.remove([segment.name for segment in bucket.segments])
        return memory

    def release(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Dissolve buckets, all or some: their memory waits for new ones."""
        for bucket in list(self._adopted if buckets is None else buckets):
            self._add_held(bucket, self._waiting)
            self._adopted.pop(bucket, None)

    def put(self, kind: str, bucket: Bucket, flat: Tensor) -> None:
        """Make a flat tensor wait by parameter name."""
        _write(self._waiting, kind, bucket.by_name(flat))

    def drop(self, kind: str) -> None:
        """Delete the waiting memory of a kind."""
        self._waiting.pop(kind, None)

    def drop_all_but_unsent(self, kept: Iterable[str] = ()) -> None:
        """Delete waiting memory that is not unsent gradient, but for kinds that are `kept`."""
        for kind in [kind for kind in self._waiting if not is_unsent(kind) and kind not in kept]:
            self.drop(kind)

    def claim(self, names: Iterable[str], made_of: str) -> list[tuple[str, str]]:
        """Set the content of these parameters' unsent memory, and delete waiting memory of another content.

        Returns names of parameters that lost memory, and its kind: "residual" for all that is unsent, or "momentum".
        """
        others = [name for name in names if self.made_of.get(name, made_of) != made_of]
        lost: list[tuple[str, str]] = []
        for name in others:
            held = [kind for kind, by_name in self._waiting.items() if name in by_name and by_name[name].any()]
            kinds = {"residual" if is_unsent(kind) else kind for kind in held}
            lost += [(name, kind) for kind in ("residual", "momentum") if kind in kinds]
        self.remove(others)
        self.made_of |= dict.fromkeys(names, made_of)
        return lost

    def remove(self, names: Iterable[str]) -> None:
        """Delete the waiting memory of these parameters."""
        for by_name in self._waiting.values():
            for name in names:
                by_name.pop(name, None)

    def waiting(self) -> Iterable[tuple[str, str]]:
        """Return kind and parameter name of all waiting memory."""
        return [(kind, name) for kind, by_name in self._waiting.items() for name in by_name]

    def memory(self) -> NamedTensors:
        """Return a copy of all memory that is not shared."""
        memory = copied(self._waiting)
        for bucket in self._adopted:
            self._add_held(bucket, memory)
        return memory

    def _add_held(self, bucket: Bucket, to: NamedTensors) -> None:
        """Add copies of a bucket's memory that has begun, including that of shards."""
        held = self._adopted.get(bucket)
        if held is None:
            return
        for kind, flat in held.items():
            begun = [segment for segment in bucket.segments if held.has_begun(kind, segment)]
            _write(to, kind, ((segment.name, segment.view(flat)) for segment in begun))
        for kind, shard in held.shards.items():
            _write(to, kind, bucket.by_name(shard.whole()))

    def state(self) -> dict[str, Any]:
        """Return a checkpointable copy for `restore`."""
        shared, made_of = copied(self.shared), dict(self.made_of)
        return {"format": FORMAT, "memory": self.memory(), "shared": shared, "made_of": made_of}

    def restore(self, state: Mapping[str, Any], shapes: Mapping[str, torch.Size] | None = None) -> None:
        """Replace all memory by a `state`; it waits for buckets.

        `shapes` are those of the parameters, if known. Raises ConfigError for a state of another format, and for memory
        of an unknown parameter or of another shape.
        """
        check_format(state)
        for kind, by_name in state["memory"].items():
            for name, tensor in by_name.items():
                if shapes is None or tensor.shape == shapes.get(name):
                    continue
                raise ConfigError(
                    f"the state holds {kind} of shape {tuple(tensor.shape)} for parameter {name!r}, which "
                    + (f"has shape {tuple(shapes[name])}" if name in shapes else "this optimizer does not have")
                )
        self._adopted = {}
        self._waiting, self.shared = copied(state["memory"]), copied(state["shared"])
        self.made_of = dict(state["made_of"])

    def residual(self) -> dict[str, Tensor]:
        """Return this rank's residual by parameter name, without copies; of parameters that have one."""
        held = dict(self._waiting.get("residual", {}))
        for bucket, memory in self._adopted.items():
            if "residual" in memory:
                held |= bucket.by_name(memory["residual"])
        return held

    def residual_norm(self) -> float:
        """Return the Euclidean norm of this rank's unsent memory; 0.0 for algorithms without any."""
        held = [(kind, tensor) for kind, by_name in self._waiting.items() for tensor in by_name.values()]
        for memory in self._adopted.values():
            held += [*memory.items(), *((kind, shard.held) for kind, shard in memory.shards.items())]
        parts = [tensor for kind, tensor in held if is_unsent(kind)]
        norms = [norm_of(part).cpu().double() for part in parts]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def check_format(state: Mapping[str, Any]) -> None:
    """Raise ConfigError for a state that a version of dgcopt with another layout has saved."""
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"this state has format {state.get('format')}; dgcopt {__version__} reads format {FORMAT}. Load it with "
            f"the version of dgcopt that saved it, or load the weights alone and start anew."
        )


def copied(memory: NamedTensors) -> NamedTensors:
    """Return a deep copy."""
    return {kind: {n: t.detach().clone() for n, t in by_name.items()} for kind, by_name in memory.items()}


def _write(to: NamedTensors, kind: str, named: Iterable[tuple[str, Tensor]]) -> None:
    to.setdefault(kind, {}).update({name: view.clone() for name, view in named})
