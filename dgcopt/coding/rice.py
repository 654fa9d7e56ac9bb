"""Rice coding of sorted indices as gaps, within 2% of the entropy of random positions.

A gap g between neighbours is written as g mod 2^b, in b bits, and g div 2^b, in unary (Golomb 1966, Rice 1979). The
gaps of random positions are geometric, for which b near log2(ln 2 / density) is best; both sides know it beforehand.

The message has a fixed length: that of random positions plus a margin. Clustered positions may take up to 0.5 bits each
beyond it, so a few must be left out: `rice_excess` counts them.

Messages coded together are rows of a matrix of equal lengths. A row's count stands in its header, so that neither the
sender nor a receiver waits for a device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import PayloadError
from ..kernels import rice_measure, rice_pack, rice_unpack, sent
from .checks import Checks, expect
from .values import aligned, named, packed_bytes

__all__ = ["decode_rice", "encode_rice", "measure_rows", "read_rows", "rice_bytes", "rice_excess", "write_rows"]

_HEADER = 4  # bytes, which hold the number of indices
_SIGMAS = 4  # random positions exceed the message once in 30,000 times


@functools.lru_cache
def remainder_bits(count: int, numel: int) -> int:
    """Return b = round(log2(ln 2 / density)), at least 0.

    Computed from the exponent of a product: logarithms may differ between machines in the last bit, and all must agree.
    """
    return max(0, math.frexp(math.log(2) * math.sqrt(2) * (numel / count))[1] - 1)


def _unary_bits(count: int, numel: int) -> int:
    """Return the room for the unary parts of all gaps: their mean for random positions and some more, or their maximum.

    The gaps' sum is fixed, and so the sum of the unary parts varies only with that of the remainders, each of which
    has a variance of nearly 1/12 in units of 2^b.
    """
    b = remainder_bits(count, numel)
    longer = 1 - count / numel  # the chance that a gap goes on; squared b times, that it reaches 2^b
    for _ in range(b):
        longer *= longer
    margin = _SIGMAS * math.sqrt(count / 12)
    most = (numel - count) >> b
    return count + (min(most, math.ceil(count * longer / (1 - longer) + margin)) if longer < 1 else most)


@functools.lru_cache
def rice_bytes(count: int, numel: int) -> int:
    """Return the length of the message for `count` indices below `numel`, a multiple of 8; 0 for none."""
    if count == 0:
        return 0
    remainders = packed_bytes(count, remainder_bits(count, numel))
    return aligned(_HEADER + remainders + -(-_unary_bits(count, numel) // 8))


def rice_excess(indices: Tensor, counts: Tensor, count: int, numel: int) -> Tensor:
    """Return the number of indices to leave out of each row, whichever they are; usually 0.

    0 as a rule. Each row has a message for `count`. Leaving one out saves its b bits, and joins two gaps whose unary
    parts never grow together.

    Raises ValueError if `indices` (int64) do not ascend strictly within [0, numel). Waits for the device.
    """
    ascend, excess = measure_rows(*_in_rows(indices, counts), count, numel)
    excess = torch.where(ascend, excess, -1).cpu()
    if (excess < 0).any():
        raise ValueError(f"indices have to ascend strictly from 0 or more to less than {numel}")
    return excess


def measure_rows(rows: Tensor, counts: Tensor, count: int, numel: int) -> tuple[Tensor, Tensor]:
    """Return True if all indices ascend strictly within [0, numel), and the `rice_excess` of each row, on the device.

    Rows are of one length, int64 `[rows, length]`, of which the first `counts` count, here and below.
    """
    b = remainder_bits(count, numel) if count else 0
    smallest, quotients = rice_measure(rows, counts, b, numel)
    room = rice_bytes(count, numel) - _HEADER - packed_bytes(counts, b)
    missing = (-(-(counts + quotients) // 8) - room).clamp(min=0)
    return (smallest >= 0).all(), counts.minimum(8 * -(-missing // max(b, 1)))  # eight remainders are b bytes


def encode_rice(indices: Tensor, counts: Tensor, count: int, numel: int) -> Tensor:
    """Encode `counts` (int64, on the CPU) indices per row into messages of `rice_bytes(count, numel)`.

    Takes int64, strictly ascending in [0, numel) in each row, one row after the other: all `count` of them, or fewer,
    or those that `rice_excess` leaves. Returns uint8 `[rows, nbytes]`: their number, the remainders, the unary parts as
    zeros that end with a one, and zeros.
    """
    return write_rows(*_in_rows(indices, counts), count, numel)


def write_rows(rows: Tensor, counts: Tensor, count: int, numel: int) -> Tensor:
    """Write the messages of `encode_rice`."""
    messages = torch.zeros(len(rows), rice_bytes(count, numel), dtype=torch.uint8, device=rows.device)
    if count:
        messages[:, :_HEADER] = counts.to(torch.int32).view(torch.uint8).view(-1, _HEADER)
        nbytes = messages.shape[1] - _HEADER
        messages[:, _HEADER:] = rice_pack(rows, counts, remainder_bits(count, numel), nbytes)
    return messages


def decode_rice(messages: Tensor, count: int, numel: int, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Decode messages `[rows, nbytes]` from `ranks`; return all indices, row after row, and their number per row.

    Both int64, the latter on the CPU; at most `count` in each row, strictly ascending in [0, numel). Raises
    PayloadError if a message cannot be right. Waits for the device.
    """
    rows, counts = read_rows(messages, count, numel, ranks)
    counts = counts.cpu()
    if bool((counts == count).all()):
        return rows.view(-1), counts
    return rows[_counted(rows, counts)], counts


