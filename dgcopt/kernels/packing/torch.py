"""Fields of a few bits, side by side; and Rice codes of ascending indices (Rice 1979), of several messages at once."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_small", "rice_measure", "rice_pack", "rice_unpack", "unpack_small"]


def pack_small(fields: Tensor, width: int) -> Tensor:
    """uint8 `fields`, each below 2^width, in `width` (0 to 7) bits each; eight of them fill `width` bytes."""
    padded = fields.new_zeros(-(-len(fields) // 8) * 8)
    padded[: len(fields)] = fields
    words = padded.view(torch.int64)
    for gap, low, high in _folds(width):
        words = (words & low) | (words >> gap & high)
    return words.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)


def unpack_small(packed: Tensor, count: int, width: int) -> Tensor:
    """The `count` fields, uint8, that `pack_small` wrote."""
    by_bytes = packed.new_zeros(-(-count // 8), 8)
    by_bytes[:, :width] = packed[: len(by_bytes) * width].view(-1, width) if width else 0
    words = by_bytes.view(torch.int64)
    for gap, low, high in reversed(_folds(width)):
        words = (words & low) | ((words & high) << gap)
    return words.view(torch.uint8).view(-1)[:count]


def _folds(width: int) -> list[tuple[int, int, int]]:
    """Steps that close the gaps between eight fields in a word: of pairs, of pairs of pairs, and of all.

    Each is (gap, mask of the lower half, mask of the upper half's place).
    """
    folds = []
    for lane in (8, 16, 32):
        used = lane // 8 * width
        low = sum(((1 << used) - 1) << start for start in range(0, 64, 2 * lane))
        folds.append((lane - used, low, low << used))
    return folds


_MOST = 2**63 - 1


def rice_measure(indices: Tensor, counts: Tensor, b: int, numel: int) -> tuple[Tensor, Tensor]:
    """Return, int64 `[rows]`, the smallest gap between neighbours, or between the last one and `numel`, and the sum of
    all quotients by 2^b; 0 for an empty row.
    """
    if not indices.shape[1]:
        return torch.zeros_like(counts), torch.zeros_like(counts)
    there, gaps = _there(indices, counts), _gaps(indices)
    behind = numel - 1 - indices.gather(1, (counts - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    smallest = torch.where(there, gaps, _MOST).amin(1).minimum(behind)
    return torch.where(counts > 0, smallest, 0), torch.where(there, gaps >> b, 0).sum(1)


def rice_pack(indices: Tensor, counts: Tensor, b: int, nbytes: int) -> Tensor:
    """Pack the gaps between ascending indices of each row, each gap g as g mod 2^b in b bits, g div 2^b in unary.

    Returns uint8 `[rows, nbytes]`: the whole bytes of each remainder, their other bits, the unary parts as zeros that
    end with a one, and zeros. Indices that do not fit are omitted, or raise ValueError if that is known without a wait:
    senders measure before, and receivers find too few.
    """
    (rows, length), (whole, rest) = indices.shape, divmod(b, 8)
    there, gaps = _there(indices, counts), _gaps(indices)
    packed = indices.new_zeros(rows, nbytes + 1, dtype=torch.uint8)  # the last column takes bits that do not fit

    by_bytes = gaps.view(torch.uint8).view(rows, length, 8)
    target = torch.arange(length * whole, device=indices.device).expand(rows, -1)
    _put(by_bytes[..., :whole].reshape(rows, -1), target, target < whole * counts.unsqueeze(1), packed)

    eights = -(-length // 8)
    fields = packed.new_zeros(rows, 8 * eights)
    fields[:, :length] = torch.where(there, by_bytes[..., whole] & (1 << rest) - 1, 0)
    target = torch.arange(eights * rest, device=indices.device).expand(rows, -1)
    some = target < (-(-counts // 8) * rest).unsqueeze(1)
    _put(pack_small(fields.view(-1), rest).view(rows, -1), target + whole * counts.unsqueeze(1), some, packed)

    bits = packed.new_zeros(rows, 8 * nbytes + 1)
    ends = torch.where(there, (gaps >> b) + 1, 0).cumsum(1) - 1 + 8 * _unary(counts, b).unsqueeze(1)
    _put(torch.ones_like(ends, dtype=torch.uint8), ends, there, bits)
    return packed[:, :nbytes] | pack_small(bits[:, :-1].reshape(-1), 1).view(rows, nbytes)


def rice_unpack(packed: Tensor, counts: Tensor, b: int, numel: int, length: int) -> tuple[Tensor, Tensor]:
    """The indices `[rows, length]`, `counts` in each row, ascending and below `numel`, that `rice_pack` wrote.

    Behind them the last one is repeated, -1 in an empty row. Returns as well, bool `[rows]`, which rows are wrong: they
    hold other indices, and anything is returned for them.
    """
    (rows, nbytes), (whole, rest) = packed.shape, divmod(b, 8)
    place = torch.arange(length, device=packed.device)
    there = place < counts.unsqueeze(1)
    starts = 8 * _unary(counts, b).unsqueeze(1)
    bit = torch.arange(8 * nbytes, device=packed.device)
    bits = unpack_small(packed.reshape(-1), 8 * rows * nbytes, 1).view(rows, 8 * nbytes) * (bit >= starts)
    wrong = bits.sum(1) != counts
    ends = torch.zeros(rows, length + 1, dtype=torch.int64, device=packed.device)
    number = torch.where(bits > 0, bits.cumsum(1) - 1, length).clamp_(max=length)
    ends = ends.scatter_(1, number, bit.expand(rows, -1))[:, :length]
    before = torch.cat((starts, ends[:, :-1] + 1), 1)[:, :length]

    remainders = torch.zeros_like(ends)
    for byte in range(whole):
        remainders |= _read(packed, (place * whole + byte).expand(rows, -1)) << 8 * byte
    first = counts.unsqueeze(1) * whole + (place * rest >> 3)
    field = _read(packed, first) | _read(packed, first + 1) << 8
    remainders |= (field >> (place * rest & 7) & (1 << rest) - 1) << 8 * whole
    indices = torch.where(there, (ends - before << b) + remainders + 1, 0).cumsum(1) - 1
    return indices, wrong | (there & (indices >= numel)).any(1)


def _unary(counts: Tensor, b: int) -> Tensor:
    """At which byte of each row the unary parts start."""
    return counts * (b // 8) + -(-counts // 8) * (b % 8)


def _there(indices: Tensor, counts: Tensor) -> Tensor:
    """Return a mask of the valid elements of each row."""
    return torch.arange(indices.shape[1], device=indices.device) < counts.unsqueeze(1)


def _gaps(indices: Tensor) -> Tensor:
    """Return the gap between each index and its predecessor in the row."""
    return indices.diff(dim=1, prepend=indices.new_full((len(indices), 1), -1)) - 1


def _put(values: Tensor, target: Tensor, there: Tensor, rows: Tensor) -> None:
    """Write values that are `there` into rows; the others, and those beyond, into the last column."""
    last = rows.shape[1] - 1
    rows.scatter_(1, torch.where(there, target, last).clamp(max=last), values)


def _read(packed: Tensor, target: Tensor) -> Tensor:
    """Bytes of each row, as int64; 0 beyond it."""
    padded = torch.nn.functional.pad(packed, (0, 1))
    return padded.gather(1, target.clamp(max=packed.shape[1])).long()
