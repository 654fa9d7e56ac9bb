"""Comparison of lines that must be equal on all ranks: a hash first, the lines only if hashes differ."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..collectives import AllGather, Collective, Exchange, carried, everyone, watched
from ..errors import CommError, MismatchError
from .pieces import in_pieces

__all__ = ["DAMAGED", "SAME_MODEL", "announced", "compare"]

Result = TypeVar("Result")

LONG = 120
"""Longest line, in characters, that an error shows whole."""

LONGEST = 2**26
"""Largest size, in bytes, of lines that are compared word for word."""

SAME_MODEL = "Build the same model with the same settings on every rank."

DAMAGED = "a message was damaged on the way, which dgcopt.init(checksums=True) finds."

SAME_MESSAGES = (
    "All ranks must yield the same collectives in the same order, of one shape, dtype and op: where lengths depend on "
    "data, exchange them first and pad to the largest, as dgcopt.Threshold does."
)


def announced(
    exchange: Generator[Collective, Tensor, Result], label: str, rank: int
) -> Generator[Collective, Tensor, Result]:
    """Run an exchange; the ranks compare each of its collectives, and its end, before they start it.

    Raises MismatchError, on all ranks, where these differ: libraries would end the process, or wait for ever.
    """

    def of(words: str, like: Collective | None) -> Generator[Collective, Tensor, None]:
        def send_like(collective: Collective) -> None:
            if like is not None and like.group != "world":  # some ranks do not take part in it
                collective.send_beside(like)

        return watched(compare([words], rank, f"messages of {label}", SAME_MESSAGES), send_like)

    def carry(collective: Collective) -> Exchange:
        own = [f"{name}={getattr(collective, name)!r}" for name in ("op", "root") if hasattr(collective, name)]
        yield from of(", ".join([f"{label}: {collective.describe()}", *own]), collective)
        return (yield collective)

    result = yield from carried(exchange, carry)
    yield from of(f"{label}: no more collectives", None)
    return result


def compare(lines: list[str], rank: int, what: str, remedy: str = SAME_MODEL) -> Generator[Collective, Tensor, None]:
    """Exchange `lines` with all ranks; every rank must do so at the same place.

    Raises MismatchError on every rank if any differs from rank 0, saying where first, and the `remedy`; CommError for a
    message that cannot be right.
    """
    digest = bytearray(hashlib.sha256("\n".join(lines).encode()).digest())
    hashes = yield _bytes(digest, f"hash of {what}")
    ranks = everyone(rank, len(hashes))
    others = [other for other in ranks if not torch.equal(hashes[other], hashes[0])]
    if not others:
        return
    text = "\n".join(lines).encode()[:LONGEST]
    length = torch.tensor([len(text)], dtype=torch.int64)
    lengths = (yield AllGather(length, group="agreement", label=f"length of {what}")).flatten().tolist()
    for other, theirs in zip(ranks, lengths, strict=True):
        if not 0 <= theirs <= LONGEST:
            raise CommError(f"rank {rank}: {what}, from rank {other}, has a length of {theirs}: {DAMAGED}")

    def send(start: int, stop: int) -> AllGather:
        return _bytes(bytearray(text[start:stop].ljust(stop - start, b"\n")), what)

    rows = yield from in_pieces(max(lengths), len(lengths), send)
    told = [row.rstrip(b"\n").decode(errors="replace").split("\n") for row in rows]
    differences = []
    for other in others[:4]:
        for here, there in itertools.zip_longest(told[0], told[other], fillvalue="(nothing)"):
            if here != there:
                mine, theirs = _short(here, there), _short(there, here)
                differences.append(f"rank {ranks[0]} has [{mine}], rank {other} has [{theirs}]")
                break
    if not differences:
        raise CommError(
            f"rank {rank}: the hashes of {what} from rank(s) {others} and rank {ranks[0]} differ, but their texts are "
            f"equal: {DAMAGED}"
        )
    raise MismatchError(f"ranks disagree, seen on rank {rank}: {'; '.join(differences)}. {remedy}")


def _short(line: str, other: str) -> str:
    """Shorten a long line: leave out settings before and after those that differ from the other line."""
    if max(len(line), len(other)) <= LONG:
        return line
    mine, theirs = line.split(", "), other.split(", ")
    before = _alike(mine, theirs)
    after = _alike(mine[:before:-1], theirs[:before:-1])
    whose = re.match(r"[^([{]*[([{]?", line)
    left_out = [f"{whose[0]}..."] if before and whose else []
    return ", ".join([*left_out, *mine[before : len(mine) - after], *(["..."] if after else [])])


def _alike(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Return the number of equal elements before the first that differs."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def _bytes(data: bytearray, label: str) -> AllGather:
    return AllGather(torch.frombuffer(data, dtype=torch.uint8), group="agreement", label=label)
