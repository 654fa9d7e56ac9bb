"""MinMaxUInt8, the 8-bit quantiser of Bagua: 256 levels between the smallest and the largest value of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PayloadError
from ..kernels import LARGEST, Mixture, minmax_codes, minmax_ends, minmax_of_mean, put_minmax
from .checks import Checks, expect

__all__ = ["MinMaxUInt8"]

_HEADER = 2 * torch.float32.itemsize


@dataclass(frozen=True)
class MinMaxUInt8:
    """Codes chunks of `length` values in a byte each, after their smallest and largest value.

        scale = 255 / (max - min + 1e-7), at most 2^127 / |x|;  upper = rint(max * scale);  lower = upper - 255
        code = min(rint(x * scale), upper) - lower;  x' = (code + lower) / scale

    in float32, rounding half to even. Zero stays zero. |x - x'| is at most (max - min + 1e-7) / 510 and two units in
    the last place of the largest number; so differences below 4e-10 are lost, and in chunks with a maximum of 65,000
    times their range neighbouring levels become one.

    Unlike Bagua's, it clamps codes to 0 ... 255: rounding errors can exceed the range by one, and as a byte the
    smallest value would become the largest. NaN and Inf become zero.

    Costs 8 + `length` bytes per chunk. Source: `MinMaxUInt8` of BaguaSys/bagua.
    """

    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk's message."""
        return _HEADER + self.length

    def encode(self, chunks: Tensor, mixture: Mixture | None = None) -> Tensor:
        """Encode values `[chunks, length]` of any floating dtype as uint8 `[chunks, nbytes]`, mixed if asked."""
        messages = torch.empty(len(chunks), self.nbytes, dtype=torch.uint8, device=chunks.device)
        ends = minmax_ends(chunks, mixture)
        messages[:, :_HEADER] = ends.view(torch.uint8)
        minmax_codes(chunks, ends, messages[:, _HEADER:])
        return messages

    def encode_mean(self, ends: Tensor, codes: Tensor, divisor: int) -> Tensor:
        """Encode the sum of the messages of `ranks`, given as `parts`, over `divisor`: `[1, nbytes]`."""
        message = torch.empty(1, self.nbytes, dtype=torch.uint8, device=codes.device)
        message[0, :_HEADER] = minmax_of_mean(codes, ends, divisor, message[0, _HEADER:]).view(torch.uint8)
        return message

    def decode(self, messages: Tensor, ranks: Sequence[int], checks: Checks | None = None) -> Tensor:
        """Decode messages from `ranks` into float32 `[chunks, length]`. Raises the errors of `parts`."""
        return self.decode_parts(*self.parts(messages, ranks, checks))

    def decode_parts(self, ends: Tensor, codes: Tensor) -> Tensor:
        """Decode `parts` into float32 `[chunks, length]`."""
        chunks = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        for low_and_high, fields, values in zip(ends, codes, chunks, strict=True):
            put_minmax(fields, low_and_high, values, "set")
        return chunks

    def parts(self, messages: Tensor, ranks: Sequence[int], checks: Checks | None = None) -> tuple[Tensor, Tensor]:
        """Split messages from `ranks` into ends `[chunks, 2]` and codes `[chunks, length]`.

        Raises PayloadError for an invalid length; for an invalid range, at once or when `checks` are read.
        """
        if messages.dtype != torch.uint8 or messages.shape != (len(ranks), self.nbytes):
            raise PayloadError(
                f"messages from ranks {list(ranks)} have {messages.numel()} bytes, but chunks of {self.length} values "
                f"take {len(ranks) * self.nbytes}"
            )
        ends = messages[:, :_HEADER].clone(memory_format=torch.contiguous_format).view(torch.float32)
        low, high = ends.unbind(1)
        right = (low >= -LARGEST) & (low <= high) & (high <= LARGEST)

        def problem() -> str:
            return (
                f"the message from rank {ranks[int((~right).nonzero()[0])]} holds a range that is not finite, too "
                f"large or upside down: it was damaged on the way, or that rank runs another version"
            )

        expect(checks, right.all(), problem)
        return ends, messages[:, _HEADER:]
