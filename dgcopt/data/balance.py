"""Load-balanced samplers for inputs of uneven cost, such as sentences: in each step all ranks get similar costs.

In synchronous training all ranks wait for the slowest in each step, so the costs of each step must be equal, not only
their sums. Samples are sorted by cost and cut into rows of one per rank; rows are shuffled.
"""

from __future__ import annotations

import itertools
import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ..comm import Comm, current_comm
from ..errors import CheckpointError, ConfigError
from ..errors.checks import check_flag, check_whole, is_number

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]


_COSTS = "checksum_of_costs"
_BATCHES = "checksum_of_batches"


class Resumable:
    """A sampler with a resumable position in the epoch. Subclasses return the settings that determine the order.

    Attributes:
        epoch: number of the epoch, which determines the order too.
    """

    epoch: int = 0
    _first: int = 0
    """Position of the next iteration."""
    _handed_out: int = 0

    def setting(self) -> dict[str, Any]:
        """Return the settings that determine the order."""
        raise NotImplementedError

    def state_dict(self, done: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, the same on all ranks, for `load_state_dict`.

        Args:
            done: number of items of this epoch that were trained on. None is the number of items handed out, which is
                right unless the loader reads ahead, as DataLoader does with `num_workers` above 0.
        """
        done = self._handed_out if done is None else check_whole(done, "done", 0)
        return {**self.setting(), "epoch": self.epoch, "done": done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next iteration starts in the middle of that epoch, later ones at the beginning.

        Raises CheckpointError if the state is of a sampler with another order.
        """
        differing = [
            f"{name} was {state.get(name)!r} and is {value!r}"
            for name, value in self.setting().items()
            if state.get(name, value if name == _COSTS else None) != value  # earlier versions saved no costs
        ]
        if differing:
            raise CheckpointError(
                f"this state of {type(self).__name__} is of another order of samples: {'; '.join(differing)}. Restore "
                f"it with the same settings and world size, or start with the next epoch."
            )
        self._begin(check_whole(state.get("epoch"), "epoch", 0))
        self._first = self._handed_out = check_whole(state.get("done"), "done", 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch; call it on all ranks before each epoch. A restored epoch keeps its position."""
        self._begin(check_whole(epoch, "epoch", 0))
        if self._first == 0:  # the rest of a restored epoch stays in its order
            self._follow_ranks()

    def _begin(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._first, self._handed_out = epoch, 0, 0

    def _follow_ranks(self) -> None:
        """Take the current world size and rank, where they may change."""

    def counted(self, items: Sequence[Any]) -> Iterator[Any]:
        """Yield the remaining items of the epoch."""
        self._handed_out, self._first = self._first, 0
        for item in itertools.islice(items, self._handed_out, None):
            self._handed_out += 1
            yield item


class LoadBalancingDistributedSampler(Resumable, Sampler[int]):
    """This rank's part of a dataset, with similar costs on all ranks in each step.

    Otherwise like `torch.utils.data.DistributedSampler`: each sample goes to one rank, in an order that follows from
    the seed and the epoch. Ranks take turns with the most costly sample of a row.

    Args:
        dataset: a dataset of fixed length, equal on all ranks.
        complexity_fn: function of a sample that returns its cost in any unit, called once per sample; or the costs, one
            number per sample, if reading all samples takes long.
        num_replicas, rank: world size and rank; None takes those of `dgcopt.init()`, at each `set_epoch` where they
            may change: `dgcopt.init(survive=True)`, and Horovod Elastic.
        shuffle: shuffle each epoch differently; otherwise costs ascend.
        seed: seed of the shuffle, equal on all ranks.
        drop_last: drop samples until all ranks have the same number; otherwise some samples are repeated.
        random_level: noise on the costs, from 0 for the best balance to 1 for noise as large as the range of costs, so
            that samples meet different partners.
        uneven: neither repeat nor drop samples: some ranks get one sample less. Loop within `dgcopt.join(optimizer)`.

    Raises ConfigError for settings out of range, and for a cost that is not a finite number.
    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Any],
        complexity_fn: Callable[[Any], float] | Sequence[float] | Tensor,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0.0,
        *,
        uneven: bool = False,
    ) -> None:
        self._comm: Comm | None = None
        if num_replicas is None or rank is None:
            comm = current_comm()
            changes = comm.survives or comm.elastic
            self._comm = comm if changes and num_replicas is None and rank is None else None
            num_replicas = comm.size if num_replicas is None else num_replicas
            rank = comm.rank if rank is None else rank
        self.num_replicas = check_whole(num_replicas, "num_replicas", 1)
        self.rank = check_whole(rank, "rank", 0)
        if rank >= num_replicas:
            raise ConfigError(f"rank must be below num_replicas, which is {num_replicas}, not {rank}")
        self.shuffle = check_flag(shuffle, "shuffle")
        self.seed = check_whole(seed, "seed", 0)
        self.drop_last = check_flag(drop_last, "drop_last")
        self.uneven = check_flag(uneven, "uneven")
        if drop_last and uneven:
            raise ConfigError(
                "drop_last drops samples to give all ranks the same number, uneven does not: set one of them"
            )
        if not is_number(random_level) or not 0 <= random_level <= 1:
            raise ConfigError(f"random_level must be from 0 to 1, not {random_level!r}")
        self.random_level = float(random_level)
        self.dataset = dataset
        self.costs = _costs_of(dataset, complexity_fn)
        self._checksum = zlib.crc32(array("d", self.costs.tolist()))

    def _follow_ranks(self) -> None:
        if self._comm is not None:
            if self._comm.elastic:  # Horovod Elastic has another one after each loss
                self._comm = current_comm()
            self.num_replicas, self.rank = self._comm.size, self._comm.rank

    def setting(self) -> dict[str, Any]:
        return {
            "samples": len(self.costs),
            _COSTS: self._checksum,
            "num_replicas": self.num_replicas,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "random_level": self.random_level,
            "uneven": self.uneven,
        }

    def of_rank(self, rank: int) -> list[int]:
        """Return a rank's samples of this epoch, in order."""
        with torch.device("cpu"):
            own = self._rows()[:, rank]
            return own[own >= 0].tolist()

    def __iter__(self) -> Iterator[int]:
        return self.counted(self.of_rank(self.rank))

    def __len__(self) -> int:
        """Return the number of this rank's samples per epoch."""
        short, longer = divmod(len(self.costs), self.num_replicas)
        if self.uneven:  # the first ranks have one sample more
            return short + (self.rank < longer)
        return short + (longer > 0 and not self.drop_last)

    def _rows(self) -> Tensor:
        """Return one sample per step and rank, -1 for none: `[steps, num_replicas]`."""
        count, ranks = len(self.costs), self.num_replicas
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order, costs, full_rows, left = torch.arange(count), self.costs, count // ranks, count % ranks
        short = full_rows * ranks
        if self.shuffle:
            spread = float(costs.max() - costs.min()) * self.random_level
            costs = costs + spread * torch.rand(count, generator=generator, dtype=torch.float64)
            order = torch.randperm(count, generator=generator)  # vary the partners of samples with equal cost
            short = ranks * int(torch.randint(full_rows + 1, (1,), generator=generator))
        order = order[costs[order].argsort(stable=True)]
        rows = torch.cat([order[:short], order[short + left :]]).view(-1, ranks)
        # rotate rows, so that the last rank does not get the most costly sample of every row
        turn = torch.arange(full_rows)[:, None] + torch.arange(ranks)[None, :]
        rows = rows.gather(1, turn % ranks)
        last = rows.new_empty(0, ranks)
        if left and self.uneven:
            last = torch.cat([order[short : short + left], order.new_full((ranks - left,), -1)])[None]
        elif left and not self.drop_last:
            first = max(0, min(short, count - ranks))  # fill up with samples of similar cost
            rows = torch.cat([rows, order[(first + torch.arange(ranks)) % count][None]])
        if self.shuffle:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        return torch.cat([rows, last])