def read_rows(
    messages: Tensor, count: int, numel: int, ranks: Sequence[int], checks: Checks | None = None
) -> tuple[Tensor, Tensor]:
    """Decode messages `[rows, nbytes]` from `ranks` to indices `[rows, count]` and the number of valid ones per row.

    Both int64, on the device; the others repeat the last that counts. All lie in [0, numel), also in rows that cannot
    be right, for which PayloadError is raised at once, or as `checks` are read.
    """
    if messages.dtype != torch.uint8 or messages.shape != (len(ranks), rice_bytes(count, numel)):
        raise PayloadError(
            f"the message from {named(ranks)} has {messages.numel()} bytes of indices, but {count} of {numel} take "
            f"{rice_bytes(count, numel)} from each"
        )
    if count == 0:
        return messages.new_zeros(len(ranks), 0, dtype=torch.int64), messages.new_zeros(len(ranks), dtype=torch.int64)
    claimed = messages[:, :_HEADER].contiguous().view(torch.int32).view(-1).long()
    counts = claimed.clamp(0, count)
    rows, wrong = rice_unpack(messages[:, _HEADER:].contiguous(), counts, remainder_bits(count, numel), numel, count)
    wrong = wrong | (claimed != counts)

    def problem() -> str:
        row = int(wrong.nonzero()[0])
        number = int(claimed[row])
        if not 0 <= number <= count:
            return f"the message from rank {ranks[row]} claims {number} indices, but at most {count} are sent"
        return (
            f"the message from rank {ranks[row]} holds more or fewer indices than the {number} that it claims, or one "
            f"beyond {numel}: it was damaged on the way, or that rank runs another model or version"
        )

    expect(checks, ~wrong.any(), problem)
    return rows.clamp_(0, numel - 1), counts


def _in_rows(indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return consecutive rows of lengths `counts` (int64, on the CPU) as a matrix of the longest row's length."""
    lengths = counts.tolist()
    if len(set(lengths)) <= 1:
        rows = indices.view(len(lengths), -1) if len(lengths) else indices.new_zeros(0, 0)
    else:
        rows = indices.new_zeros(len(lengths), max(lengths))
        rows.masked_scatter_(_counted(rows, counts), indices)
    return rows, sent(counts, indices.device)


def _counted(rows: Tensor, counts: Tensor) -> Tensor:
    """Return True for the first `counts` elements of each row: bool, in the shape of `rows`."""
    return torch.arange(rows.shape[1], device=rows.device) < sent(counts, rows.device).unsqueeze(1)
