"""Fields of a few bits and Rice codes: C and Triton give the bytes of the specification, and read them back."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.support.oracle import (
    Sizes,
    all_implementations,
    native,
    specification,
)


@all_implementations(numel=st.integers(0, 300), width=st.integers(0, 7), seed=st.integers(0, 2**20))
def test_pack_small(of, numel, width, seed):
    fields = torch.randint(2**width, (numel,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = of.pack_small(fields, width)
    assert torch.equal(packed, specification.pack_small(fields, width))
    assert torch.equal(of.unpack_small(packed, numel, width), fields)


@all_implementations(
    rows=Sizes(
        *(
            st.lists(st.lists(st.integers(0, 5) | st.integers(0, gap), max_size=most), min_size=1, max_size=4)
            for gap, most in ((700, 12), (3000, 100))
        )
    ),
    b=st.integers(0, 20),
    seed=st.integers(0, 2**20),
)
def test_rice(of, rows, b, seed):
    counts = torch.tensor([len(gaps) for gaps in rows])
    length = int(counts.amax()) + seed % 3
    lists = [(torch.tensor(gaps, dtype=torch.int64) + 1).cumsum(0) - 1 for gaps in rows]
    last = torch.tensor([int(row[-1]) if len(row) else -1 for row in lists])
    indices = last.unsqueeze(1).repeat(1, length)  # behind each row's own, the last of them
    for row, mine in zip(indices, lists, strict=True):
        row[: len(mine)] = mine
    numel = max(1, int(last.amax()) + 1)
    room = numel + seed % 5 - 2
    smallest, quotients = of.rice_measure(indices, counts, b, room)
    assert smallest.tolist() == [min([*gaps, room - sum(gaps) - len(gaps)]) if gaps else 0 for gaps in rows]
    assert quotients.tolist() == [sum(gap >> b for gap in gaps) for gaps in rows]
    for mine, other in zip((smallest, quotients), specification.rice_measure(indices, counts, b, room), strict=True):
        assert torch.equal(mine, other)

    unary = [len(gaps) * (b // 8) + -(-len(gaps) // 8) * (b % 8) for gaps in rows]
    needed = [u - (-sum((gap >> b) + 1 for gap in gaps) // 8) for u, gaps in zip(unary, rows, strict=True)]
    packed = of.rice_pack(indices, counts, b, max(needed) + 3)
    assert torch.equal(packed, specification.rice_pack(indices, counts, b, max(needed) + 3))
    for each in (of, specification):
        arrived, wrong = each.rice_unpack(packed, counts, b, numel, length)
        assert not wrong.any() and torch.equal(arrived, indices)
        if counts.any():
            _, wrong = each.rice_unpack(packed, counts, b, numel - 1, length)
            assert torch.equal(wrong, last == numel - 1)
            try:
                short = each.rice_pack(indices, counts, b, max(needed) - 1)
            except ValueError as error:
                assert each is native and "do not fit" in str(error)
            else:  # nobody waits for that on a device, but who reads finds out
                _, wrong = each.rice_unpack(short, counts, b, numel, length)
                assert torch.equal(wrong, torch.tensor(needed) == max(needed))
    damaged = packed ^ torch.randint(256, packed.shape, generator=torch.Generator().manual_seed(seed)).byte()
    for message in (damaged, torch.zeros_like(packed), torch.full_like(packed, 255)):
        ours, wrong = of.rice_unpack(message, counts, b, numel, length)
        theirs, wrong_too = specification.rice_unpack(message, counts, b, numel, length)
        assert torch.equal(wrong, wrong_too) and torch.equal(ours[~wrong], theirs[~wrong])
