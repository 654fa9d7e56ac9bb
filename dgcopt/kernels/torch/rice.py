"""Rice codes of ascending indices (Rice 1979), of several messages at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows import by_row, firsts, sent
from .packing import pack_small, unpack_small

__all__ = ["rice_measure", "rice_pack", "rice_unpack"]


def rice_measure(indices: Tensor, counts: Tensor, b: int, numel: int) -> tuple[Tensor, Tensor]:
    """Of int64 indices, `counts` (int64, on the CPU) of which make one row after the other and ascend in each.

    Returns, int64 `[rows]` on the CPU, the smallest gap between neighbours, or between the last one and `numel`, and
    the sum of all quotients by 2^b.
    """
    row, _ = by_row(counts, indices.device)
    gaps, none = _gaps(indices, counts), indices.new_zeros(len(counts))
    smallest = none.scatter_reduce(0, row, gaps, "amin", include_self=False)
    some = counts > 0
    behind = numel - 1 - indices[sent((counts.cumsum(0) - 1)[some], indices.device)]
    smallest = smallest.scatter_reduce(0, sent(some.nonzero().squeeze(1), indices.device), behind, "amin")
    measures = torch.stack((smallest, none.index_add(0, row, gaps >> b))).cpu()
    return measures[0], measures[1]


def rice_pack(indices: Tensor, counts: Tensor, b: int, nbytes: int) -> Tensor:
    """The gaps between ascending int64 indices of each row, each gap g as g mod 2^b in b bits, g div 2^b in unary.

    Returns uint8 `[rows, nbytes]`: the whole bytes of each remainder, their other bits, the unary parts as zeros that
    end with a one, and zeros. Raises ValueError if they do not fit.
    """
    whole, rest = divmod(b, 8)
    (row, ordinal), gaps = by_row(counts, indices.device), _gaps(indices, counts)
    starts = [sent(column, indices.device) for column in _starts(counts, b)]
    packed = indices.new_zeros(len(counts) * nbytes, dtype=torch.uint8)
    unary = gaps.new_zeros(8 * len(packed), dtype=torch.uint8)
    longest = (gaps >> b) + 1
    before = longest.cumsum(0)
    ends = before - _at_starts(before - longest, counts)[row] - 1 + 8 * starts[1][row]
    if bool((starts[1] > nbytes).any()) or bool((ends >= 8 * nbytes).any()):
        raise ValueError(f"{counts.tolist()} indices do not fit into rows of {nbytes} bytes")
    unary.index_fill_(0, ends + 8 * nbytes * row, 1)
    packed += pack_small(unary, 1)

    by_bytes = gaps.view(torch.uint8).view(-1, 8)
    packed[_bytes(row * nbytes + ordinal * whole, whole)] = by_bytes[:, :whole]
    eights = -(-counts // 8)
    group_row, group = by_row(eights, indices.device)
    fields = packed.new_zeros(8 * len(group))
    fields[8 * firsts(eights, row.device)[row] + ordinal] = by_bytes[:, whole] & (1 << rest) - 1
    where = group_row * nbytes + starts[0][group_row] + group * rest
    packed[_bytes(where, rest)] = pack_small(fields, rest).view(len(group), rest)
    return packed.view(len(counts), nbytes)


def rice_unpack(packed: Tensor, counts: Tensor, b: int, numel: int) -> tuple[Tensor, int]:
    """The indices, `counts` in each row, ascending and below `numel`, that `rice_pack` wrote; and -1.

    If there are others: anything, and the number of a row that is wrong.
    """
    (rows, nbytes), (whole, rest) = packed.shape, divmod(b, 8)
    row, ordinal = by_row(counts, packed.device)
    starts = [sent(column, packed.device) for column in _starts(counts, b)]
    bits = unpack_small(packed.reshape(-1), 8 * rows * nbytes, 1).view(rows, 8 * nbytes)
    bits = bits * (torch.arange(8 * nbytes, device=bits.device) >= 8 * starts[1].unsqueeze(1))
    wrong = (bits.sum(1) != sent(counts, bits.device)).nonzero()
    if len(wrong):
        return counts, int(wrong[0])
    ends = bits.nonzero()[:, 1]
    before = torch.nn.functional.pad(ends, (1, 0))[:-1] + 1
    before = torch.where(ordinal == 0, 8 * starts[1][row], before)

    flat, by_bytes = packed.reshape(-1), packed.new_zeros(len(row), 8)
    by_bytes[:, :whole] = flat[_bytes(row * nbytes + ordinal * whole, whole)]
    eights = -(-counts // 8)
    group_row, group = by_row(eights, packed.device)
    where = _bytes(group_row * nbytes + starts[0][group_row] + group * rest, rest)
    fields = unpack_small(flat[where].view(-1), 8 * len(group), rest)
    by_bytes[:, whole] = fields[8 * firsts(eights, row.device)[row] + ordinal]
    steps = (ends - before << b) + by_bytes.view(torch.int64).view(-1) + 1
    up_to = steps.cumsum(0)
    indices = up_to - _at_starts(up_to - steps, counts)[row] - 1
    beyond = row[indices >= numel]
    return indices, int(beyond[0]) if len(beyond) else -1


def _starts(counts: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """At which byte of each row the bits of remainders start, and the unary parts."""
    whole, rest = divmod(b, 8)
    return counts * whole, counts * whole + -(-counts // 8) * rest


def _at_starts(numbers: Tensor, counts: Tensor) -> Tensor:
    """What stands at the start of each row; anything for an empty one."""
    return torch.nn.functional.pad(numbers, (0, 1))[firsts(counts, numbers.device)]


def _bytes(starts: Tensor, number: int) -> Tensor:
    """So many places from each start on."""
    return starts.unsqueeze(1) + torch.arange(number, device=starts.device)


def _gaps(indices: Tensor, counts: Tensor) -> Tensor:
    """How many positions lie between an index and the one before it in its row."""
    gaps = indices.clone()
    gaps[1:] -= indices[:-1] + 1
    starts = sent((counts.cumsum(0) - counts)[counts > 0], indices.device)
    gaps[starts] = indices[starts]
    return gaps
