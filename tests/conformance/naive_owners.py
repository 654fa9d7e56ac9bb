"""Sums by owners in plain Python, coordinate by coordinate, written independently of the package.

Gradients are flat, by step and rank. Each rule returns the sums that all ranks apply in each step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dgcopt.flat.buckets import Bucket


def owner_of(p: int, size: int) -> int:
    return (p + ((p // size * 2654435761) % 2**32 >> 16)) % size


def largest(numbers: dict[int, float], count: int) -> list[int]:
    return sorted(sorted(numbers, key=lambda p: (-abs(numbers[p]), p))[:count])


def room_of(counts: list[int], size: int) -> int:
    """Return the number of coordinates that one message holds: the mean of a choice, and two deviations."""
    mean = sum(counts) / size
    return min(sum(counts), math.ceil(mean + 2 * math.sqrt(mean * (1 - 1 / size))))


def chosen(v: Tensor, counts: list[int], bucket: Bucket) -> list[int]:
    """Return the coordinates of the largest magnitudes in each segment."""
    chosen: list[int] = []
    for segment, count in zip(bucket.segments, counts, strict=True):
        chosen += largest({p: float(v[p]) for p in range(segment.start, segment.stop)}, count)
    return chosen


def owners(ratio: float, keep: float, decay: float, steps: list[list[Tensor]], bucket: Bucket) -> list[Tensor]:
    """Each rank sends its choice to the owners, and each owner the largest of its sums to all."""
    size = len(steps[0])
    residuals = [torch.zeros(bucket.numel).double() for _ in range(size)]
    sums: list[dict[int, float]] = [{} for _ in range(size)]
    counts = [math.ceil(ratio * segment.numel) for segment in bucket.segments]
    results = []
    for grads in steps:
        arrived: list[set[int]] = [set() for _ in range(size)]
        sums = [{p: decay * value for p, value in mine.items()} for mine in sums]
        for rank, grad in enumerate(grads):
            v = residuals[rank] = decay * residuals[rank] + grad
            mine = chosen(v, counts, bucket)
            for other in range(size):
                to_other = {p: float(v[p]) for p in mine if owner_of(p, size) == other}
                for p in largest(to_other, room_of(counts, size)):
                    sums[other][p] = sums[other].get(p, 0.0) + float(v[p])
                    arrived[other].add(p)
                    v[p] = 0
        result = torch.zeros(bucket.numel).double()
        for held, new in zip(sums, arrived, strict=True):
            for p in new if math.isinf(keep) else largest(held, math.ceil(keep * sum(counts) / size)):
                result[p] = held.pop(p)
        results.append(result)
    return results


def partition(ratio: float, steps: list[list[Tensor]], bucket: Bucket) -> list[Tensor]:
    """Ranks take turns: each chooses among the coordinates of one owner, and all send the union."""
    size = len(steps[0])
    residuals = [torch.zeros(bucket.numel).double() for _ in range(size)]
    counts = [math.ceil(ratio * segment.numel) for segment in bucket.segments]
    results = []
    for step, grads in enumerate(steps):
        union: set[int] = set()
        for rank, grad in enumerate(grads):
            v = residuals[rank] = residuals[rank] + grad
            turn = (rank + step) % size
            mine = {p: float(v[p]) for p in chosen(v, counts, bucket) if owner_of(p, size) == turn}
            union |= set(largest(mine, room_of(counts, size)))
        result = torch.zeros(bucket.numel).double()
        for v in residuals:
            for p in union:
                result[p] += v[p]
                v[p] = 0
        results.append(result)
    return results
