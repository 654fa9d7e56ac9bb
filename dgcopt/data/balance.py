"""Samplers for samples that differ in cost, such as sentences: at each step all ranks get samples that cost alike.

In synchronous training every rank waits for the slowest at every step, so what counts is not that the ranks' sums are
equal but that their steps are. Samples are sorted by cost and cut into rows of one per rank; rows are shuffled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ..checks import check_flag, check_whole
from ..comm import current_comm
from ..errors import CheckpointError, ConfigError

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]


class Resumable:
    """Where an epoch's iteration stands. Subclasses say what must be equal for it to mean the same.

    Attributes: `epoch`, which differs in its order from others.
    """

    epoch: int = 0
    _first: int = 0
    """Where the next iteration begins."""
    _handed_out: int = 0

    def setting(self) -> dict[str, Any]:
        """What the order depends on."""
        raise NotImplementedError

    def state_dict(self, done: int | None = None) -> dict[str, Any]:
        """Where this rank stands, and the others after as many steps, for `load_state_dict`.

        Args:
            done: how many of this epoch have been trained on. None is as many as were handed out: right where the
                loader does not read ahead, which DataLoader does with `num_workers` above 0.
        """
        done = self._handed_out if done is None else check_whole(done, "done", 0)
        return {**self.setting(), "epoch": self.epoch, "done": done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: the next iteration begins in the middle of that epoch, later ones at the beginning.

        Raises CheckpointError if it was made by a sampler that differs in what the order depends on.
        """
        differing = [
            f"{name} was {state.get(name)!r} and is {value!r}"
            for name, value in self.setting().items()
            if state.get(name) != value
        ]
        if differing:
            raise CheckpointError(
                f"this state of {type(self).__name__} is of another order of samples: {'; '.join(differing)}. Restore "
                f"it with the same settings on as many ranks, or begin with the next epoch"
            )
        self.set_epoch(check_whole(state.get("epoch"), "epoch", 0))
        self._first = self._handed_out = check_whole(state.get("done"), "done", 0)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch is next; call it on all ranks alike, before each. The epoch that was restored stays as it is."""
        if check_whole(epoch, "epoch", 0) != self.epoch:
            self.epoch, self._first, self._handed_out = epoch, 0, 0

    def counted(self, items: Sequence[Any]) -> Iterator[Any]:
        """What is left of an epoch's items."""
        self._handed_out, self._first = self._first, 0
        for item in itertools.islice(items, self._handed_out, None):
            self._handed_out += 1
            yield item


class LoadBalancingDistributedSampler(Resumable, Sampler[int]):
    """This rank's part of a dataset, such that at each step all ranks get samples that cost alike.

    As `torch.utils.data.DistributedSampler` otherwise: every sample goes to one rank, in an order that all ranks know
    from the seed and the epoch. Which rank gets the most costly sample of a row goes round.

    Args:
        dataset: of a fixed length; all ranks must have the same.
        complexity_fn: the cost of a sample, in any unit; called once per sample. Or the costs themselves, one number
            per sample, where it takes long to read them all.
        num_replicas, rank: among how many, and who; None are those of `dgcopt.init()`.
        shuffle: whether epochs differ in their order; else costs ascend.
        seed: the same on all ranks.
        drop_last: leave out samples until all ranks have as many; else some come twice.
        random_level: from 0, as alike as can be, to 1, where costs are blurred by as much as they differ, so that
            samples meet others than their neighbours.
        uneven: neither repeat samples nor leave any out: some ranks get one less than others. Loop within
            `dgcopt.join(optimizer)`.

    Raises ConfigError for settings out of range, and for a sample whose cost is no finite number.
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
        if num_replicas is None or rank is None:
            comm = current_comm()
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
            raise ConfigError("drop_last leaves samples out so that all ranks get as many, and uneven does not: choose")
        if isinstance(random_level, bool) or not isinstance(random_level, int | float) or not 0 <= random_level <= 1:
            raise ConfigError(f"random_level must be from 0 to 1, not {random_level!r}")
        self.random_level = float(random_level)
        self.dataset = dataset
        self.costs = _costs_of(dataset, complexity_fn)

    def setting(self) -> dict[str, Any]:
        return {
            "samples": len(self.costs),
            "num_replicas": self.num_replicas,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "random_level": self.random_level,
            "uneven": self.uneven,
        }

    def of_rank(self, rank: int) -> list[int]:
        """Another rank's samples in this epoch, in its order."""
        rows = self._rows()
        return rows[:, rank][rows[:, rank] >= 0].tolist()

    def __iter__(self) -> Iterator[int]:
        return self.counted(self.of_rank(self.rank))

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        short, longer = divmod(len(self.costs), self.num_replicas)
        if self.uneven:  # the first ranks have one more
            return short + (self.rank < longer)
        return short + (longer > 0 and not self.drop_last)

    def _rows(self) -> Tensor:
        """A sample per step and rank, -1 for none. Shape `[steps, num_replicas]`."""
        count, ranks = len(self.costs), self.num_replicas
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order, costs, full_rows, left = torch.arange(count), self.costs, count // ranks, count % ranks
        short = full_rows * ranks
        if self.shuffle:
            spread = float(costs.max() - costs.min()) * self.random_level
            costs = costs + spread * torch.rand(count, generator=generator, dtype=torch.float64)
            order = torch.randperm(count, generator=generator)  # samples of equal cost do not always meet the same
            short = ranks * int(torch.randint(full_rows + 1, (1,), generator=generator))
        order = order[costs[order].argsort(stable=True)]
        rows = torch.cat([order[:short], order[short + left :]]).view(-1, ranks)
        # the order within a row goes round, else the last rank would have the most costly sample of all rows
        turn = torch.arange(full_rows)[:, None] + torch.arange(ranks)[None, :]
        rows = rows.gather(1, turn % ranks)
        last = rows.new_empty(0, ranks)
        if left and self.uneven:
            last = torch.cat([order[short : short + left], order.new_full((ranks - left,), -1)])[None]
        elif left and not self.drop_last:
            first = max(0, min(short, count - ranks))  # filled up with samples that cost alike
            rows = torch.cat([rows, order[(first + torch.arange(ranks)) % count][None]])
        if self.shuffle:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        return torch.cat([rows, last])


