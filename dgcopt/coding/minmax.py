"""MinMaxUInt8, the 8-bit quantiser of Bagua: 256 levels between the smallest and the largest value of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PayloadError
from ..kernels import LARGEST, Mixture, minmax_codes, minmax_ends, minmax_of_mean, put_minmax

__all__ = ["MinMaxUInt8"]

_HEADER = 2 * torch.float32.itemsize


@dataclass(frozen=True)
class MinMaxUInt8:
    """Chunks of `length` values in a byte each, with a smallest and a largest value in front.

        scale = 255 / (max - min + 1e-7);  upper = rint(max * scale);  lower = upper - 255
        code = min(rint(x * scale), upper) - lower;  x' = (code + lower) / scale

    in float32, rounding half to even. Zero stays zero. |x - x'| is at most (max - min + 1e-7) / 510 and two units in
    the last place of the largest number; so differences below 4e-10 are lost, and in chunks with a maximum of 65,000
    times their range neighbouring levels become one.

    Unlike Bagua's, it holds codes within 0 and 255, which they leave by one where roundings add up: as a byte, the
    smallest value would become the largest. NaN and Inf travel as zero.

    Costs 8 + `length` bytes per chunk. Source: `MinMaxUInt8` of BaguaSys/bagua.
    """

    length: int

    @property
    def nbytes(self) -> int:
        """Length of a chunk's message."""
        return _HEADER + self.length

    def encode(self, chunks: Tensor, mixture: Mixture | None = None) -> Tensor:
        """Messages `[chunks, nbytes]`, uint8, of `[chunks, length]` values of any floating dtype, mixed if asked."""
        messages = torch.empty(len(chunks), self.nbytes, dtype=torch.uint8, device=chunks.device)
        ends = minmax_ends(chunks, mixture)
        messages[:, :_HEADER] = ends.view(torch.uint8)
        minmax_codes(chunks, ends, messages[:, _HEADER:])
        return messages

    def encode_mean(self, ends: Tensor, codes: Tensor, divisor: int) -> Tensor:
        """`encode` of the sum of what `ranks` sent, as `parts` has it, over `divisor`. Shape `[1, nbytes]`."""
        message = torch.empty(1, self.nbytes, dtype=torch.uint8, device=codes.device)
        message[0, :_HEADER] = minmax_of_mean(codes, ends, divisor, message[0, _HEADER:]).view(torch.uint8)
        return message

    def decode(self, messages: Tensor, ranks: Sequence[int]) -> Tensor:
        """The values `[chunks, length]`, float32, of messages that came from `ranks`.

        Raises PayloadError if length or range cannot be right. Waits for the device.
        """
        chunks = torch.empty(len(ranks), self.length, device=messages.device)
        for ends, codes, values in zip(*self.parts(messages, ranks), chunks, strict=True):
            put_minmax(codes, ends, values, "set")
        return chunks

    def parts(self, messages: Tensor, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The ends `[chunks, 2]` and the codes `[chunks, length]` of messages that came from `ranks`.

        Raises PayloadError if length or range cannot be right. Waits for the device.
        """
        if messages.dtype != torch.uint8 or messages.shape != (len(ranks), self.nbytes):
            raise PayloadError(
                f"messages from ranks {list(ranks)} have {messages.numel()} bytes where chunks of {self.length} values "
                f"take {len(ranks) * self.nbytes}"
            )
        ends = messages[:, :_HEADER].clone(memory_format=torch.contiguous_format).view(torch.float32)
        for rank, (low, high) in zip(ranks, ends.tolist(), strict=True):
            if not -LARGEST <= low <= high <= LARGEST:
                raise PayloadError(
                    f"the message from rank {rank} holds a range that is not finite, too large or upside down: it was "
                    f"damaged on the way, or that rank runs another version"
                )
        return ends, messages[:, _HEADER:]
