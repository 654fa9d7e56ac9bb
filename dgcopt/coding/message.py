"""Messages of sparse coordinates with a fixed length: coded indices, then coded values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError, PayloadError
from ..kernels import largest_first, sent
from .checks import Checks, expect
from .rice import decode_rice, encode_rice, measure_rows, read_rows, rice_bytes, rice_excess, write_rows
from .values import VALUE_CODES, ValueCode, aligned, code_of, named, read_as, take_parts

__all__ = ["Sent", "SparseCode", "what_fits"]


@dataclass(frozen=True)
class Sent:
    """One message of coordinates, and its values as receivers decode them.

    Attributes:
        message: uint8.
        indices: all coordinates, those in the message first; ascending, if all are in it.
        values: as decoded, in the dtype of the input; 0 for omitted coordinates.
        fits: mask of the coordinates that fit into the message; None if all do.
    """

    message: Tensor
    indices: Tensor
    values: Tensor
    fits: Tensor | None = None


@dataclass(frozen=True)
class SparseCode:
    """The code of sparse coordinates. Both parts are padded to multiples of 8 bytes.

    Args:
        indices: "rice", at 0.1% density 11.5 bits each, or "int32" (below 2^31).
        values: one of VALUE_CODES, from "fp64" to "sign".

    Raises ConfigError for any other, and for a message of int32 indices among more than 2^31 elements.
    """

    indices: Literal["rice", "int32"] = "rice"
    values: str = "fp32"

    def __post_init__(self) -> None:
        if self.indices not in ("rice", "int32"):
            raise ConfigError(f"indices must be 'rice' or 'int32', not {self.indices!r}")
        code_of(self.values, VALUE_CODES)

    @property
    def _values(self) -> ValueCode:
        return VALUE_CODES[self.values]

    def _index_bytes(self, count: int, numel: int) -> int:
        if self.indices == "rice":
            return rice_bytes(count, numel)
        if numel > 2**31:
            raise ConfigError(
                f"positions among {numel} elements of a bucket do not fit into int32: set indices='rice', or group "
                f"fewer parameters into one bucket"
            )
        return count * torch.int32.itemsize

    def nbytes(self, count: int, numel: int) -> int:
        """Return the bytes of a message of `count` of `numel` coordinates."""
        return aligned(self._index_bytes(count, numel)) + aligned(sum(self._values.sizes(count)))

    def encode(
        self, indices: Tensor, values: Tensor, numel: int, count: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode indices (int64, strictly ascending, below `numel`) and their values into one message.

        With `count` the message has the length for `count` coordinates; "rice" then accepts fewer. If clustered indices
        do not fit, those of the smallest values are left out.

        Returns the message (uint8), the encoded indices, and the values as receivers decode them, in the dtype of
        `values`, to subtract from the residual.
        """
        count = len(indices) if count is None else count
        messages, kept, arriving = self.encode_rows(indices, values, torch.tensor([len(indices)]), numel, count)
        return messages[0], indices if kept is None else indices[kept], arriving

    def send(self, indices: Tensor, values: Tensor, numel: int, checks: Checks) -> Sent:
        """Encode a fixed number of coordinates without waiting for the device.

        The message has room for all values; those of coordinates that are left out are not read. A ValueError for
        indices that do not ascend comes as PayloadError when `checks` are read.
        """
        count, fits = len(indices), None
        if self.indices == "rice" and count:
            counts = sent(torch.tensor([count]), indices.device)
            ascend, excess = measure_rows(indices.view(1, -1), counts, count, numel)
            checks.expect(ascend, lambda: f"indices have to ascend strictly from 0 or more to less than {numel}")
            counts = counts - excess
            order, fits = largest_first(values, counts)
            indices, values = indices.index_select(0, order), values.index_select(0, order)
            index_part = write_rows(indices.view(1, -1), counts, count, numel)[0]
        else:
            index_part = indices.int().view(torch.uint8)
        parts, arriving = self._values.encode(values, torch.tensor([count]))
        message = torch.zeros(self.nbytes(count, numel), dtype=torch.uint8, device=indices.device)
        index_bytes, value_bytes = self._parts(message.unsqueeze(0), count, numel)
        index_bytes[0] = index_part
        coded = torch.cat(parts)
        value_bytes[0, : len(coded)] = coded
        arriving = arriving.to(values.dtype)
        return Sent(message, indices, arriving if fits is None else arriving * fits, fits)

    def receive(
        self, messages: Tensor, count: int, numel: int, ranks: Sequence[int], checks: Checks | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decode messages that `ranks` have made by `send` to indices and values, `[rows, count]` each, without a wait.

        If fewer travel, their last index is repeated, with a value of 0. Indices lie in [0, numel) also in messages
        that cannot be right, of which `checks` tell as they are read. Raises PayloadError for a wrong length.
        """
        self._check_length(messages, count, numel, ranks)
        index_part, value_part = self._parts(messages, count, numel)
        fits = None
        if self.indices == "rice":
            indices, counts = read_rows(index_part, count, numel, ranks, checks)
            fits = torch.arange(count, device=messages.device) < counts.unsqueeze(1)
        else:
            indices = _checked(index_part, count, numel, ranks, checks)
        counts = torch.full((len(ranks),), count)
        values = self._values.decode(take_parts(value_part, self._values.sizes(counts)), counts, ranks, checks)
        values = values.view(len(ranks), count)
        return indices, values if fits is None else torch.where(fits, values, 0)

    def encode_rows(
        self, indices: Tensor, values: Tensor, counts: Tensor, numel: int, count: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Encode several messages at once, each with the length for `count`.

        Indices and values of all messages are concatenated; `counts` (int64, on the CPU) has the number of each. The
        smallest values beyond `count` are left out.

        Returns the messages `[rows, nbytes]`, the positions of encoded coordinates (int64, ascending; None for all),
        and their decoded values.
        """
        kept = None
        if self.indices == "rice":
            kept, counts = what_fits(indices, values, counts, count, numel)
            if kept is not None:
                indices, values = indices[kept], values[kept]
        messages = torch.zeros(len(counts), self.nbytes(count, numel), dtype=torch.uint8, device=indices.device)
        index_part, value_part = self._parts(messages, count, numel)
        if self.indices == "rice":
            index_part.copy_(encode_rice(indices, counts, count, numel))
        else:
            index_part.copy_(indices.int().view(torch.uint8).view(len(counts), -1))
        parts, arriving = self._values.encode(values, counts)
        _put_parts(value_part, parts, self._values.sizes(counts))
        return messages, kept, arriving.to(values.dtype)

    def decode(self, message: Tensor, count: int, numel: int, rank: int) -> tuple[Tensor, Tensor]:
        """Decode a message from `rank`: at most `count` of `numel` indices (int64, ascending) and values.

        Raises PayloadError for an invalid length, index or scale. Waits for the device.
        """
        indices, values, _ = self.decode_rows(message.unsqueeze(0), count, numel, [rank])
        return indices, values

    def decode_rows(
        self, messages: Tensor, count: int, numel: int, ranks: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode messages `[rows, nbytes]` of several ranks into concatenated indices and values.

        Also returns the number of each message, int64, on the CPU.
        """
        self._check_length(messages, count, numel, ranks)
        index_part, value_part = self._parts(messages, count, numel)
        if self.indices == "rice":
            indices, counts = decode_rice(index_part, count, numel, ranks)
        else:
            counts = torch.full((len(ranks),), count)
            indices = _checked(index_part, count, numel, ranks).view(-1)
        parts = take_parts(value_part, self._values.sizes(counts))
        return indices, self._values.decode(parts, counts, ranks), counts

    def _check_length(self, messages: Tensor, count: int, numel: int, ranks: Sequence[int]) -> None:
        if messages.dtype != torch.uint8 or messages.shape != (len(ranks), self.nbytes(count, numel)):
            raise PayloadError(
                f"the message from {named(ranks)} has {messages.numel()} bytes, but {count} coordinates take "
                f"{self.nbytes(count, numel)} from each"
            )

    def _parts(self, messages: Tensor, count: int, numel: int) -> tuple[Tensor, Tensor]:
        """Split messages into indices and values."""
        nbytes = self._index_bytes(count, numel)
        return messages[:, :nbytes], messages[:, aligned(nbytes) :]


def what_fits(indices: Tensor, values: Tensor, counts: Tensor, count: int, numel: int) -> tuple[Tensor | None, Tensor]:
    """Return the positions of coordinates that fit into Rice-coded messages for `count`, and their number per row.

    Positions are int64, ascending, without the smallest values; None if all fit. `counts` is int64, on the CPU.
    """
    kept, room = None, counts.clamp(max=count)
    if bool((room < counts).any()):
        kept, counts = _largest_of_rows(values, counts, room), room
        indices, values = indices[kept], values[kept]
    excess = rice_excess(indices, counts, count, numel)
    if excess.any():
        fit = _largest_of_rows(values, counts, counts - excess)
        kept, counts = fit if kept is None else kept[fit], counts - excess
    return kept, counts


def _largest_of_rows(values: Tensor, counts: Tensor, limits: Tensor) -> Tensor:
    """Return the positions of the `limits` largest values of each row: int64, ascending."""
    kept = torch.ones(len(values), dtype=torch.bool, device=values.device)
    ends = counts.cumsum(0)
    for row in (limits < counts).nonzero().flatten().tolist():
        of_row = slice(int(ends[row] - counts[row]), int(ends[row]))
        smallest = values[of_row].abs().argsort(descending=True, stable=True)[int(limits[row]) :]
        kept[of_row][smallest] = False
    return kept.nonzero().squeeze(1)


def _put_parts(rows: Tensor, parts: tuple[Tensor, ...], lengths: tuple[Tensor, ...]) -> None:
    """Write parts, each the concatenated bytes of all rows, side by side into rows padded with zeros."""
    rest = rows.shape[1] - sum(lengths, torch.zeros_like(lengths[0]))
    zeros = rows.new_zeros(int(rest.amax()))
    pieces = [part.split(length.tolist()) for part, length in zip(parts, lengths, strict=True)]
    pieces.append(tuple(zeros[:count] for count in rest.tolist()))
    rows.copy_(torch.cat([piece for row in zip(*pieces, strict=True) for piece in row]).view(rows.shape))


def _checked(index_part: Tensor, count: int, numel: int, ranks: Sequence[int], checks: Checks | None = None) -> Tensor:
    """Return rows of `count` int32 as int64 in [0, numel). Raises PayloadError, at once or as `checks` are read."""
    indices = read_as(index_part.reshape(-1), torch.int32).view(len(ranks), count)
    if count:
        first, last = indices[:, 0], indices[:, -1]
        # compared, not subtracted: the difference of two that are far apart wraps around
        right = (indices[:, 1:] > indices[:, :-1]).all(1) & (first >= 0) & (last <= numel - 1)  # int32 has no 2^31

        def problem() -> str:
            row = int((~right).nonzero()[0])
            return (
                f"the message from rank {ranks[row]} holds indices that do not ascend within a bucket of {numel} "
                f"elements (from {int(first[row])} to {int(last[row])}): it was damaged on the way, or that rank "
                f"runs another model or version"
            )

        expect(checks, right.all(), problem)
    return indices.long().clamp_(0, numel - 1)
