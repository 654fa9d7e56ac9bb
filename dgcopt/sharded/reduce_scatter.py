"""A reduce-scatter among the shards of one replica whose messages are coded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..coding import VALUE_CODES, decode_rows, encode_rows
from ..coding.minmax import MinMaxUInt8
from ..coding.unbiased import Unbiased
from ..errors import CommError, ConfigError, PayloadError

__all__ = ["CompressedReduceScatter", "compress_reduce_scatter"]

log = logging.getLogger("dgcopt")


class Code(Protocol):
    """A code of a float row, as uint8."""

    def encode(self, row: Tensor, key: int) -> Tensor:
        """Return the message of a row; `key` seeds random rounding."""

    def decode(self, message: Tensor, length: int, rank: int) -> Tensor:
        """Return the row of `length` values, float32. Raises PayloadError for a damaged message of `rank`."""


@dataclass(frozen=True)
class Nearest:
    """Half precision, rounded to the nearest."""

    name: str

    def encode(self, row: Tensor, key: int) -> Tensor:
        return encode_rows(row.view(1, -1), VALUE_CODES[self.name])[0][0]

    def decode(self, message: Tensor, length: int, rank: int) -> Tensor:
        return decode_rows(message.view(1, -1), length, VALUE_CODES[self.name], [rank])[0].float()


@dataclass(frozen=True)
class MinMax:
    """ByteGrad's code: a byte per value, rounded to the nearest of 256 levels between the row's ends."""

    def encode(self, row: Tensor, key: int) -> Tensor:
        return MinMaxUInt8(len(row)).encode(row.view(1, -1))[0]

    def decode(self, message: Tensor, length: int, rank: int) -> Tensor:
        return MinMaxUInt8(length).decode(message.view(1, -1), [rank])[0]


CODES: dict[str, Code] = {
    "fp16": Nearest("fp16"),
    "bf16": Nearest("bf16"),
    "int8": Unbiased(),
    "bytegrad": MinMax(),
}


def compress_reduce_scatter(model: nn.Module, code: str = "int8") -> None:
    """Let the reduce-scatter of every `fully_shard` group of `model` send gradients in a code; on all ranks alike.

    Raises ConfigError for a model without such groups, and for an unknown code. See `CompressedReduceScatter`.
    """
    from torch.distributed.fsdp import FSDPModule

    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not groups:
        raise ConfigError("the model has no module that fully_shard has sharded: call fully_shard first")
    for module in groups:
        module.set_custom_reduce_scatter(CompressedReduceScatter(code))  # type: ignore[arg-type]  # by its calls


class CompressedReduceScatter:
    """A reduce-scatter within a replica whose messages are coded; for `FSDPModule.set_custom_reduce_scatter`.

    Each rank codes its gradient once for every other rank, and adds up the received ones in rank order, in float32.
    NaN or Inf in a message, or a damaged one, makes all of the shard NaN, so that no rank takes the step; an exception
    on the rank that has received it would leave the others waiting.

    No residual is kept: a rank's residual would be as large as its whole gradient, which sharding is to avoid. "int8"
    is unbiased instead: it rounds up with the probability of the fractional part. Random numbers follow from the rank
    and the gradient itself, so a resumed run repeats them. The other codes round to the nearest; their error is lost.

    Args:
        code: "bf16" or "fp16", 2 bytes per value. "int8", 1.02 bytes: off by less than 1/127 of the largest of 256
            neighbours. "bytegrad", 1 byte: off by up to 1/510 of the range of the rank's whole message.

    Costs an alltoall of the code's bytes in place of a reduce-scatter of 4 bytes a value. Raises ConfigError for other
    codes, and for a reduction other than a sum or mean; CommError where a rank is lost. The log names the sender of
    a damaged message. Sources: QSGD (Alistarh et al., NeurIPS 2017) for "int8", Bagua for "bytegrad".
    """

    def __init__(self, code: str = "int8") -> None:
        if code not in CODES:
            raise ConfigError(f"code must be one of {', '.join(CODES)}, not {code!r}")
        self.code = code

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code!r})"

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP2's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce `input_tensor`, a row for each rank, to this rank's `output_tensor`; done when it returns."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ConfigError(
                f"{self!r} adds up or averages gradients, and FSDP2 asks for another reduction, as it does after "
                f"set_gradient_divide_factor(): scale the loss in its place, or leave the code out"
            )
        rows = input_tensor.view(group.size(), -1)
        messages = torch.stack([self._message(row, to) for to, row in enumerate(rows)])
        arrived = torch.empty_like(messages)
        try:
            dist.all_to_all_single(arrived, messages, group=group)
        except RuntimeError as error:
            raise CommError(
                f"rank {dist.get_rank()}: gradients were not reduced among ranks "
                f"{dist.get_process_group_ranks(group)}, which hold shards of one replica: "
                f"{str(error).splitlines()[0]} Look for a rank of these that died."
            ) from error
        total = torch.zeros(rows.shape[1], dtype=torch.float32, device=rows.device)
        for rank, message in enumerate(arrived):
            try:
                total += CODES[self.code].decode(message[1:], len(total), rank)
            except PayloadError as error:
                log.error("dgcopt: rank %d: no rank takes this step: %s", dist.get_rank(), error)
                total.fill_(torch.nan)
        total.masked_fill_(arrived[:, 0].ne(0).any(), torch.nan)
        output_tensor.copy_(total if op == dist.ReduceOp.SUM else total / len(rows))

    def _message(self, row: Tensor, to: int) -> Tensor:
        """Return a message: a byte that is 1 if the row holds NaN or Inf, which no code keeps, and the code."""
        is_spoiled = ~row.isfinite().all()
        return torch.cat([is_spoiled.view(1).to(torch.uint8), CODES[self.code].encode(row, _key(row, to))])


def _key(row: Tensor, to: int) -> int:
    """Return the seed of this rank's message to a rank, from the row itself."""
    told = f"{dist.get_rank()} {to} {float(row.sum(dtype=torch.float64)).hex()}"
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little")
