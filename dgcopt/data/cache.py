"""Cached samples: a dataset, or any function of a key, in front of a store."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from ..errors import ConfigError, PayloadError
from ..errors.checks import check_flag
from .plain import decode, encode
from .stores import Store, open_store

__all__ = ["CacheLoader", "CachedDataset"]


class CacheLoader:
    """Values by key, each computed once and then read from a store.

    Args:
        store: "memory", "disk", "disk:PATH", URLs of Redis servers such as "redis://host:6379", or a store.
        key_prefix: prefix that separates these keys from others in the same store. Change it when the values change.
        capacity: bytes, for "memory" and "disk".
        pickle: pickle values that are not plain data, and unpickle them when read. Anyone with write access to the
            store can then run code in this process; without it nothing is unpickled.

    Attributes:
        hits, misses: numbers of lookups in this process that found a value, or none.
    """

    def __init__(
        self,
        store: str | Sequence[str] | Store = "memory",
        key_prefix: str = "",
        *,
        capacity: int | None = None,
        pickle: bool = False,
    ) -> None:
        self.pickle = check_flag(pickle, "pickle")
        self.store = open_store(store, capacity)
        self.key_prefix = key_prefix
        self.hits = self.misses = 0

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """Return the stored value of `key`, or `load_fn(key)`, which is stored if there is room.

        A key is plain data; the result is a copy. Damaged bytes in the store are computed again. Raises ConfigError for
        values that are not plain data, unless `pickle`.
        """
        place = hashlib.blake2b(encode((self.key_prefix, key)), digest_size=20).digest()
        kept = self.store.get(place)
        if kept is not None:
            try:
                value = decode(kept, self.pickle)
            except PayloadError as error:
                self.store.warn(f"the cached value of {key!r} is damaged and is computed again: {error}", "damaged")
            else:
                self.hits += 1
                return value
        self.misses += 1
        value = load_fn(key)
        self.store.put(place, encode(value, self.pickle))
        return value

    def num_keys(self) -> int:
        """Return the number of values in the store, of all prefixes."""
        return len(self.store)


class CachedDataset(Dataset):
    """A dataset whose samples, transforms included, are computed once and then read from a store.

    Apply random transforms, such as crops, after it.

    Args:
        dataset: a dataset with a length and samples of plain data.
        store, capacity, pickle: see `CacheLoader`.
        name: name of the dataset and its transforms, for stores that outlive this process and for store objects, which
            several datasets may share. Change it when either changes, or old samples are returned.

    Raises ConfigError for a dataset without length, and for such a store without a name.
    """

    def __init__(
        self,
        dataset: Dataset | Sequence[Any],
        store: str | Sequence[str] | Store = "memory",
        name: str = "",
        *,
        capacity: int | None = None,
        pickle: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(f"{type(dataset).__name__} has no length or no samples by index; caching needs both")
        self.dataset = dataset
        self.loader = CacheLoader(store, name, capacity=capacity, pickle=pickle)
        if not name and (self.loader.store.outlives or isinstance(store, Store)):
            raise ConfigError(
                "this store may hold samples of another dataset or of an earlier run, so the dataset needs a name. "
                "Change it whenever the dataset or its transforms change, or old samples are returned."
            )

    def __getitem__(self, index: Any) -> Any:
        return self.loader.get(operator.index(index), self.dataset.__getitem__)

    def __len__(self) -> int:
        return len(self.dataset)
