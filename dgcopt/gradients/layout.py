"""Which gradients travel together: dense ones in buckets, in the order of their becoming ready; sparse ones alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from ..collectives import AllReduce, Broadcast, Collective
from ..flat.buckets import build_buckets
from ..flat.gradient import GradientBucket, Touched

__all__ = ["Layout", "lay_out"]

MEGABYTE = 1024 * 1024

_DTYPE = attrgetter("dtype")


@dataclass(eq=False)
class Layout:
    """How the gradients of the `trained` parameters travel; by default there are none yet.

    Attributes: `order`, all names as their gradients become ready; `buckets` in the order of their launch; `sparse`,
    parameters whose gradient is sparse, with their names; `place`, a dense parameter's bucket and its place in it.
    """

    trained: Sequence[Tensor] = ()
    order: Sequence[str] = ()
    buckets: Sequence[GradientBucket] = ()
    sparse: Sequence[tuple[str, Tensor]] = ()
    place: dict[Tensor, tuple[GradientBucket, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._dtypes, self._numels = _forms(self.trained)
        for bucket in self.buckets:
            for place, segment in enumerate(bucket.segments):
                self.place[segment.param] = (bucket, place)

    def fits(self, trained: Sequence[Tensor], sparse: Iterable[Tensor]) -> bool:
        """Whether it still serves: the same parameters are trained, of the same dtypes, and none turned out sparse."""
        same = len(trained) == len(self.trained) and all(a is b for a, b in zip(trained, self.trained, strict=True))
        same = same and _forms(trained) == (self._dtypes, self._numels)
        return same and not any(param in self.place for param in sparse)

    def check_sizes(self) -> None:
        """Raises ConfigError for a parameter that has got another number of elements."""
        for bucket in self.buckets:
            for segment in bucket.segments:
                segment.check_size()

    def touched(self) -> Iterator[Touched]:
        """Gradients that are zero but at a few positions."""
        for bucket in self.buckets:
            if bucket.touched is not None:
                yield bucket.touched

    def let_go(self) -> None:
        """The optimizer has stepped, or will not: keep no gradients alive beyond what the user does."""
        for bucket in self.buckets:
            bucket.let_go()


def _forms(params: Sequence[Tensor]) -> tuple[list[torch.dtype], list[int]]:
    """What a cast changes, and a change of size."""
    return [*map(_DTYPE, params)], [*map(Tensor.numel, params)]


def lay_out(
    named: Sequence[tuple[str, Tensor]],
    wanted: Sequence[str],
    sparse: Collection[Tensor],
    kind_of: Callable[[str, Tensor], Hashable],
    bucket_mb: float,
    first_bucket_mb: float,
    groups: dict[str, int] | None,
) -> Generator[Collective, Tensor, Layout]:
    """Agree on rank 0's order and on what is sparse on any rank, and lay out buckets by it.

    Args:
        named: the trained parameters, alike on all ranks.
        wanted: names in the order in which gradients became ready here.
        sparse: parameters whose gradients have been sparse here.
        kind_of, groups: which parameters may share a bucket; see `build_buckets`.
        bucket_mb, first_bucket_mb: when a bucket is full.
    """
    place = {name: i for i, name in enumerate(wanted)}
    # what rank 0 has not seen comes after what it has, the last parameter first, as backward would
    mine = sorted(range(len(named)), key=lambda i: (place.get(named[i][0], len(place)), -i))
    order = yield Broadcast(torch.tensor(mine, dtype=torch.int64), group="control", label="order of gradients")
    flags = torch.tensor([param in sparse for _, param in named], dtype=torch.int32)
    anywhere = yield AllReduce(flags, op="max", group="control", label="sparse gradients")
    is_sparse = anywhere.bool().tolist()
    dense = [named[i] for i in order.tolist() if not is_sparse[i]]
    sizes = int(bucket_mb * MEGABYTE), int(first_bucket_mb * MEGABYTE)
    return Layout(
        [param for _, param in named],
        [named[i][0] for i in order.tolist()],
        build_buckets(dense, kind_of, *sizes, groups, GradientBucket),
        [named[i] for i in order.tolist() if is_sparse[i]],
    )
