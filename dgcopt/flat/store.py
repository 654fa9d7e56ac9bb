"""What one rank keeps from step to step, by kind and parameter name: flat in buckets, or waiting for buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..version import FORMAT, __version__
from .buckets import Bucket
from .shard import Shard

__all__ = ["Memory", "Store", "check_format", "is_unsent"]

Memory = dict[str, dict[str, Tensor]]
"""What algorithms keep, by kind and parameter name, in the parameters' shapes: `{"residual": {"fc.weight": ...}}`."""


class Store:
    """All that lasts of one rank's algorithm.

    While there are buckets, what is kept of their parameters lies in flat tensors of their layout. In between, as when
    other parameters are trained or state was loaded, it waits by parameter name for the buckets to come.

    Attributes: `shared`, small tensors that are the same on all ranks; `made_of`, by parameter name, what unsent memory
    consists of, see `claim`.
    """

    def __init__(self) -> None:
        self.shared: Memory = {}
        self.made_of: dict[str, str] = {}
        self._waiting: Memory = {}
        self._flat: dict[Bucket, dict[str, Tensor]] = {}
        self._shards: dict[Bucket, dict[str, Shard]] = {}

    def adopt(self, bucket: Bucket) -> dict[str, Tensor]:
        """The flat tensors of a new bucket, by kind; what waits for its parameters moves in, the rest is zero."""
        flats: dict[str, Tensor] = {}
        for kind, by_name in self._waiting.items():
            held = [(segment, by_name[segment.name]) for segment in bucket.segments if segment.name in by_name]
            if held:
                flat = flats[kind] = bucket.empty().to(held[0][1].dtype)
                for segment, tensor in held:
                    segment.view(flat).copy_(tensor)
        self._flat[bucket] = flats  # from here on it is in both, and `release` writes the same again
        self.forget([segment.name for segment in bucket.segments])
        return flats

    def shards(self, bucket: Bucket) -> dict[str, Shard]:
        """What a bucket holds of which this rank has a share only, by kind: empty at first, to be filled."""
        return self._shards.setdefault(bucket, {})

    def release(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Buckets, all or some, are no more: what they hold waits for others."""
        for bucket in list(self._flat if buckets is None else buckets):
            for kind, flat in self._held(bucket):
                self.put(kind, bucket, flat)
            self._flat.pop(bucket, None)
            self._shards.pop(bucket, None)

    def put(self, kind: str, bucket: Bucket, flat: Tensor) -> None:
        """Let a flat tensor wait by parameter name."""
        _write(self._waiting.setdefault(kind, {}), bucket, flat)

    def drop(self, kind: str) -> None:
        """Forget what waits of a kind."""
        self._waiting.pop(kind, None)

    def claim(self, names: Iterable[str], made_of: str) -> list[str]:
        """From now on what is kept of these parameters consists of that. What waits of something else is dropped.

        Returns the names of which something unsent was.
        """
        others = [name for name in names if self.made_of.get(name, made_of) != made_of]
        unsent = [by_name for kind, by_name in self._waiting.items() if is_unsent(kind)]
        lost = [name for name in others if any(name in by_name and by_name[name].any() for by_name in unsent)]
        self.forget(others)
        self.made_of |= dict.fromkeys(names, made_of)
        return lost

    def forget(self, names: Iterable[str]) -> None:
        """Drop what waits of these parameters."""
        for by_name in self._waiting.values():
            for name in names:
                by_name.pop(name, None)

    def waiting(self) -> Iterable[tuple[str, str]]:
        """Kind and parameter name of what no bucket has adopted yet."""
        return [(kind, name) for kind, by_name in self._waiting.items() for name in by_name]

    def memory(self) -> Memory:
        """A copy of all that is kept, but what is shared."""
        memory = copied(self._waiting)
        for bucket in self._flat:
            for kind, flat in self._held(bucket):
                _write(memory.setdefault(kind, {}), bucket, flat)
        return memory

    def _held(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """The flat tensors of a bucket, those of which this rank has a share among them."""
        yield from self._flat.get(bucket, {}).items()
        for kind, shard in self._shards.get(bucket, {}).items():
            yield kind, shard.whole()

    def state(self) -> dict[str, Any]:
        """A copy of all that is kept, for a checkpoint; `restore` takes it."""
        shared, made_of = copied(self.shared), dict(self.made_of)
        return {"format": FORMAT, "memory": self.memory(), "shared": shared, "made_of": made_of}

    def restore(self, state: Mapping[str, Any], shapes: Mapping[str, torch.Size] | None = None) -> None:
        """Take over what `state` gave, in place of all that there is; it waits for buckets.

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
        self._flat, self._shards = {}, {}
        self._waiting, self.shared = copied(state["memory"]), copied(state["shared"])
        self.made_of = dict(state["made_of"])

    def residual(self) -> dict[str, Tensor]:
        """Return this rank's residual by parameter name, without copies; of parameters that have one."""
        held = dict(self._waiting.get("residual", {}))
        for bucket, flats in self._flat.items():
            if "residual" in flats:
                held |= bucket.by_name(flats["residual"])
        return held

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet; 0.0 for algorithms that hold nothing back."""
        held = [(kind, tensor) for kind, by_name in self._waiting.items() for tensor in by_name.values()]
        held += [(kind, flat) for flats in self._flat.values() for kind, flat in flats.items()]
        held += [(kind, shard.held) for shards in self._shards.values() for kind, shard in shards.items()]
        parts = [tensor for kind, tensor in held if is_unsent(kind)]
        norms = [torch.linalg.vector_norm(part.float()).cpu() for part in parts]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def check_format(state: Mapping[str, Any]) -> None:
    """Raise ConfigError for a state that a version of dgcopt with another layout has saved."""
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"this state has format {state.get('format')}; dgcopt {__version__} reads format {FORMAT}. Load it with "
            f"the version of dgcopt that saved it, or load the weights alone and start anew."
        )


def is_unsent(kind: str) -> bool:
    """Whether memory of a kind is gradient that waits to be sent. All other kinds, such as momenta, are never sent."""
    return kind.startswith("residual")


def copied(memory: Memory) -> Memory:
    """The same, in tensors of its own."""
    return {kind: {n: t.detach().clone() for n, t in by_name.items()} for kind, by_name in memory.items()}


def _write(by_name: dict[str, Tensor], bucket: Bucket, flat: Tensor) -> None:
    by_name |= {name: view.clone() for name, view in bucket.by_name(flat)}
