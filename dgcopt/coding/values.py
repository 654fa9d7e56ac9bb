"""Codes of values: floats, or few bits with a scale per block.

Every receiver decodes the same bits as the sender, on every device, since decoding only looks up and multiplies.
Callers keep rounding errors. Bytes are little-endian; parts of several messages lie side by side in rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError, PayloadError
from ..kernels import (
    LARGEST,
    SPAN,
    by_row,
    finite,
    firsts,
    in_blocks,
    means,
    nearest_levels,
    of_levels,
    of_steps,
    pack_small,
    round_steps,
    sent,
    unpack_small,
)
from .checks import Checks, expect

__all__ = [
    "DENSE_CODES",
    "VALUE_CODES",
    "VALUE_DTYPES",
    "Floats",
    "Levels",
    "Steps",
    "ValueCode",
    "aligned",
    "check_scales",
    "code_of",
    "coded_bytes",
    "decode_rows",
    "encode_rows",
    "named",
    "packed_bytes",
    "read_as",
    "take_parts",
]

VALUE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Dtypes of float codes."""

Count = TypeVar("Count", int, Tensor)

_SCALE = torch.bfloat16  # the range of gradients exceeds that of fp16, and 8 bits of precision are enough for a scale


class ValueCode(Protocol):
    """A code of values, for several messages at once, with `counts` (int64, on the CPU) values each."""

    def sizes(self, count: Count) -> tuple[Count, ...]:
        """Return the bytes of each part of a message of `count` values; monotonic in `count`."""

    def encode(self, values: Tensor, counts: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Encode 1-D `values` of any floating dtype, the concatenated values of all messages, into parts.

        Also returns the decoded values, bit-identical to `decode`'s.
        """

    def decode(
        self, parts: Sequence[Tensor], counts: Tensor, ranks: Sequence[int], checks: Checks | None = None
    ) -> Tensor:
        """Decode parts from `ranks`. Raises PayloadError, at once or when `checks` are read, if they are invalid."""


@dataclass(frozen=True)
class Floats:
    """Float codes. Finite values out of range are clamped; NaN and Inf are preserved."""

    dtype: torch.dtype

    def sizes(self, count: Count) -> tuple[Count, ...]:
        return (count * self.dtype.itemsize,)

    def encode(self, values: Tensor, counts: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        limit = torch.finfo(self.dtype).max
        if limit < torch.finfo(values.dtype).max:
            values = values.to(torch.promote_types(values.dtype, self.dtype))  # bfloat16 rounds float16's limit up
            values = torch.where(values.isinf(), values, values.clamp(-limit, limit))
        arriving = values.to(self.dtype).contiguous()
        return (arriving.view(torch.uint8),), arriving

    def decode(
        self, parts: Sequence[Tensor], counts: Tensor, ranks: Sequence[int], checks: Checks | None = None
    ) -> Tensor:
        return read_as(parts[0], self.dtype)


@dataclass(frozen=True)
class Steps:
    """Multiples of a step, -m .. m with m = 2^(width - 1) - 1; the largest magnitude of a block is m steps.

    |error| <= step / 2 while the step is a normal number. Costs width + 16 / block bits per value. Zero stays zero;
    NaN and Inf become zero, since a scale cannot represent them. Decodes to float32.
    """

    width: int
    block: int

    @property
    def most(self) -> int:
        return 2 ** (self.width - 1) - 1

    def sizes(self, count: Count) -> tuple[Count, ...]:
        return -(-count // self.block) * _SCALE.itemsize, packed_bytes(count, self.width)

    def encode(self, values: Tensor, counts: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        cuts = _cuts(counts, self.block, values.device)
        steps, multiples = round_steps(values, self.block, self.most, cuts)
        arriving = of_steps(multiples, steps.float(), self.block, cuts)
        fields = multiples.view(torch.uint8)
        if self.width < 8:
            fields = _pack(fields & (1 << self.width) - 1, counts, self.width)
        return (steps.view(torch.uint8), fields), arriving

    def decode(
        self, parts: Sequence[Tensor], counts: Tensor, ranks: Sequence[int], checks: Checks | None = None
    ) -> Tensor:
        steps = read_as(parts[0], _SCALE).float()
        _check_blocks(steps, counts, self.block, ranks, checks)
        if self.width < 8:
            top = 1 << (self.width - 1)
            fields = (_unpack(parts[1], counts, self.width) ^ top).to(torch.int8) - top
        else:
            fields = parts[1].view(torch.int8)
        return of_steps(fields, steps, self.block, _cuts(counts, self.block, steps.device))


@dataclass(frozen=True)
class Levels:
    """A sign and one of 2^(width - 1) magnitudes per block, for values above a threshold.

    Equal steps would waste the codes below the threshold.

    The magnitudes are a geometric series, `low * ratio^j`. One is the mean magnitude; two are fitted for the least
    squared error (Lloyd 1982); more reach from the smallest to the largest, since the squared error of heavy-tailed
    values is then several times smaller than with equal steps. Magnitudes are clamped to at least 1/256 of the
    block's largest; NaN and Inf become zero. Decodes to float32.

    Costs width + 1/16 bits per value in blocks of 256 per number (`low` and, but for one magnitude, `ratio`).
    """

    width: int
    block: int

    @property
    def _levels(self) -> int:
        return 2 ** (self.width - 1)

    @property
    def _numbers(self) -> int:
        return min(self._levels, 2)

    def sizes(self, count: Count) -> tuple[Count, ...]:
        return -(-count // self.block) * self._numbers * _SCALE.itemsize, packed_bytes(count, self.width)

    def encode(self, values: Tensor, counts: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        cuts = _cuts(counts, self.block, values.device)
        numbers = self._fit(values, cuts)
        levels = self._series(numbers)
        fields = nearest_levels(values, levels, self.block, cuts)
        parts = numbers.view(-1).view(torch.uint8), _pack(fields, counts, self.width)
        return parts, of_levels(fields, levels, self.block, cuts)

    def decode(
        self, parts: Sequence[Tensor], counts: Tensor, ranks: Sequence[int], checks: Checks | None = None
    ) -> Tensor:
        levels = self._series(read_as(parts[0], _SCALE).view(-1, self._numbers))
        _check_blocks(levels, counts, self.block, ranks, checks)
        fields = _unpack(parts[1], counts, self.width)
        return of_levels(fields, levels, self.block, _cuts(counts, self.block, levels.device))

    def _fit(self, values: Tensor, cuts: Tensor | None) -> Tensor:
        """Return `low`, and `ratio` if there is one, of each block."""
        if self._levels > 2:
            low, high = _ends(values, self.block, cuts)
        else:
            low, high = means(values, self.block, self._levels, cuts)
        low = low.maximum(high / SPAN).to(_SCALE)
        if self._numbers == 1:
            return low.unsqueeze(1)
        ratio = torch.where(low > 0, high / low.float(), 1).clamp(min=1)
        return torch.stack((low, (ratio ** (1 / (self._levels - 1))).to(_SCALE)), 1)

    def _series(self, numbers: Tensor) -> Tensor:
        """Return the magnitudes of each block, float32 `[blocks, levels]`, by products: powers differ by device."""
        series = [numbers[:, 0].float()]
        while len(series) < self._levels:
            series.append(series[-1] * numbers[:, 1].float())
        return torch.stack(series, 1)


def _ends(values: Tensor, block: int, cuts: Tensor | None) -> tuple[Tensor, Tensor]:
    sizes = in_blocks(finite(values).abs(), block, -1, cuts)
    return torch.where(sizes < 0, math.inf, sizes).amin(1), sizes.amax(1)


VALUE_CODES: dict[str, ValueCode] = {
    **{name: Floats(dtype) for name, dtype in VALUE_DTYPES.items()},
    "int8": Steps(8, block=256),
    "int4": Levels(4, block=512),
    "int2": Levels(2, block=512),
    "sign": Levels(1, block=256),
}
"""Codes of selected values; scales take 1/16 bit per value."""

DENSE_CODES: dict[str, ValueCode] = {
    **{name: Floats(dtype) for name, dtype in VALUE_DTYPES.items()},
    "int8": Steps(8, block=64),
    "int4": Steps(4, block=64),
    "int2": Levels(2, block=128),
    "sign": Levels(1, block=64),
}
"""Codes of dense vectors (biases, norms), for use with error feedback; scales take 1/4 bit per element.

Neighbours in a vector differ more than selected coordinates, so blocks are a quarter as long.
"""


def code_of(kind: str, codes: Mapping[str, ValueCode]) -> ValueCode:
    """Return the code of that name. Raises ConfigError if there is none."""
    if kind not in codes:
        raise ConfigError(f"values must be one of {', '.join(codes)}, not {kind!r}")
    return codes[kind]


def coded_bytes(count: int, code: ValueCode) -> int:
    """Return the bytes of a message of `count` values; monotonic in `count`."""
    return sum(code.sizes(count))


def encode_rows(rows: Tensor, code: ValueCode) -> tuple[Tensor, Tensor]:
    """Encode each row of a matrix; return the messages and the decoded values, both as rows."""
    parts, arriving = code.encode(rows.reshape(-1), torch.full((len(rows),), rows.shape[1]))
    return torch.cat([part.view(len(rows), -1) for part in parts], 1), arriving.view(rows.shape)


def decode_rows(
    messages: Tensor, count: int, code: ValueCode, ranks: Sequence[int], checks: Checks | None = None
) -> Tensor:
    """Decode each row of messages from `ranks` into rows of `count`: bit-identical everywhere, float32 but for floats.

    Raises PayloadError for an invalid length; for an invalid scale, at once or when `checks` are read.
    """
    expected = coded_bytes(count, code)
    if messages.dtype != torch.uint8 or messages.shape != (len(ranks), expected):
        raise PayloadError(
            f"the message from {named(ranks)} has {messages.numel()} bytes of values, but {count} take {expected} "
            f"from each"
        )
    counts = torch.full((len(ranks),), count)
    return code.decode(take_parts(messages, code.sizes(counts)), counts, ranks, checks).view(len(ranks), count)


def check_scales(scales: Tensor, checks: Checks | None, sender: Callable[[Tensor], int]) -> None:
    """Raise PayloadError, at once or as `checks` are read, unless values within +-LARGEST can have these scales.

    `sender` returns the rank of the first scale that is wrong, given a mask of the right ones.
    """
    right = (scales >= 0) & (scales <= 2 * LARGEST)
    expect(
        checks,
        right.all(),
        lambda: f"the message from rank {sender(right)} holds a scale that is negative, not finite or far too large",
    )


def _check_blocks(scales: Tensor, counts: Tensor, block: int, ranks: Sequence[int], checks: Checks | None) -> None:
    """Check the scales of all blocks in messages from `ranks`; see `check_scales`."""

    def sender(right: Tensor) -> int:
        row, _ = by_row(-(-counts // block), scales.device)
        return ranks[int(row[(~right).view(len(row), -1).any(1).nonzero()[0]])]

    check_scales(scales, checks, sender)


def _cuts(counts: Tensor, block: int, device: torch.device) -> Tensor | None:
    """Return the starts of blocks, which never span two messages, and the end of the last; None for one message."""
    if len(counts) == 1:
        return None
    row, number = by_row(-(-counts // block), counts.device)
    starts = firsts(counts, counts.device)[row] + block * number
    return sent(torch.cat((starts, counts.sum().view(1))), device)


def aligned(nbytes: int) -> int:
    """Return the next multiple of 8; parts of a message start at multiples of 8, so they can be read in place."""
    return -(-nbytes // 8) * 8


def read_as(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements in uint8 `payload`; a view if it is aligned."""
    if payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype)


