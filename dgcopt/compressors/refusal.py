"""How an owner of coordinates makes all ranks abort the step when a message to it is damaged.

Only the owner has received that message. Its part of the gather that follows is then a refusal: 8 bytes of ones, with
which no valid message begins, and 2 that name the damaged message's sender and fault. This adds no collective and no
byte.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ..collectives import AllGather, everyone
from ..errors import PayloadError
from .context import Context

__all__ = ["REFUSED", "Refusal", "decode_or_refuse", "gather_from_owners"]

log = logging.getLogger("dgcopt")

REFUSED = -1
"""Each of the first four 16-bit words of a refusal: NaN as a number of any dtype, a negative count of coordinates."""

_MARK = [REFUSED] * 4
_NBYTES = 2 * len(_MARK) + 2
_RANKS = 2**14
"""Number of ranks that a refusal can name."""


@dataclass(frozen=True)
class Refusal:
    """A damaged message that an owner has received.

    Attributes:
        sender: the rank that has sent it; the owner if that is not known.
        readable: True if it could be decoded, to NaN or Inf.
    """

    sender: int
    readable: bool

    def replace(self, message: Tensor) -> None:
        """Overwrite the owner's message to all ranks."""
        words = torch.tensor([*_MARK, 2 * (self.sender % _RANKS) + self.readable], dtype=torch.int16)
        refusal = words.view(torch.uint8)[: len(message)].to(message.device)  # a tiny bucket has no room for the sender
        message[: len(refusal)] = refusal


Decoded = TypeVar("Decoded")


def decode_or_refuse(
    messages: Tensor, decode: Callable[[Tensor, Sequence[int]], Decoded], ctx: Context
) -> tuple[Decoded, Refusal | None]:
    """Decode the messages `[ranks, nbytes]` to this owner by `decode`; zeros if it refuses one.

    `decode` takes messages and the ranks that have sent them, and raises PayloadError. Zeros must be valid.
    """
    try:
        return decode(messages, everyone(ctx.rank, ctx.size)), None
    except PayloadError:
        sender = find_damaged(messages, lambda message, rank: decode(message.unsqueeze(0), [rank]), ctx)
        return decode(torch.zeros_like(messages), everyone(ctx.rank, ctx.size)), Refusal(sender, readable=False)


def find_damaged(messages: Tensor, decode: Callable[[Tensor, int], object], ctx: Context) -> int:
    """Return the first rank whose message `decode` refuses with PayloadError, and log why."""
    for rank, message in zip(everyone(ctx.rank, ctx.size), messages, strict=True):
        try:
            decode(message, rank)
        except PayloadError as error:
            log.warning("dgcopt: rank %s: in bucket %d, %s", ctx.rank, ctx.index, error)
            return rank
    return ctx.rank


def gather_from_owners(message: Tensor, refusal: Refusal | None, ctx: Context) -> Generator[AllGather, Tensor, Tensor]:
    """Return the messages of all owners, refusals as zeros; if there is one, abort the step on all ranks.

    Ends it as a step in which NaN or Inf has arrived or, if a message cannot be decoded, with PayloadError. This
    owner's message is overwritten if it refuses.
    """
    if refusal is not None:
        refusal.replace(message)
    messages = yield AllGather(message)
    width = min(_NBYTES, messages.shape[1] // 2 * 2)
    words = messages[:, :width].clone(memory_format=torch.contiguous_format).cpu().view(torch.int16).tolist()
    ranks = everyone(ctx.rank, ctx.size)
    refusing = [owner for owner, row in zip(ranks, words, strict=True) if row[: len(_MARK)] == _MARK]
    if refusing:
        messages = messages.clone()  # on a simulated wire other ranks read the same tensor
    for owner in refusing:
        messages[owner] = 0  # valid in every code
        sender, readable = divmod((*words[owner], -1)[len(_MARK)], 2)
        is_known = 0 <= sender < ctx.size  # NaN in the owner's own message has the same mark
        if readable or not is_known:
            ctx.checks.refuse([ranks[sender] if is_known else owner])
        else:
            ctx.checks.expect(torch.tensor(False), partial(_describe, ctx.rank, owner, ranks[sender]))
    return messages


def _describe(rank: int, owner: int, sender: int) -> str:
    refused = "a message" if sender == owner else f"a message from rank {sender}"
    return (
        f"rank {rank}: rank {owner} has refused {refused}: it was damaged on the way, or that rank runs another model "
        f"or version"
    )
