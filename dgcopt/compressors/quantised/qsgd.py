"""QSGD (Alistarh, Grubic, Li, Tomioka & Vojnovic, NeurIPS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...coding.scaled import decode_scaled, encode_scaled, scaled_bytes
from ...coding.values import packed_bytes
from ...errors import ConfigError
from ...kernels import BLOCK, Put, put_levels, round_levels, sent, tensor_norms
from ..context import Context
from .base import Encoded

__all__ = ["QSGD"]


@dataclass(eq=False)
class QSGD(Encoded):
    """Rounds each coordinate at random to one of its two neighbouring levels, with an unchanged expectation.

        p = s * |v| / ||v||;  level = floor(p), or floor(p) + 1 with probability p - floor(p)
        send ||v|| * sign(v) * level / s

    for each block of a tensor (called bucket in the paper). Unbiased and without memory.

    Args:
        levels: s, the number of levels above zero; 1, 3, 7, 15, 31, 63 or 127 use all bits. More means less noise.
        block: coordinates per norm, a multiple of 64, or None for whole tensors; fewer means less noise, and 4 bytes
            more per block.
        norm: "l2" as in the paper's theory, or "max", which wastes no level: less noise.
        seed: seed of the random numbers.

    Costs one allgather of 1 + ceil(log2(levels + 1)) bits per coordinate and 4 bytes per block. Raises ConfigError for
    invalid settings, PayloadError for a damaged message. Source: Alistarh, Grubic, Li, Tomioka &
    Vojnovic, "QSGD", NeurIPS 2017, section 3; with fixed-width fields instead of Elias codes.
    """

    levels: int = 7
    block: int | None = 512
    norm: Literal["l2", "max"] = "l2"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.levels <= 127:
            raise ConfigError(f"levels must be a whole number from 1 to 127, not {self.levels!r}")
        if self.block is not None and (self.block < BLOCK or self.block % BLOCK):
            raise ConfigError(f"block must be a positive multiple of {BLOCK}, or None, not {self.block!r}")

    @property
    def _magnitude_bits(self) -> int:
        return self.levels.bit_length()

    def _blocks(self, ctx: Context) -> tuple[Tensor, int]:
        """Return the block that each 64 elements belong to, int64 on the device, and the number of blocks."""
        if self.block is None:
            return ctx.tensors.of_block, len(ctx.segments)
        if "blocks" not in ctx.scratch:
            width, found, count = self.block // BLOCK, [], 0
            for segment in ctx.segments:
                found.append(torch.arange(-(-segment.numel // BLOCK)).floor_divide_(width).add_(count))
                count += -(-segment.numel // self.block)
            ctx.scratch["blocks"] = sent(torch.cat(found), ctx.device), count
        return ctx.scratch["blocks"]

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        place, count = self._blocks(ctx)
        largest, squares = tensor_norms(values, place, count)
        norms = largest if self.norm == "max" else squares.sqrt().float()
        return encode_scaled(norms, round_levels(values, norms, place, self.levels, ctx.key(self.seed)))

    def decode_into(self, out: Tensor, how: Put, message: Tensor, ctx: Context, rank: int) -> None:
        (place, count), width = self._blocks(ctx), 1 + self._magnitude_bits
        norms, packed = decode_scaled(message, count, packed_bytes(ctx.numel, width), rank, ctx.checks)
        highest = put_levels(packed, self._magnitude_bits, norms / self.levels, place, out, how)
        ctx.checks.expect(
            highest <= self.levels,
            lambda: f"the message from rank {rank} holds a level above the {self.levels} that there are",
        )

    def payload_bytes(self, ctx: Context) -> int:
        return scaled_bytes(self._blocks(ctx)[1], packed_bytes(ctx.numel, 1 + self._magnitude_bits))