def named(ranks: Sequence[int]) -> str:
    """Name the senders of messages."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def take_parts(rows: Tensor, lengths: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the parts that lie side by side in rows, each concatenated; `lengths` are bytes by row, on the CPU."""
    rest = rows.shape[1] - sum(lengths, torch.zeros_like(lengths[0]))
    pieces = rows.reshape(-1).split(torch.stack([*lengths, rest], 1).flatten().tolist())
    return tuple(torch.cat(pieces[part :: len(lengths) + 1]) for part in range(len(lengths)))


def packed_bytes(count: Count, width: int) -> Count:
    """Return the bytes of `count` integers of `width` bits: whole bytes first, then remaining bits, eight at a time."""
    return count * (width // 8) + -(-count // 8) * (width % 8)


def _pack(fields: Tensor, counts: Tensor, width: int) -> Tensor:
    """Pack each row's fields with `pack_small`, from a whole byte on, one row after the other."""
    if len(counts) > 1:
        rows, zeros = fields.split(counts.tolist()), fields.new_zeros(7)
        gaps = (-counts % 8).tolist()
        fields = torch.cat([part for row, gap in zip(rows, gaps, strict=True) for part in (row, zeros[:gap])])
    return pack_small(fields, width)


def _unpack(packed: Tensor, counts: Tensor, width: int) -> Tensor:
    """Unpack the fields of `_pack`."""
    if len(counts) == 1:
        return unpack_small(packed, int(counts), width)
    eights = 8 * -(-counts // 8)
    rows_and_gaps = torch.stack((counts, eights - counts), 1).flatten().tolist()
    return torch.cat(unpack_small(packed, int(eights.sum()), width).split(rows_and_gaps)[::2])
