"""Positions drawn at random: the same in C as in torch, each within its span, and all alike likely."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.support.oracle import all_implementations, specification


@all_implementations(
    count=st.integers(0, 300),
    longest=st.sampled_from([1, 2, 10, 1000, 2**31 - 1]),
    key=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 2**20),
)
def test_draw_from_spans(of, count, longest, key, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    starts = lengths.cumsum(0) - lengths
    drawn = of.draw_from_spans(starts, lengths, key)
    assert torch.equal(drawn, specification.draw_from_spans(starts, lengths, key))
    assert ((starts <= drawn) & (drawn < starts + lengths)).all()


def test_all_of_a_span_are_drawn_alike_often():
    count, length = 70_000, 7
    drawn = specification.draw_from_spans(torch.zeros(count).long(), torch.full((count,), length), 0x123456789ABCDEF0)
    deviation = (count * (1 / length) * (1 - 1 / length)) ** 0.5
    assert (torch.bincount(drawn, minlength=length) - count / length).abs().max() < 4 * deviation