class LoadBalancingDistributedBatchSampler(Resumable, Sampler[list[int]]):
    """Batches of a rank's samples as a function makes them, such as of at most so many words.

    Args:
        sampler: whose samples; its `drop_last` must be False.
        batch_fn: makes lists of samples out of the list of a rank's samples; the same on every rank, and no more random
            than its argument.
        drop_last: leave out the last batches of ranks that have more than others; else ranks that have fewer repeat
            their first.
        uneven: neither: ranks have as many batches as they have. Loop within `dgcopt.join(optimizer)`.

    Raises ConfigError for settings that do not go together, and for a batch_fn that makes no batches of samples.
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
            raise ConfigError("drop_last of the sampler must be False: say so to the batch sampler")
        if not callable(batch_fn):
            raise ConfigError(f"batch_fn must be a function of a list of samples, not {batch_fn!r}")
        self.drop_last = check_flag(drop_last, "drop_last")
        self.uneven = check_flag(uneven, "uneven")
        if drop_last and uneven:
            raise ConfigError("drop_last leaves batches out so that all ranks get as many, and uneven does not: choose")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.num_replicas, self.rank = sampler.num_replicas, sampler.rank
        self._batches: tuple[int, list[list[int]]] | None = None

    def setting(self) -> dict[str, Any]:
        return {**self.sampler.setting(), "drop_last_batches": self.drop_last, "uneven_batches": self.uneven}

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        return self.counted(self.batches())

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return len(self.batches())

    def batches(self) -> list[list[int]]:
        """This rank's batches in this epoch."""
        if self._batches is None or self._batches[0] != self.epoch:
            self._batches = self.epoch, self._make_batches()
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
        made = self.batch_fn(self.sampler.of_rank(rank))
        made = list(made) if isinstance(made, Iterable) else [made]
        if not all(isinstance(batch, Iterable) for batch in made):
            raise ConfigError(f"batch_fn must make a list of lists of samples, not {made!r:.200}")
        batches = [list(batch) for batch in made]
        for place, batch in enumerate(batches):
            if not batch or not all(isinstance(sample, int) for sample in batch):
                raise ConfigError(
                    f"batch_fn must make lists of samples, none empty: batch {place} of rank {rank} is {batch}"
                )
        return batches


def _costs_of(dataset: Any, complexity_fn: Any) -> Tensor:
    """Each sample's cost, float64. Raises ConfigError if one is no finite number, or there are not as many."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"{type(dataset).__name__} has no samples by number: only datasets that have are shared out")
    if not callable(complexity_fn) and not isinstance(complexity_fn, Iterable):
        raise ConfigError(f"complexity_fn must be a function of a sample, or all costs, not {complexity_fn!r:.200}")
    count = len(dataset)
    if count == 0:
        raise ConfigError("the dataset is empty: there is nothing to share out")
    if callable(complexity_fn):
        said = [complexity_fn(dataset[place]) for place in range(count)]
    else:
        said = complexity_fn.tolist() if isinstance(complexity_fn, Tensor) else list(complexity_fn)
        if len(said) != count:
            raise ConfigError(f"complexity_fn has {len(said)} numbers, and the dataset {count} samples: one of each")
    for place, cost in enumerate(said):
        try:
            said[place] = float(cost)
        except (TypeError, ValueError, RuntimeError):
            said[place] = math.nan
        if not math.isfinite(said[place]):
            raise ConfigError(
                f"complexity_fn must be a finite number for each sample; for sample {place} it is {cost!r}"
            )
    return torch.tensor(said, dtype=torch.float64)
