"""One rank's part of the training data, in an order that a resumed run finds again."""

from typing import Any

import torch
from torch.utils.data import Dataset

__all__ = ["Shard"]


class Shard(Dataset):
    """The samples that one rank reads in one epoch, in order.

    Each sample's augmentation draws from a seed of its own, so it depends neither on how many processes load the data
    nor on the point of interruption.
    """

    def __init__(self, data: Dataset, indices: list[int], seed: int, epoch: int) -> None:
        self.data, self.indices, self.seed, self.epoch = data, indices, seed, epoch

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> Any:
        index = self.indices[position]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(hash((self.seed, self.epoch, index)))
            return self.data[index]