class LoadBalancingDistributedBatchSampler(Resumable, Sampler[list[int]]):
    """Batches of a rank's samples made by a function, such as batches of a limited number of words.

    Args:
        sampler: the sampler to batch; its `drop_last` must be False.
        batch_fn: function from the list of a rank's samples to a list of batches; deterministic, and equal on all
            ranks.
        drop_last: drop the last batches of ranks that have more than others; otherwise ranks with fewer repeat their
            first ones.
        uneven: neither drop nor repeat batches. Loop within `dgcopt.join(optimizer)`.

    Raises ConfigError for conflicting settings, and for a batch_fn that returns no batches of samples.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
        *,
        uneven: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ConfigError(f"sampler must be a LoadBalancingDistributedSampler, not {type(sampler).__name__}")
        if sampler.drop_last:
            raise ConfigError("drop_last of the sampler must be False: set it on the batch sampler instead")
        if not callable(batch_fn):
            raise ConfigError(f"batch_fn must be a function of a list of samples, not {batch_fn!r}")
        self.drop_last = check_flag(drop_last, "drop_last")
        self.uneven = check_flag(uneven, "uneven")
        if drop_last and uneven:
            raise ConfigError(
                "drop_last drops batches to give all ranks the same number, uneven does not: set one of them"
            )
        self.sampler = sampler
        self.batch_fn = batch_fn
        self._batches: tuple[tuple[int, int, int], list[list[int]]] | None = None
        self._checked: tuple[range, int] | None = None

    @property
    def num_replicas(self) -> int:
        """World size."""
        return self.sampler.num_replicas

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.sampler.rank

    def setting(self) -> dict[str, Any]:
        return {**self.sampler.setting(), "drop_last_batches": self.drop_last, "uneven_batches": self.uneven}

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self.sampler._begin(epoch)

    def _follow_ranks(self) -> None:
        self.sampler._follow_ranks()

    def state_dict(self, done: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, as the sampler does; `done` counts batches."""
        self._begin(self.sampler.epoch)
        return {**super().state_dict(done), _BATCHES: self._checksum()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume as the sampler does. Raises CheckpointError also if `batch_fn` makes other batches than before."""
        super().load_state_dict(state)
        mine = self._checksum()
        if state.get(_BATCHES, mine) != mine:  # earlier versions saved none
            self._first = self._handed_out = 0
            raise CheckpointError(
                f"batch_fn makes other batches than when this state was saved, so position {state['done']} is another "
                f"one. Restore it with the same batch_fn, or start with the next epoch."
            )

    def _checksum(self) -> int:
        """Checksum of the batches of the dataset's first samples, as many as a rank's: equal on all ranks."""
        first = range(-(-len(self.sampler.costs) // self.num_replicas))
        if self._checked is None or self._checked[0] != first:
            flat = [number for batch in self._made_of([*first], "the first samples") for number in (len(batch), *batch)]
            self._checked = first, zlib.crc32(array("q", flat))
        return self._checked[1]

    def __iter__(self) -> Iterator[list[int]]:
        return self.counted(self.batches())

    def __len__(self) -> int:
        """Return the number of this rank's batches per epoch."""
        return len(self.batches())

    def batches(self) -> list[list[int]]:
        """Return this rank's batches of this epoch."""
        self._begin(self.sampler.epoch)  # Lightning, for one, calls set_epoch of `batch_sampler.sampler`
        order = self.epoch, self.num_replicas, self.rank
        if self._batches is None or self._batches[0] != order:
            self._batches = order, self._make_batches()
        return self._batches[1]

    def _make_batches(self) -> list[list[int]]:
        if self.uneven:
            return self._of_rank(self.rank)
        everyones = [self._of_rank(rank) for rank in range(self.num_replicas)]
        own, counts = everyones[self.rank], [len(batches) for batches in everyones]
        if self.drop_last:
            return own[: min(counts)]
        if not own:
            raise ConfigError(
                f"batch_fn made no batch for rank {self.rank}, and {max(counts)} for others: none to repeat"
            )
        return [own[place % len(own)] for place in range(max(counts))]

    def _of_rank(self, rank: int) -> list[list[int]]:
        return self._made_of(self.sampler.of_rank(rank), f"rank {rank}")

    def _made_of(self, samples: list[int], whose: str) -> list[list[int]]:
        made = self.batch_fn(samples)
        made = list(made) if isinstance(made, Iterable) else [made]
        if not all(isinstance(batch, Iterable) for batch in made):
            raise ConfigError(f"batch_fn must make a list of lists of samples, not {made!r:.200}")
        batches = [list(batch) for batch in made]
        for place, batch in enumerate(batches):
            if not batch or not all(isinstance(sample, int) for sample in batch):
                raise ConfigError(
                    f"batch_fn must make lists of samples, none empty: batch {place} of {whose} is {batch}"
                )
        return batches


def _costs_of(dataset: Any, complexity_fn: Any) -> Tensor:
    """Return all costs, float64. Raises ConfigError for a cost that is not finite, or a wrong number of costs."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"{type(dataset).__name__} has no length or no samples by index; load balancing needs both")
    if not callable(complexity_fn) and not isinstance(complexity_fn, Iterable):
        raise ConfigError(f"complexity_fn must be a function of a sample, or all costs, not {complexity_fn!r:.200}")
    count = len(dataset)
    if count == 0:
        raise ConfigError("the dataset is empty")
    if callable(complexity_fn):
        said = [complexity_fn(dataset[place]) for place in range(count)]
    else:
        said = complexity_fn.tolist() if isinstance(complexity_fn, Tensor) else list(complexity_fn)
        if len(said) != count:
            raise ConfigError(
                f"complexity_fn has {len(said)} costs, but the dataset has {count} samples: give one cost per sample"
            )
    for place, cost in enumerate(said):
        try:
            said[place] = float(cost)
        except (TypeError, ValueError, RuntimeError):
            said[place] = math.nan
        if not math.isfinite(said[place]):
            raise ConfigError(
                f"complexity_fn must be a finite number for each sample; for sample {place} it is {cost!r}"
            )
    return torch.tensor(said, dtype=torch.float64, device="cpu")
