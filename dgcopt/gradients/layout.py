"""The layout of gradients: dense ones in buckets, in ready order; sparse ones alone."""

from __future__ import annotations

import operator
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..collectives import AllReduce, Broadcast, Collective
from ..comm import Comm
from ..compressors import Compressor, Context
from ..errors import CommError
from ..exchange.agreement import DAMAGED
from ..exchange.link import measure_link
from ..exchange.scheduler import claim, context_of
from ..flat.buckets import build_buckets
from ..flat.gradient import GradientBucket, Touched
from ..flat.store import Store
from .settings import Settings

__all__ = ["Layout", "bucket_sizes", "lay_out"]

MEGABYTE = 1024 * 1024

_DTYPE = operator.attrgetter("dtype")


@dataclass(eq=False)
class Layout:
    """Assignment of gradients to buckets; empty before the first step.

    Attributes:
        trained: parameters whose gradients are exchanged.
        names: their names.
        order: names of all parameters, in the order in which their gradients become ready.
        buckets: buckets of dense gradients, in the order of their launch.
        sparse: name and parameter of each sparse gradient.
        contexts: context of each bucket, which its compressor gets.
        place: bucket of each dense parameter, and its index in it.
        launches_early: True if some bucket may launch during backward.
    """

    trained: Sequence[Tensor] = ()
    names: Sequence[str] = ()
    order: Sequence[str] = ()
    buckets: Sequence[GradientBucket] = ()
    sparse: Sequence[tuple[str, Tensor]] = ()
    contexts: dict[GradientBucket, Context] = field(default_factory=dict)
    place: dict[Tensor, tuple[GradientBucket, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._dtypes, self._numels = _forms(self.trained)
        self.launches_early = any(bucket.launches_early for bucket in self.buckets)
        for bucket in self.buckets:
            for place, segment in enumerate(bucket.segments):
                self.place[segment.param] = (bucket, place)

    def fits(self, trained: Sequence[Tensor], sparse: Iterable[Tensor]) -> bool:
        """True if the same parameters are trained, of the same dtypes and sizes, and none is sparse now."""
        same = len(trained) == len(self.trained) and all(map(operator.is_, trained, self.trained))
        same = same and _forms(trained) == (self._dtypes, self._numels)
        return same and not any(param in self.place for param in sparse)

    def check_sizes(self) -> None:
        """Raise ConfigError for a parameter whose number of elements has changed."""
        for bucket in self.buckets:
            for segment in bucket.segments:
                segment.check_size()

    def touched(self) -> Iterator[Touched]:
        """The touched buckets: gradients that are zero except at a few positions."""
        for bucket in self.buckets:
            if bucket.touched is not None:
                yield bucket.touched

    def release_gradients(self) -> None:
        """Release all references to gradients at the end of a step."""
        for bucket in self.buckets:
            bucket.release_gradients()


def _forms(params: Sequence[Tensor]) -> tuple[list[torch.dtype], list[int]]:
    """Return dtypes and sizes of parameters, to detect a cast or a resize."""
    return [*map(_DTYPE, params)], [*map(Tensor.numel, params)]


def bucket_sizes(
    settings: Settings, compressor: Compressor, named: Iterable[tuple[str, Tensor]]
) -> tuple[float, float]:
    """Return megabytes per bucket, and of the first one: few if buckets launch in backward at little cost.

    On a GPU every bucket that is compressed costs a hundred launches and more, so few large ones are faster
    (docs/benchmarks.md, "On a GPU").
    """
    kinds = {(param.device, compressor.adds_up(compressor.kind(name, param))) for name, param in named}
    early = [(device, adds_up) for device, adds_up in kinds if _launches_early(compressor, device)]
    if not early:
        most, first = 100.0, 100.0
    elif all(device.type == "cpu" or adds_up for device, adds_up in early):
        most, first = 25.0, 1.0
    else:
        most, first = 1000.0, 250.0
    if compressor.sizes is not None:
        most, first = compressor.sizes
    if settings.bucket_mb is not None:
        most, first = settings.bucket_mb, min(first, settings.bucket_mb)
    return most, first if settings.first_bucket_mb is None else settings.first_bucket_mb


def lay_out(
    named: Sequence[tuple[str, Tensor]],
    wanted: Sequence[str],
    sparse: Collection[Tensor],
    compressor: Compressor,
    settings: Settings,
    comm: Comm,
    store: Store,
) -> Generator[Collective, Tensor, Layout]:
    """Agree on rank 0's order and on gradients that are sparse on any rank, and lay out buckets by it.

    Args:
        named: the trained parameters, alike on all ranks.
        wanted: names in the order in which gradients became ready here.
        sparse: parameters whose gradients have been sparse here.
        compressor, settings: by which buckets are built and exchanged.
        comm: the wire.
        store: memory of the parameters, which the new buckets adopt.

    Raises CommError, on a rank that gets no such order from rank 0.
    """
    place = {name: i for i, name in enumerate(wanted)}
    # parameters that rank 0 has not seen come last, in reverse order, as backward would reach them
    mine = sorted(range(len(named)), key=lambda i: (place.get(named[i][0], len(place)), -i))
    told = yield Broadcast(torch.tensor(mine, dtype=torch.int64), group="control", label="order of gradients")
    order = told.tolist()
    if sorted(order) != sorted(mine):
        raise CommError(
            f"rank {comm.rank}: the order of gradients that came from rank 0 is not one of {len(mine)} parameters "
            f"({', '.join(map(str, order[:8]))} ...): {DAMAGED}"
        )
    flags = torch.tensor([param in sparse for _, param in named], dtype=torch.int32)
    anywhere = yield AllReduce(flags, op="max", group="control", label="sparse gradients")
    is_sparse = anywhere.bool().tolist()
    dense = [named[i] for i in order if not is_sparse[i]]
    most, first = bucket_sizes(settings, compressor, named)
    sizes = int(most * MEGABYTE), int(first * MEGABYTE)
    buckets = build_buckets(dense, compressor.kind, *sizes, settings.groups, GradientBucket)
    if buckets:
        yield from measure_link(comm, compressor, max(buckets, key=lambda bucket: bucket.numel).device)
    claim(store, buckets, compressor, comm.rank)
    contexts = {bucket: _prepared(bucket, compressor, settings, comm, store) for bucket in buckets}
    return Layout(
        [param for _, param in named],
        [name for name, _ in named],
        [named[i][0] for i in order],
        buckets,
        [named[i] for i in order if is_sparse[i]],
        contexts,
    )


def _prepared(bucket: GradientBucket, compressor: Compressor, settings: Settings, comm: Comm, store: Store) -> Context:
    """Set how a new bucket is exchanged, and return its context."""
    divided = settings.op == "average" and compressor.adds_up(bucket.kind)  # before the exchange
    op: Literal["average", "sum"] = "average" if settings.op == "average" and not divided else "sum"
    # small gradients, and all on a GPU, are copied faster than they are checked one by one
    stays = bucket.is_cpu and compressor.in_place(bucket.kind) and not bucket.has_small_parts
    bucket.set_exchange(in_place=stays, early=_launches_early(compressor, bucket.device))
    context = context_of(bucket, comm, op, store, 1 / comm.size if divided else 1.0)
    return context.placed(gain=settings.gradient_predivide_factor)


def _launches_early(compressor: Compressor, device: torch.device) -> bool:
    """Return True if a compressor may launch buckets of a device during backward."""
    return compressor.overlaps(device) and not compressor.whole_model and compressor.sends == "gradient"
