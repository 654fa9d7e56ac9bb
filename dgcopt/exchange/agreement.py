"""What must be equal on all ranks, compared in words: a hash first, the words only if hashes differ."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator

import torch
from torch import Tensor

from ..collectives import AllGather, Collective
from ..errors import MismatchError

__all__ = ["compare"]


def compare(lines: list[str], rank: int, what: str, remedy: str = "") -> Generator[Collective, Tensor, None]:
    """Exchange `lines` with all ranks; every rank must do so at the same place.

    Raises MismatchError on every rank if any differs from rank 0, saying where first, and the `remedy`.
    """
    digest = bytearray(hashlib.sha256("\n".join(lines).encode()).digest())
    hashes = yield _bytes(digest, f"hash of {what}")
    others = [other for other in range(len(hashes)) if not torch.equal(hashes[other], hashes[0])]
    if not others:
        return
    text = "\n".join(lines).encode()
    length = torch.tensor([len(text)], dtype=torch.int64)
    lengths = yield AllGather(length, group="control", label=f"length of {what}")
    rows = yield _bytes(bytearray(text.ljust(int(lengths.max()), b"\n")), what)
    told = [bytes(row.tolist()).decode(errors="replace").rstrip("\n").split("\n") for row in rows]
    differences = []
    for other in others[:4]:
        for here, there in itertools.zip_longest(told[0], told[other], fillvalue="(nothing)"):
            if here != there:
                differences.append(f"rank 0 has [{here}], rank {other} has [{there}]")
                break
    raise MismatchError(
        f"ranks disagree, seen on rank {rank}: {'; '.join(differences)}. Build the same model with the same settings "
        f"on every rank.{remedy}"
    )


def _bytes(data: bytearray, label: str) -> AllGather:
    return AllGather(torch.frombuffer(data, dtype=torch.uint8), group="control", label=label)
